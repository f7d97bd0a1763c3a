"""Transcription jobs: recordings of several clients share the model's batches."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from multimodal.serve.jobs.lane import CancelledJobError, Job, Stream, Work
from multimodal.tasks.transcribe.audio_source import AudioSource
from multimodal.tasks.transcribe.options import RecognizerOptions, SpeechDecodingOptions, WhisperOptions
from multimodal.tasks.transcribe.transcribe import OnSegments, RecordingStreams, Transcriber
from multimodal.tasks.transcribe.whisper.decode import batch_key
from multimodal.weights.folder import Checkpoint

# options that an answer of the model depends on; requests carry the rest
DECODING = ("task", "without_timestamps", "sample_len", "beam_size", "best_of", "patience", "length_penalty",
            "suppress_blank", "suppress_tokens", "max_initial_timestamp", "token_logprobs")  # fmt: skip
OF_OTHERS = (*SpeechDecodingOptions.declared, "language", "task", "target_language")  # of models other than Whisper


class TranscriptionJob(Job):
    """A recording. Opening decodes all of its sound, unless `over` is set: make the job outside of the lane's thread.
    Raises UsageError, AudioError, CancelledJobError."""

    def __init__(
        self, checkpoint: Checkpoint, audio: Any, options: Mapping[str, Any], over: threading.Event | None = None,
        on_segments: OnSegments | None = None,
    ):  # fmt: skip
        transcriber = Transcriber(checkpoint, device=None, **options)
        source = _Watched(audio, over or threading.Event())
        self.recording = RecordingStreams(transcriber, source, on_segments)
        first = next(self.recording.streams)  # opens the recording
        streams = itertools.chain([first], self.recording.streams)
        key = decoding_key(transcriber.options)
        super().__init__(requests(stream, key, self.recording.serve) for stream in streams)

    def ended(self, value: Any) -> None:
        result = self.recording.taken(value)
        self.value = self.value if result is None else result


class _Watched(AudioSource):
    """A recording that is read until `over` is set."""

    def __init__(self, source: Any, over: threading.Event):
        super().__init__(source)
        self.over = over

    def chunks(self) -> Iterator[Any]:
        for chunk in super().chunks():
            if self.over.is_set():
                raise CancelledJobError("the client has gone")
            yield chunk


def decoding_key(options: WhisperOptions | RecognizerOptions) -> tuple[Any, ...]:
    names = DECODING if isinstance(options, WhisperOptions) else OF_OTHERS
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
