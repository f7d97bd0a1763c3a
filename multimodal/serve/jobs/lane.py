"""A model's thread: jobs of many clients run as streams of requests, and requests of one kind share a batch."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import Future
from time import monotonic
from typing import Any, NamedTuple

from multimodal.errors import MultimodalError
from multimodal.tasks.encode.attempts import in_parts_of

log = logging.getLogger(__name__)
GATHER = 0.03  # seconds that a first batch waits for jobs that are being made, and that a job in the making is awaited


class Work(NamedTuple):
    """A request to the model: `serve(payloads)` answers all waiting ones with the same `key` at once, in order."""

    key: Hashable
    payload: Any
    serve: Callable[[list[Any]], list[Any]]


Stream = Generator[Work, Any, Any]


class BusyError(MultimodalError):
    """More jobs wait than the lane takes. `seconds`: when to try again."""

    def __init__(self, problem: str, seconds: int):
        super().__init__(problem)
        self.seconds = seconds


class CancelledJobError(MultimodalError):
    """The job's client has gone, or its time is over."""


class Job:
    """Work of one client: streams that run side by side. The base class runs one stream, whose return value is the
    result."""

    def __init__(self, streams: Iterator[Stream]):
        self.streams, self.future, self.cancelled = streams, Future[Any](), False
        self.pending, self.value = 0, None
        self.next: Stream | None = None  # to start when it is the job's turn

    def ended(self, value: Any) -> None:
        """Take the return value of a stream."""
        self.value = value

    def result(self) -> Any:
        """The result, after the last stream. Raises MultimodalError."""
        return self.value

    def cancel(self) -> None:
        """Stop at the next request; the client has gone."""
        self.cancelled = True


def one_request(work: Work) -> Job:
    """A job of a single request."""

    def stream() -> Stream:
        return (yield work)

    return Job(iter([stream()]))


class _Started:
    def __init__(self, job: Job, stream: Stream):
        self.job, self.stream, self.work, self.since = job, stream, None, 0


