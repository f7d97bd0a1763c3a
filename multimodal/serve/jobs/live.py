"""Live recordings: samples of a socket through the model's lane, events back."""

import queue
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

from multimodal.errors import AudioError, MultimodalError
from multimodal.serve.jobs.lane import BusyError, CancelledJobError, Lane, Work, one_request
from multimodal.tasks.transcribe.live import Event, LiveSession, live_options
from multimodal.tasks.transcribe.options import LiveOptions
from multimodal.tokens.audio.log_mel import RATE
from multimodal.tokens.audio.pcm import PcmReader
from multimodal.weights.folder import Checkpoint

MOST_AHEAD, MOST_BYTES = 60, 16 << 20  # seconds of sound that may wait, and its bytes


class LiveRecording:
    """One live recording. `push` takes 16-bit samples, `commit` ends the utterance, `close` the recording; `give` is
    called with each Event, with None after a commit, with a MultimodalError, and at the end with the summary.

    Raises UsageError for options that the model does not have or that are out of range."""

    def __init__(self, checkpoint: Checkpoint, lane: Lane, options: LiveOptions, give: Callable[[Any], None]):
        self.checkpoint, self.lane, self.give = checkpoint, lane, give
        self.options = live_options(checkpoint, options)
        self.waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: commit; b"": the end
        self.come = self.taken = 0  # bytes; each written by one thread
        self.closed, self.gone = False, False
        self.half, self.rest = b"", b""  # of a sample, until its other byte comes; samples not yet read
        self.offset = 0.0  # seconds before the current session
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def push(self, samples: bytes) -> None:
        """Raises AudioError for a client that sends faster than the model hears."""
        samples, second = self.half + samples, 2 * self.options.rate
        whole, most = len(samples) // 2 * 2, min(MOST_AHEAD * second, MOST_BYTES)
        if self.come - self.taken + whole > most:
            raise AudioError(f"more than {most / second:.3g} seconds of sound wait")
        self.half = samples[whole:]
        self.come += whole
        if whole:
            self.waiting.put(samples[:whole])

    def commit(self) -> None:
        self.waiting.put(None)

    def close(self) -> None:
        """No more samples come."""
        self.waiting.put(b"")

    def drop(self) -> None:
        """The client has gone: stop."""
        self.gone = True
        self.close()

    def _wait(self) -> bool:
        """Wait for samples; False at a commit or the end."""
        if not self.rest:
            samples = self.waiting.get()
            self.closed, self.rest = samples == b"", samples or b""
            self.taken += len(self.rest)
        return bool(self.rest)

    def _read(self, size: int) -> bytes:
        """Samples for a `PcmReader`."""
        if not self._wait():
            return b""
        part, self.rest = self.rest[:size], self.rest[size:]
        return part

    def _follow(self) -> None:
        try:
            while not self.closed:
                if self._wait():
                    self._session()
                if not self.closed:
                    self._tell(None)
            self._tell(Event("summary", "", 0.0, self.offset, 0.0))
        except Exception as error:
            self._tell(error if isinstance(error, MultimodalError) else AudioError("the stream has failed"))

    def _tell(self, one: Any) -> None:
        if not self.gone:
            self.give(one)

    def _session(self) -> None:
        """Transcribe up to the next commit or the end."""
        reader = PcmReader(self._read, self.options.rate, "stream")
        session, arrived = LiveSession(self.checkpoint, self.options, reader), monotonic()
        for piece in reader:
            arrived = piece.arrived
            self._run(lambda piece=piece: session.piece(piece))
        self._run(lambda: session.end(arrived))
        self.offset += session.samples / RATE

    def _run(self, events: Callable[[], Iterator[Event]]) -> None:
        """Compute events in the model's lane."""
        if self.gone:
            raise CancelledJobError("the client has gone")
        while True:
            try:
                future = self.lane.submit(one_request(Work(object(), None, lambda _: [list(events())])))
                break
            except BusyError:
                sleep(0.05)
        for one in future.result():
            self._tell(one._replace(start=one.start + self.offset, end=one.end + self.offset))
