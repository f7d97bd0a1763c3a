"""Transcription jobs: recordings of several clients share the model's batches."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from multimodal.serve.jobs.lane import Job, Stream, Work
from multimodal.tasks.transcribe.transcribe import OnProgress, OnSegments, RecordingStreams, Transcriber
from multimodal.tasks.transcribe.whisper.decode import batch_key
from multimodal.tasks.transcribe.whisper.options import CtcOptions, HybridOptions, WhisperOptions
from multimodal.weights.folder import Checkpoint

# options that an answer of the model depends on; requests carry the rest
DECODING = ("task", "without_timestamps", "sample_len", "beam_size", "best_of", "patience", "length_penalty",
            "suppress_blank", "suppress_tokens", "max_initial_timestamp")  # fmt: skip


class TranscriptionJob(Job):
    """A recording. Opening decodes all of its sound: make the job outside of the lane's thread. Raises UsageError,
    AudioError."""

    def __init__(
        self, checkpoint: Checkpoint, audio: Any, options: Mapping[str, Any], on_progress: OnProgress | None = None,
        on_segments: OnSegments | None = None,
    ):  # fmt: skip
        transcriber = Transcriber(checkpoint, device=None, **options)
        self.recording = RecordingStreams(transcriber, audio, on_progress, on_segments)
        first = next(self.recording.streams)  # opens the recording
        streams = itertools.chain([first], self.recording.streams)
        key = decoding_key(transcriber.options)
        super().__init__(requests(stream, key, self.recording.serve) for stream in streams)

    def ended(self, value: Any) -> None:
        result = self.recording.taken(value)
        self.value = self.value if result is None else result


def decoding_key(options: WhisperOptions | CtcOptions) -> tuple[Any, ...]:
    names = DECODING if isinstance(options, WhisperOptions) else tuple(HybridOptions.declared)
    return tuple(str(getattr(options, name)) for name in names)


def requests(stream: Iterator[Any], key: tuple[Any, ...], serve: Callable[[list[Any]], list[Any]]) -> Stream:
    """A stream's requests with what they may share a batch with."""
    answer: Any = None
    while True:
        try:
            request = stream.throw(answer) if isinstance(answer, Exception) else stream.send(answer)
        except StopIteration as stop:
            return stop.value
        try:
            answer = yield Work((*key, type(request), batch_key(request)), request, serve)
        except Exception as error:
            answer = error
