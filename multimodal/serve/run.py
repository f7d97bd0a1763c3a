"""The processes of a server, and how they end."""

import asyncio
import logging
import os
import signal
import socket
import threading
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from time import sleep
from types import FrameType
from typing import Any

import uvicorn

from multimodal.errors import UsageError
from multimodal.serve.app import create
from multimodal.serve.options import ServeOptions
from multimodal.serve.protocol import HttpProtocol
from multimodal.serve.uploads import sweep
from multimodal.system.signals import handled

log = logging.getLogger(__name__)
REFUSING = 0.5  # seconds in which new requests get 503 even if none runs
LAST = 600.0  # seconds that running requests may take after SIGTERM
MOST_HEADERS = 64 << 10  # bytes
AGAIN = 1.0  # seconds before a worker is started again


class ServerProcess(uvicorn.Server):
    """A server that refuses new requests at a signal and finishes those that run; at a second one it ends at once.
    `supervised`: Ctrl-C is left to the supervisor, which gets it, too."""

    supervised = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        app = self.config.loaded_app
        if self.supervised and sig == signal.SIGINT:
            return
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
        timeout_keep_alive=15, h11_max_incomplete_event_size=MOST_HEADERS, http=HttpProtocol,
        ws_max_size=16 << 20, proxy_headers=False,
    )  # fmt: skip


def serve(options: ServeOptions, ready: Any = None) -> int:
    """Serve until a signal; `ready(address)` is called once the address is open. Raises UsageError."""
    with listening(options) as bound:
        config = configuration(options)
        if options.workers == 1:
            config.load()  # refuses what cannot be served
        if ready is not None:
            ready(f"http://{options.host}:{bound.getsockname()[1]}")
        if options.workers > 1:
            return Supervisor(options, bound).run()
        server = ServerProcess(config)
        with handled((signal.SIGINT, signal.SIGTERM), server.handle_exit):  # in place of the command's own
            server.run(sockets=[bound])
        return 0 if server.started else 1


class Supervisor:
    """Processes that serve one socket, each started again if it dies."""

    def __init__(self, options: ServeOptions, bound: socket.socket):
        self.options, self.bound = options, bound
        self.workers: list[SpawnProcess] = []
        self.ending = False

    def run(self) -> int:
        """Serve until a signal, which each worker then gets."""
        with handled((signal.SIGINT, signal.SIGTERM), self._end):
            self.workers = [self._started() for _ in range(self.options.workers)]
            while not self.ending:
                connection.wait([one.sentinel for one in self.workers], AGAIN)
                for place, one in enumerate(self.workers):
                    if not one.is_alive() and not self.ending:
                        log.error("worker %s has ended with %s: started again", one.pid, one.exitcode)
                        sleep(AGAIN)
                        self.workers[place] = self._started()
            for one in self.workers:
                one.join()
        sweep()
        codes = [one.exitcode or 0 for one in self.workers]
        return max(0 if code == -signal.SIGTERM else abs(code) for code in codes)  # SIGTERM: had only begun to start

    def _started(self) -> SpawnProcess:
        made = get_context("spawn").Process(target=_work, args=(self.options, self.bound))
        made.start()
        return made

    def _end(self, sig: int, frame: FrameType | None) -> None:
        self.ending = True
        for one in self.workers:
            one.terminate()


def _work(options: ServeOptions, bound: socket.socket) -> None:
    """A worker: it ends with its supervisor."""
    parent = parent_process().sentinel
    ended = lambda: connection.wait([parent]) and os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=ended, daemon=True).start()
    server = ServerProcess(configuration(options))
    server.supervised = True
    server.run(sockets=[bound])
    raise SystemExit(0 if server.started else 1)