class Lane:
    """Thread that runs the jobs of one model. At most `width` streams run at once, taken from the jobs in turn, so that
    a long job leaves room for short ones; the request that has waited longest runs next, with all of its key. `most`:
    jobs that may run or wait.

    Answers that do not depend on their batch make results independent of the neighbours. A request that fails alone
    ends its own job. Call `submit` from any thread."""

    def __init__(self, name: str, width: int = 8, most: int = 64):
        self.name, self.width, self.most = name, width, most
        self.jobs: deque[Job] = deque()  # that may still have streams to start
        self.running: list[_Started] = []
        self.coming: dict[object, float] = {}  # jobs in the making: since when
        self.open = 0  # jobs without a result
        self.turn = 0
        self.served: list[Job] = []  # of the batch under way
        self.changed = threading.Condition()
        self.batches: Callable[[int], None] = lambda size: None  # told of each batch
        self.ended = False
        threading.Thread(target=self._run, name=f"lane {name}", daemon=True).start()

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job. Raises BusyError."""
        with self.changed:
            if self.open >= self.most:
                raise BusyError(f"{self.name}: {self.open} requests wait already", 1 + self.open // self.width)
            self.open += 1
            job.future.set_running_or_notify_cancel()  # only the lane ends it
            self.jobs.append(job)
            self.changed.notify()
        return job.future

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """While a job for this lane is made and submitted."""
        job = object()
        with self.changed:
            self.coming[job] = monotonic()
        try:
            yield
        finally:
            with self.changed:
                del self.coming[job]
                self.changed.notify()

    def stop(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify()

    def check(self) -> None:
        """For long requests, in their course: raises CancelledJobError if nobody waits for their batch any more."""
        if all(job.cancelled for job in self.served):
            raise CancelledJobError(f"{self.name}: cancelled")

    def _run(self) -> None:
        while True:
            with self.changed:
                while not (self.jobs or self.running or self.ended):
                    self.changed.wait()
                if self.ended:
                    return
            first = not self.running
            self._drop_cancelled()
            self._start_streams()
            if first:
                self._gather()
            if self.running:
                self._step()

    def _gather(self) -> None:
        """Wait a moment for the jobs in the making: they come together where their clients got one batch."""
        end = monotonic() + GATHER
        while 0 < len(self.running) < self.width:
            with self.changed:
                left = min(end, max(self.coming.values(), default=0.0) + GATHER) - monotonic()
                if left <= 0 or self.ended:
                    return
                self.changed.wait(left)
            self._drop_cancelled()
            self._start_streams()

    def _drop_cancelled(self) -> None:
        with self.changed:
            jobs = dict.fromkeys([*(one.job for one in self.running), *self.jobs])
        for job in jobs:
            if job.cancelled:
                self._end(job, CancelledJobError(f"{self.name}: cancelled"))

    def _start_streams(self) -> None:
        """Start streams of the jobs in turn while there is room."""
        while len(self.running) < self.width:
            with self.changed:
                if not self.jobs:
                    return
                job = self.jobs.popleft()
            if not self._has_more(job):
                continue
            with self.changed:
                self.jobs.append(job)
            job.pending += 1
            started, job.next = _Started(job, job.next), None
            self.running.append(started)
            self._resume(started, None)

    def _has_more(self, job: Job) -> bool:
        """Find the next stream of a job. Ends the job if that fails, or if there is none and the others have ended."""
        try:
            job.next = job.next or next(job.streams, None)
        except Exception as error:
            self._end(job, error)
            return False
        if job.next is None and not job.pending:
            self._finish(job)
        return job.next is not None

    def _step(self) -> None:
        """Answer the request that has waited longest, and all like it."""
        first = min(self.running, key=lambda one: one.since)
        batch = [one for one in self.running if one.work.key == first.work.key]
        payloads, serve = [one.work.payload for one in batch], first.work.serve
        self.batches(len(batch))
        self.served = [one.job for one in batch]
        try:
            answers = in_parts_of(serve, payloads)
        except CancelledJobError as error:  # by `check`
            answers = [error] * len(batch)
        except Exception:
            answers = [_alone(serve, payload) for payload in payloads]  # one of them may be at fault for all
        for one, answer in zip(batch, answers, strict=True):
            if one in self.running:
                self._resume(one, answer)

    def _resume(self, one: _Started, answer: Any) -> None:
        """Run a stream to its next request or its end; an exception as the answer is raised inside."""
        job = one.job
        try:
            one.work = one.stream.throw(answer) if isinstance(answer, Exception) else one.stream.send(answer)
            self.turn += 1
            one.since = self.turn
            return
        except StopIteration as stop:
            value = stop.value
        except Exception as error:
            self._end(job, error)
            return
        self.running.remove(one)
        job.pending -= 1
        try:
            job.ended(value)
        except Exception as error:
            self._end(job, error)
            return
        if not job.pending:
            self._has_more(job)  # now, not at its next turn: its client waits

    def _finish(self, job: Job) -> None:
        try:
            value = job.result()
        except Exception as error:
            self._end(job, error)
            return
        self._close(job)
        job.future.set_result(value)

    def _end(self, job: Job, error: Exception) -> None:
        """End a job that failed or was cancelled, with all of its streams."""
        if not isinstance(error, MultimodalError):
            log.error("%s: %s", self.name, error, exc_info=error)
        for one in [one for one in self.running if one.job is job]:
            self.running.remove(one)
            one.stream.close()
        self._close(job)
        job.future.set_exception(error)

    def _close(self, job: Job) -> None:
        with self.changed:
            if job in self.jobs:
                self.jobs.remove(job)
            self.open -= 1


def _alone(serve: Callable[[list[Any]], list[Any]], payload: Any) -> Any:
    """The answer to one request, or its exception."""
    try:
        return serve([payload])[0]
    except Exception as error:
        return error
