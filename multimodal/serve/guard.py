"""Checks of every request: keys, size and pace of the body, the end of the server; and counts."""

import asyncio
import contextlib
import hmac
import json
import os
import re
import time
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.middleware.cors import CORSMiddleware

from multimodal.serve.errors import HttpError, as_http
from multimodal.serve.options import LOOPBACK, ServeOptions

OPEN = ("/", "/health", "/docs", "/openapi.json")  # without a key
FILES = ("/page/", "/docs-files/")  # without a key, too
MOST_HEADERS = 64 << 10  # bytes
MOST_JSON = 128_000_000  # bytes of a body that is no form: all of it is held, as values, too
MOST_VALUES = 1_000_000  # of such a body, judged by its commas and brackets
PORT = re.compile(r":\d*$")
DRAINED = 4 << 20  # bytes of a refused body that are read
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # the folder in which prometheus_client keeps the counts of several processes
PATIENCE = 30.0  # seconds for the next part of a body
PACE = 256  # bytes a second that a body must bring after `PATIENCE`
PROTOCOL_KEY = "openai-insecure-api-key."  # a key as browsers send it with a WebSocket


class Metrics:
    """Counts for /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        self.requests = Counter("multimodal_requests", "Requests by path and status", ["path", "status"], **own)
        self.seconds = Histogram("multimodal_request_seconds", "Time to the end of the answer", ["path"], **own)
        self.active = Gauge("multimodal_requests_active", "Requests without an answer yet",
                            multiprocess_mode="livesum", **own)  # fmt: skip
        self.batches = Histogram("multimodal_batch_size", "Requests that shared a batch", ["model"],
                                 buckets=(1, 2, 4, 8, 16, 32, 64), **own)  # fmt: skip
        self.audio = Counter("multimodal_audio_seconds", "Seconds of sound transcribed", **own)

    def text(self) -> bytes:
        """All counts, with those of the other workers of a supervisor."""
        registry = self.registry
        if SHARED in os.environ:
            MultiProcessCollector(registry := CollectorRegistry())
        return generate_latest(registry)


class Guard:
    """ASGI layer around the application. `active`: requests and sockets that run; `draining`: new ones are refused."""

    def __init__(self, app: Any, options: ServeOptions, metrics: Metrics):
        self.app, self.options, self.metrics = app, options, metrics
        self.keys = [key.encode() for key in options.known_keys()]
        self.hosts = {*LOOPBACK, "[::1]", *(urlsplit(origin).hostname for origin in options.cors)}
        self.most = int(options.max_upload_mb * 1e6)
        self.active, self.draining = 0, False
        self.entry: Any = self._guarded
        if options.cors:  # outside: browsers ask without a key first, and read refusals with its headers alone
            self.entry = CORSMiddleware(
                self._guarded, allow_origins=options.cors, allow_methods=["*"], allow_headers=["*"]
            )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.entry(scope, receive, send)

    async def _guarded(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        began, status, faults = time.perf_counter(), [500], list[HttpError]()
        self.active += 1
        self.metrics.active.set(self.active)

        async def noted(message: Any) -> None:
            if faults:  # of the body, for which the framework has an answer of its own
                if message["type"] == "http.response.start":
                    status[0] = faults[0].status
                    await refuse(scope, receive, send, faults[0])
                return
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, self._limited(scope, receive, faults), noted)
            if scope["type"] == "websocket":
                status[0] = 101
        except HttpError as error:
            status[0] = error.status
            await refuse(scope, receive, send, error)
        finally:
            self.active -= 1
            self.metrics.active.set(self.active)
            path = getattr(scope.get("route"), "path", "other")  # not what a client makes up
            self.metrics.requests.labels(path, status[0]).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - began)

    def _check(self, scope: Any) -> None:
        """Raise HttpError for a request that must not pass."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        line = (scope["raw_path"], scope["query_string"])
        if sum(map(len, (*line, *(part for pair in scope["headers"] for part in pair)))) > MOST_HEADERS:
            raise HttpError(431, "the headers are too large")
        if self.draining and scope["path"] != "/health":
            raise HttpError(503, "the server is stopping", "stopping", seconds=5)
        public = scope["path"] in OPEN or scope["path"].startswith(FILES)
        if self.keys and not public and not self._has_key(headers):
            raise HttpError(401, "no valid key: send the header Authorization: Bearer KEY", "invalid_api_key")
        if not self.keys:
            self._check_page(headers)
        if {b"content-length", b"transfer-encoding"} <= headers.keys():  # RFC 9112, 6.1
            raise HttpError(400, "headers: expected content-length or transfer-encoding (got both)")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise HttpError(400, f"content-length: expected a number (got {length[:20]!r})")
        if int(length) > (most := self._most(scope)):
            raise _too_large(most)

    def _check_page(self, headers: dict[bytes, bytes]) -> None:
        """Raise HttpError for a request that a browser sends for another site's page, also one whose name has been made
        to lead here (DNS rebinding): a server without keys trusts all that reaches it."""
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        if host and PORT.sub("", host) not in self.hosts:
            raise HttpError(403, f"host: without API keys expected localhost (got {host:.60})", "forbidden")
        allowed = ("", *self.options.cors)
        if "*" not in allowed and origin not in allowed and origin.partition("://")[2] != host:
            raise HttpError(403, f"origin: without API keys expected this server's own page (got {origin:.60})",
                            "forbidden")  # fmt: skip

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        offered = [given.strip()] if scheme.lower() == b"bearer" else []
        for one in headers.get(b"sec-websocket-protocol", b"").split(b","):
            if one.strip().startswith(PROTOCOL_KEY.encode()):
                offered.append(one.strip()[len(PROTOCOL_KEY) :])
        found = [hmac.compare_digest(key, one) for key in self.keys for one in offered]  # all of them, in like time
        return any(found)

    def _most(self, scope: Any) -> int:
        """Bytes of the body that are taken."""
        return self.most if _is_form(scope) else min(self.most, MOST_JSON)

    def _limited(self, scope: Any, receive: Any, faults: list[HttpError]) -> Any:
        """`receive` that refuses a body that is too large or too slow, and notes its fault."""
        if scope["type"] != "http":
            return receive
        taken, values, ended, began = 0, 0, False, time.monotonic()
        most, form = self._most(scope), _is_form(scope)

        async def limited() -> Any:
            nonlocal taken, values, ended
            if ended:  # what comes now is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), PATIENCE)
            except TimeoutError:
                faults.append(HttpError(408, f"nothing came for {PATIENCE:g} seconds", "too_slow"))
                raise faults[0] from None
            ended = not message.get("more_body", False)
            body = message.get("body", b"")
            taken, values = taken + len(body), values + (0 if form else sum(map(body.count, b",[{")))
            if taken > most or values > MOST_VALUES:
                many = HttpError(413, f"the body has more than {MOST_VALUES} values", "too_large")
                faults.append(_too_large(most) if taken > most else many)
                raise faults[0]
            spent = time.monotonic() - began
            if not ended and spent > PATIENCE and taken < PACE * spent:
                faults.append(HttpError(408, f"{taken} bytes came in {spent:.0f} seconds", "too_slow"))
                raise faults[0]
            return message

        return limited


def _is_form(scope: Any) -> bool:
    return any(name.lower() == b"content-type" and value.lower().startswith(b"multipart/")
               for name, value in scope["headers"])  # fmt: skip


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"the request is larger than {most / 1e6:g} MB", "too_large")


async def refuse(scope: Any, receive: Any, send: Any, error: Exception) -> None:
    """Send an error as the whole answer."""
    told = as_http(error)
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 4000 + told.status, "reason": str(told)[:100]})
        return
    await _drained(receive)
    body = json.dumps(told.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in told.headers.items()]
    headers.append((b"connection", b"close"))  # a part of the body may still come
    await send({"type": "http.response.start", "status": told.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _drained(receive: Any) -> None:
    """Read on for a moment: a connection that closes before its request is read loses the answer."""
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while taken < DRAINED:
                message = await receive()
                taken += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
