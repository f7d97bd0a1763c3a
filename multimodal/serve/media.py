"""Images, sounds and videos that a request names: data URLs, and URLs of hosts that the server may read."""

import base64
import binascii
import contextlib
import http.client
import threading
from pathlib import Path
from typing import Any

import anyio
from fastapi import Request

from multimodal.data.remote.trust import Trust
from multimodal.data.remote.web import RefusedError, TransientError, UrlRule, opened
from multimodal.serve.calls import while_there
from multimodal.serve.errors import HttpError
from multimodal.serve.state import server_of
from multimodal.serve.uploads import NewFiles
from multimodal.system.files import is_data_url

BLOCK = 1 << 18  # bytes
LONGEST = 120.0  # seconds of a download


class Media:
    """Media that a request names. `leave`: removes downloads when it is closed. `names`: of downloads, for
    `calls.named`."""

    def __init__(self, request: Request, leave: contextlib.AsyncExitStack):
        self.request, self.server, self.leave = request, server_of(request), leave
        self.names: dict[str, str] = {}

    async def read(self, url: Any, where: str) -> bytes | Path:
        """Bytes of a data URL, or the file of another. Raises HttpError."""
        if isinstance(url, str) and url[:8].lower().startswith(("http://", "https://")):
            return await self._fetched(url, where)
        return data_url(url, where)

    async def _fetched(self, url: str, where: str) -> Path:
        hosts = self.server.options.allow_urls
        if not hosts:
            raise HttpError(400, f"{where}: expected a data URL, as this server reads no others", param=where)
        path, over = self.leave.enter_context(NewFiles(self.server.folder)).path(), threading.Event()
        rule = UrlRule(url, Trust(remote=hosts))
        work = anyio.to_thread.run_sync(
            self._copy, url, rule, path, over, limiter=self.server.fetching, abandon_on_cancel=True
        )
        try:
            await while_there(self.request, work, LONGEST)
        except RefusedError:
            problem = f"{where}: this server does not read {url[:80]!r}, or where it leads"
            raise HttpError(400, problem, param=where) from None
        except (TransientError, http.client.HTTPException, ValueError) as error:
            raise HttpError(400, f"{where}: cannot be read ({error})"[:200], param=where) from None
        finally:
            over.set()
            rule.abort()
        self.names[str(path)] = where
        return path

    def _copy(self, url: str, rule: UrlRule, path: Path, over: threading.Event) -> None:
        taken, most = 0, int(self.server.options.max_upload_mb * 1e6)
        try:
            body = opened(url, rule)
        except OSError as error:
            raise TransientError(str(error)) from None
        with contextlib.closing(body), path.open("wb") as file:
            while not over.is_set() and (data := body.read(BLOCK)):
                taken += len(data)
                if taken > most:
                    raise HttpError(413, f"the file at a URL is larger than {most / 1e6:g} MB", "too_large")
                file.write(data)


def data_url(url: Any, where: str) -> bytes:
    """Bytes of a data URL. Raises HttpError."""
    if not is_data_url(url):
        got = str(url).partition(":")[0][:20]
        raise HttpError(400, f"{where}: expected a data URL (got {got!r}…)", param=where)
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise HttpError(400, f"{where}: expected data:TYPE;base64,…", param=where)
    return base64_bytes(body, where)


def base64_bytes(text: Any, where: str) -> bytes:
    try:
        data = base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, AttributeError, ValueError):
        raise HttpError(400, f"{where}: expected base64", param=where) from None
    if not data:
        raise HttpError(400, f"{where}: is empty", param=where)
    return data
