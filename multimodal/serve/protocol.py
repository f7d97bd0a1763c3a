"""HTTP/1.1 as the server speaks it: refusals are JSON, and a request's head must come in time."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from multimodal.serve.errors import HttpError

HEAD = 30.0  # seconds for a request line and headers
LINGER = 1.0  # seconds in which a refused client may still send, as a reset would lose it the answer


class HttpProtocol(H11Protocol):
    late: asyncio.TimerHandle | None = None
    refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if not self.refused:
            super().data_received(data)
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless another answer has begun."""
        self.refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        large = len(self.conn.trailing_data[0]) >= (self.config.h11_max_incomplete_event_size or 0)
        told = HttpError(431, "the headers are too large") if large else HttpError(400, "the request is no valid HTTP")
        body = json.dumps(told.body).encode()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        for event in (h11.Response(status_code=told.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)

    def _watch(self) -> None:
        """Wait for the rest of a head, or for a connection's first one."""
        waits = self.conn.their_state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        if not waits:
            self._unwatch()
        elif self.late is None:
            self.late = self.loop.call_later(HEAD, self.transport.close)

    def _unwatch(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None
