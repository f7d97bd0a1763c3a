"""The processes of a server, and how they end."""

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.supervisors import Multiprocess

from multimodal.errors import UsageError
from multimodal.serve.app import create
from multimodal.serve.options import ServeOptions
from multimodal.system.signals import handled

log = logging.getLogger(__name__)
REFUSING = 0.5  # seconds in which new requests get 503 even if none runs
LAST = 600.0  # seconds that running requests may take after SIGTERM
MOST_HEADERS = 64 << 10  # bytes


class ServerProcess(uvicorn.Server):
    """A server that, told to end, refuses new requests and finishes those that run; told again, it ends at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        app = self.config.loaded_app
        if self.should_exit or getattr(app, "draining", True):
            self.force_exit = self.should_exit = True
            return
        app.draining = True
        log.warning("stopping: %d requests run; again to stop at once", app.active)
        asyncio.get_running_loop().create_task(self._drained(app))

    async def _drained(self, app: Any) -> None:
        end = asyncio.get_running_loop().time() + LAST
        await asyncio.sleep(REFUSING)
        while app.active and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        self.should_exit = True


def listening(options: ServeOptions) -> socket.socket:
    """Raises UsageError for an address that cannot be used."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY if it is named
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((options.host, options.port))
    except OSError as error:
        made.close()
        raise UsageError(f"{options.host}:{options.port}: cannot be used ({error.strerror})", argument="port") from None
    made.set_inheritable(True)
    return made


class Application:
    """Makes the application in a worker process."""

    def __init__(self, options: ServeOptions):
        self.options = options

    def __call__(self) -> Any:
        return create(self.options)


def configuration(options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        Application(options), factory=True, lifespan="on", log_level="warning", access_log=False, server_header=False,
        workers=options.workers, timeout_keep_alive=15, h11_max_incomplete_event_size=MOST_HEADERS, http="h11",
        ws_max_size=16 << 20, proxy_headers=False,
    )  # fmt: skip


def serve(options: ServeOptions, ready: Any = None) -> int:
    """Serve until a signal; `ready(address)` is called once the address is open. Raises UsageError."""
    bound = listening(options)
    address = f"http://{options.host}:{bound.getsockname()[1]}"
    config = configuration(options)
    if ready is not None:
        ready(address)
    server = ServerProcess(config)
    with handled((signal.SIGINT, signal.SIGTERM), server.handle_exit):  # in place of the command's own
        if options.workers > 1:
            Multiprocess(config, target=server.run, sockets=[bound]).run()
            return 0
        server.run(sockets=[bound])
    return 0 if server.started else 1
