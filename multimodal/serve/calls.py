"""Requests as jobs: making, waiting, ending with the client, streaming."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse

from multimodal.errors import MultimodalError
from multimodal.serve.errors import HttpError, as_http
from multimodal.serve.jobs.lane import CancelledJobError, Job, Lane

LOOK = 0.25  # seconds between looks for a client that has gone
DONE = object()
STREAM = "text/event-stream"
_opening: anyio.CapacityLimiter | None = None


def opening() -> anyio.CapacityLimiter:
    """Threads that read inputs: as many as processors."""
    global _opening
    _opening = _opening or anyio.CapacityLimiter(os.cpu_count() or 1)
    return _opening


async def made(make: Callable[[], Job]) -> Job:
    """A job, made in a thread, since its inputs are read there."""
    return await anyio.to_thread.run_sync(make, limiter=opening())


async def outcome(request: Request, lane: Lane, make: Callable[[], Job], seconds: float) -> Any:
    """The result of a job. A client that goes away, or a request that takes longer, ends the job. Raises its errors,
    BusyError, CancelledJobError."""
    job = await made(make)
    future = asyncio.wrap_future(lane.submit(job))
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({future, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        raise CancelledJobError("too long" if not gone.done() else "the client has gone")
    finally:
        gone.cancel()
        job.cancel()


async def _gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(LOOK)


def streamed(
    lane: Lane, make: Callable[[Callable[[Any], None]], Job], seconds: float, event: Callable[[Any], Any],
    last: Callable[[Any], list[Any]], after: Callable[[], Awaitable[None]] | None = None,
) -> StreamingResponse:  # fmt: skip
    """Server-sent events of a job: `make` is given a function that takes what comes on the way, `event` makes a message
    of it and `last` the messages of the result. An error after the start is a message, too."""

    async def messages() -> AsyncIterator[str]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        give = lambda one: loop.call_soon_threadsafe(queue.put_nowait, one)
        job: Job | None = None
        try:
            async with asyncio.timeout(seconds):
                job = await made(lambda: make(give))
                future = lane.submit(job)
                future.add_done_callback(lambda _: give(DONE))
                while (one := await queue.get()) is not DONE:
                    yield sse(event(one))
                for message in last(future.result()):
                    yield sse(message)
        except (MultimodalError, HttpError, OSError, TimeoutError) as error:
            told = as_http(CancelledJobError() if isinstance(error, TimeoutError) else error)
            yield sse(told.body)
        finally:
            if job is not None:
                job.cancel()
            if after is not None:
                await after()

    return StreamingResponse(messages(), media_type=STREAM, headers={"cache-control": "no-cache"})


def sse(message: Any) -> str:
    return f"data: {message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)}\n\n"


@contextlib.contextmanager
def named(files: Mapping[Path, str]) -> Any:
    """Errors name an upload as the client does, not as it lies on the disk."""
    try:
        yield
    except MultimodalError as error:
        text = str(error)
        for path, name in files.items():
            text = text.replace(str(path), name)
        raise type(error)(text) if type(error).__init__ is MultimodalError.__init__ else error from None
