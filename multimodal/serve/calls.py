"""Requests as jobs: making, waiting, ending with the client, streaming."""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse

from multimodal.errors import MultimodalError
from multimodal.serve.errors import as_http
from multimodal.serve.jobs.lane import CancelledJobError, Job, Lane
from multimodal.serve.state import server_of

DONE = object()
Make = Callable[[threading.Event], Job]
_opening: anyio.CapacityLimiter | None = None


def opening() -> anyio.CapacityLimiter:
    """Threads that read inputs: as many as processors."""
    global _opening
    _opening = _opening or anyio.CapacityLimiter(os.cpu_count() or 1)
    return _opening


async def made(make: Make) -> Job:
    """A job, made in a thread, since its inputs are read there. `make` is given an event that is set once nobody waits
    for the job."""
    over = threading.Event()
    try:
        return await anyio.to_thread.run_sync(make, over, limiter=opening(), abandon_on_cancel=True)
    except BaseException:
        over.set()
        raise


async def outcome(request: Request, lane: Lane, make: Make) -> Any:
    """The result of a job. A client that goes away, or a request that takes longer, ends the job. Raises its errors,
    BusyError, CancelledJobError."""

    async def worked() -> Any:
        with lane.expecting():
            job = await made(make)
            future = lane.submit(job)
        try:
            return await asyncio.wrap_future(future)
        finally:
            job.cancel()

    return await while_there(request, worked(), server_of(request).options.seconds)


async def while_there(request: Request, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """The result of work that is cancelled if its client goes away or it takes longer. The body must have been read.
    Raises CancelledJobError."""
    gone, task = asyncio.create_task(_gone(request)), asyncio.create_task(work)
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise CancelledJobError("too long" if not gone.done() else "the client has gone")
    finally:
        gone.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of an asynchronous generator, which ends with the client; `leave` is closed then."""

    media_type = "text/event-stream"

    def __init__(self, messages: Any, leave: contextlib.AsyncExitStack):
        super().__init__(messages, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})  # nginx's
        self.messages, self.leave = messages, leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self.leave, contextlib.aclosing(self.messages):
            await super().__call__(scope, receive, send)


async def streamed(
    request: Request, lane: Lane, make: Callable[[Callable[[Any], None], threading.Event], Job],
    event: Callable[[Any], Any], last: Callable[[Any], list[Any]], leave: contextlib.AsyncExitStack,
    files: Mapping[str, str],
) -> EventStream:  # fmt: skip
    """Server-sent events of a job: `make` is given a function that takes what comes on the way, `event` makes a message
    of it and `last` the messages of the result. They begin with the first one, or the result, so that a request that is
    refused has its status; a later error is a message. `files` have other names in errors. The stream takes over what
    `leave` holds. Raises as `outcome` does."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
    give = lambda one: loop.call_soon_threadsafe(queue.put_nowait, one)
    seconds = server_of(request).options.seconds
    deadline = loop.time() + seconds

    async def begun() -> tuple[Job, Any]:
        with lane.expecting():
            job = await made(lambda over: make(give, over))
            lane.submit(job).add_done_callback(lambda _: give(DONE))
        try:
            first = await queue.get()
            if first is DONE:
                job.future.result()
        except BaseException:
            job.cancel()
            raise
        return job, first

    async def messages() -> AsyncIterator[str]:
        one = first
        try:
            with named(files):
                async with asyncio.timeout_at(deadline):
                    while one is not DONE:
                        yield sse(event(one))
                        one = await queue.get()
                    for message in last(job.future.result()):
                        yield sse(message)
        except Exception as error:
            yield sse(as_http(CancelledJobError() if isinstance(error, TimeoutError) else error).body)

    with named(files):
        job, first = await while_there(request, begun(), seconds)
    leave.callback(job.cancel)
    return EventStream(messages(), leave.pop_all())


def sse(message: Any) -> str:
    return f"data: {message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)}\n\n"


@contextlib.contextmanager
def named(files: Mapping[str, str]) -> Any:
    """Errors name an upload as the client does, not as it lies on the disk."""
    try:
        yield
    except MultimodalError as error:
        text = str(error)
        for path, name in files.items():
            text = text.replace(path, name)
        if text == str(error):
            raise
        raise type(error)(text) from None
