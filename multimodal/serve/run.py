"""The processes of a server, and how they end."""

import contextlib
import logging
import os
import signal
import socket
import threading
from functools import partial
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.context import SpawnProcess
from time import monotonic, sleep
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client.multiprocess import mark_process_dead

from multimodal.errors import MultimodalError, UsageError
from multimodal.serve.app import create
from multimodal.serve.guard import MOST_HEADERS, SHARED
from multimodal.serve.models import Models
from multimodal.serve.options import ServeOptions
from multimodal.serve.protocol import HttpProtocol
from multimodal.serve.uploads import UploadFolder, sweep
from multimodal.system.signals import ENDS, handled

log = logging.getLogger(__name__)
REFUSING = 0.5  # seconds in which new requests get 503 even if none runs
OF_TERMINAL = {signal.SIGINT, signal.SIGHUP}
LAST = 600.0  # seconds that running requests may take after SIGTERM
AGAIN = 1.0  # seconds before a worker is started again
UNUSABLE = 3  # exit code of a worker that cannot start: models or options cannot be used


class ServerProcess(uvicorn.Server):
    """A server that refuses new requests at a signal and finishes those that run; at a second one it ends at once. It
    ends, too, if its models cannot be loaded."""

    since = 0.0  # of the first signal
    dropped = 0  # requests that ran at the second
    ready: Any = None  # a flag of the supervisor

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        guard = self.config.loaded_app
        if guard.draining:
            self.dropped = guard.active
            log.warning("stopping at once: %d requests are dropped", self.dropped)
            logging.getLogger("uvicorn.error").disabled = True  # it tells of each request's end by a traceback
            self.force_exit = self.should_exit = True
            return
        self.since, guard.draining = monotonic(), True
        log.warning("stopping: %d requests run; again to stop at once", guard.active)

    async def on_tick(self, counter: int) -> bool:
        guard = self.config.loaded_app
        spent = monotonic() - self.since
        if self.failed or (guard.draining and (spent > LAST or (spent > REFUSING and not guard.active))):
            self.should_exit = True
        if self.ready is not None and self.models.ready.is_set():
            self.ready.value = True
        return await super().on_tick(counter)

    @property
    def models(self) -> Models:
        return self.config.loaded_app.app.state.server.models

    @property
    def failed(self) -> bool:
        return self.models.failure is not None

    def served(self, bound: socket.socket) -> bool:
        """Serve until the end. Returns False if it could not start. Ends the process with 1 if requests were dropped,
        and with 0 if models were still loading."""
        with contextlib.suppress(SystemExit):  # uvicorn's, which has told why
            self.run(sockets=[bound])
        if self.dropped or (self.started and self.models.loading):  # an interpreter's end aborts if a thread computes
            os._exit(int(self.dropped > 0))
        return self.started and not self.failed


def listening(options: ServeOptions) -> socket.socket:
    """Raises UsageError for an address that cannot be used."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY if it is named
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((options.host, options.port))
        made.listen(2048)  # else another server could bind it, too
    except OSError as error:
        made.close()
        raise UsageError(f"{options.host}:{options.port}: cannot be used ({error.strerror})", argument="port") from None
    made.set_inheritable(True)
    return made


def configuration(options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        partial(create, options), factory=True, lifespan="on", log_level="warning", access_log=False,
        server_header=False, timeout_keep_alive=15, h11_max_incomplete_event_size=MOST_HEADERS, http=HttpProtocol,
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
        with handled(ENDS, server.handle_exit):  # in place of the command's own
            return 0 if server.served(bound) else 1


class Supervisor:
    """Processes that serve one socket, each started again if it dies."""

    def __init__(self, options: ServeOptions, bound: socket.socket):
        self.options, self.bound = options, bound
        self.workers: list[SpawnProcess] = []
        self.ready = get_context("spawn").RawValue("b", False)  # a worker has been, once
        self.ending = False

    def run(self) -> int:
        """Serve until a signal, which each worker then gets. Returns 1 if one of the first workers cannot start, or
        any of them fails before one has been ready."""
        shared = UploadFolder()
        os.environ[SHARED] = str(shared.path)
        resource_tracker.ensure_running()  # it unblocks the signal that `_start` blocks
        with handled(ENDS, self._end):
            self._start(self.options.workers)
            first, unusable = [*self.workers], False
            while not self.ending:
                connection.wait([one.sentinel for one in self.workers], AGAIN)
                dead = [one for one in self.workers if not one.is_alive()]
                failed = [one for one in dead if (one.exitcode or 0) > 0]
                unusable = any((one in first and one.exitcode == UNUSABLE) or not self.ready.value for one in failed)
                if unusable:
                    self._end()
                if dead and not self.ending:
                    self._replace(dead)
            for one in self.workers:
                one.join()
        del os.environ[SHARED]
        shared.remove()
        sweep()
        codes = [one.exitcode or 0 for one in self.workers]
        # SIGTERM: had only begun to start
        return 1 if unusable else max((0 if code == -signal.SIGTERM else abs(code) for code in codes), default=0)

    def _replace(self, dead: list[SpawnProcess]) -> None:
        for one in dead:
            log.error("worker %s has ended with %s: started again", one.pid, one.exitcode)
            mark_process_dead(one.pid)
        sleep(AGAIN)
        self.workers = [one for one in self.workers if one not in dead]
        self._start(len(dead))

    def _start(self, count: int) -> None:
        """Start workers until a signal. Those that a terminal sends to them, too, are left to the supervisor."""
        for _ in range(count):
            if self.ending:
                return
            made = get_context("spawn").Process(target=_work, args=(self.options, self.bound, self.ready))
            signal.pthread_sigmask(signal.SIG_BLOCK, OF_TERMINAL)  # the process keeps it
            made.start()
            self.workers.append(made)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_TERMINAL)
            if self.ending:  # perhaps since before it was one of the workers
                made.terminate()

    def _end(self, *_: Any) -> None:
        self.ending = True
        for one in self.workers:
            one.terminate()


def _work(options: ServeOptions, bound: socket.socket, ready: Any) -> None:
    """A worker: it ends with its supervisor."""
    parent = parent_process().sentinel
    ended = lambda: connection.wait([parent]) and os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=ended, daemon=True).start()
    try:
        server = ServerProcess(configuration(options))
        server.ready = ready
        server.config.load()  # before a signal has a handler, which needs the application
        raise SystemExit(0 if server.served(bound) else UNUSABLE)
    except MultimodalError as error:
        log.error("%s", error)
        raise SystemExit(UNUSABLE) from None
