"""Speech to text: any recording, any speech model of the suite."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.errors import AudioError, MultimodalError, UsageError
from multimodal.inference.prepare import prepare_for_inference, usable_device
from multimodal.tasks.encode.attempts import item_error
from multimodal.tasks.transcribe import scheduler, timeline
from multimodal.tasks.transcribe.audio_source import AudioSource
from multimodal.tasks.transcribe.results import Transcription
from multimodal.tasks.transcribe.sessions import Open, Session, Stream, opener
from multimodal.tasks.transcribe.whisper.decode import batch_key
from multimodal.tasks.transcribe.whisper.options import CtcOptions, WhisperOptions, options_for
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.audio.reading import count_channels
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

DEFAULT_MODEL = "asr-conformer-en"
Source = str | Path | bytes | Tensor
Result = dict[str, Any]
Options = WhisperOptions | CtcOptions


def transcribe(audio: Source, model: str | Path | Checkpoint = DEFAULT_MODEL, **options: Any) -> Result:
    """Transcribe a recording: a file, its bytes, or mono samples [T] at 16 kHz.

    As in openai-whisper, the result has `text`, `language` and `segments`, each with `id`, `seek` (10 ms frames),
    `start`, `end` (seconds), `text`, `tokens`, `temperature`, `avg_logprob`, `compression_ratio`, `no_speech_prob`;
    also `words` with `word_timestamps`, `language` with `multilingual`, `speaker` with `split_channels`. In addition:
    `language_probability` (if detected), `duration`, `transcribed` [[start, end], …] and `skipped` [{start, end,
    reason}], which together tile the recording, `damaged` [{start, end, what}], and with `decode_log` a `log` of every
    decoding attempt.

    `options`: those of `WhisperOptions` or, for a CTC model, `CtcOptions`, and of `transcribe_many`. Raises AudioError
    (unreadable, empty, not finite), UsageError (an option that the model does not have), CheckpointError."""
    ((_, result),) = transcribe_many([audio], model, **options)
    if isinstance(result, MultimodalError):
        raise result
    return result


def transcribe_many(
    sources: Iterable[Source], model: str | Path | Checkpoint = DEFAULT_MODEL, *, batch_size: int = 8,
    in_order: bool = True,
    on_progress: Callable[[Source, float, float], None] | None = None,
    on_segments: Callable[[Source, list[dict[str, Any]]], None] | None = None, **options: Any,
) -> Iterator[tuple[Source, Result | MultimodalError]]:  # fmt: skip
    """Yield (source, result of `transcribe`) in the order of the sources or, without `in_order`, as each is done. A
    source that fails yields its error.

    Up to `batch_size` recordings, or independent windows, are decoded together; the text does not depend on it.
    `on_progress(source, seconds done, seconds in total)` and `on_segments(source, new segments without `id`)` are
    called on the way. Raises as `transcribe` before reading anything, except for the errors of a source."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size: must be at least 1 ({batch_size})")
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    chosen = options_for(checkpoint, options)
    checkpoint = prepare_for_inference(checkpoint, chosen.compute_type, _device(chosen.device, checkpoint))
    open_, serve = opener(checkpoint, chosen)
    report = _Reporter(on_progress or (lambda *_: None), on_segments or (lambda *_: None))
    ended = scheduler.run(_streams(sources, chosen, open_, report), serve, batch_size, batch_key)
    results = _collected(ended, checkpoint, chosen, report)
    return _unwrapped(_ordered(results) if in_order else results)


def _device(name: str | None, checkpoint: Checkpoint) -> torch.device:
    """The named device, or the model's own. Raises UsageError."""
    return next(checkpoint.model.parameters()).device if name is None else usable_device(name)


class _CallbackError(BaseException):
    """An exception of a caller's function, to pass through the handlers of a source's errors."""

    def __init__(self, error: Exception):
        self.error = error


def _unwrapped(results: Iterable[tuple["_Job", Result | MultimodalError]]) -> Iterator[tuple[Source, Any]]:
    try:
        for job, result in results:
            yield job.source, result
    except _CallbackError as failure:
        raise failure.error from None


@dataclass
class _Channel:
    """One recording: a whole source, or a channel of it. `parts`: transcriptions of its streams by their index."""

    audio: AudioSource
    speaker: str | None
    session: Session | None = None
    parts: dict[int, Transcription] = field(default_factory=dict)
    reported: int = 0  # parts
    position: int = 0  # samples

    def transcriptions(self) -> list[Transcription]:
        return [self.parts[index] for index in sorted(self.parts)]

    def segments(self) -> list[dict[str, Any]]:
        return [segment for part in self.transcriptions() for segment in part.segments]

    def coverage(self) -> list[timeline.Span]:
        spans = [*self.session.skipped, *(span for part in self.transcriptions() for span in part.coverage)]
        return timeline.tiled(spans, self.session.samples)


@dataclass
class _Job:
    """A source with `count` channels. `pending`: streams that have not ended; `started`: all of them have begun."""

    source: Source
    index: int
    count: int = 1
    pending: int = 0
    started: bool = False
    channels: list[_Channel] = field(default_factory=list)
    error: MultimodalError | None = None

    @property
    def name(self) -> str:
        return str(self.source) if isinstance(self.source, str | Path) else f"<{type(self.source).__name__}>"


@dataclass
class _Reporter:
    """The caller's callbacks."""

    progress: Callable[[Source, float, float], None]
    segments: Callable[[Source, list[dict[str, Any]]], None]

    def __call__(self, job: _Job, channel: _Channel, position: int, segments: list[dict[str, Any]]) -> None:
        """`position`: samples of the channel."""
        channel.position = min(position, channel.session.samples)
        if channel.speaker is not None:
            for segment in segments:
                segment["speaker"] = channel.speaker
        done, total = sum(one.position for one in job.channels), channel.session.samples
        try:
            if segments:
                self.segments(job.source, segments)
            self.progress(job.source, done / job.count / RATE, total / RATE)
        except Exception as error:
            raise _CallbackError(error) from None

    def at_frame(self, job: _Job, channel: _Channel, seek: int, segments: list[dict[str, Any]]) -> None:
        self(job, channel, seek * HOP, segments)


class _Ended(NamedTuple):
    """A stream that ended; without a channel, the marker after the last stream of a job."""

    job: _Job
    channel: _Channel | None = None
    index: int = 0
    transcription: Transcription | None = None


def _streams(
    sources: Iterable[Source], options: Options, open_: Open, report: _Reporter
) -> Iterator[Generator[Any, Any, _Ended]]:
    """The streams of all sources, opened when their turn comes, and a marker after those of each source."""
    for index, source in enumerate(sources):
        job = _Job(source, index)
        try:
            for channel in _channels(job, options):
                channel.session = open_(channel.audio, partial(report.at_frame, job, channel))
                for number, stream in enumerate(channel.session.streams):
                    job.pending += 1
                    yield _tagged(stream, job, channel, number)
                    if job.error is not None:  # the rest of this source is not needed
                        raise job.error
        except Exception as error:
            job.error = item_error(error, job.name, AudioError)
        job.started = True
        yield _tagged(None, job)


def _channels(job: _Job, options: Options) -> Iterator[_Channel]:
    split = options.split_channels
    if split:
        job.count = 1 if isinstance(job.source, Tensor) else count_channels(job.source, options.audio_track)
    for number in range(job.count):
        audio = AudioSource(
            job.source, channel=number if split else None, on_truncated=options.on_truncated,
            audio_track=options.audio_track,
        )  # fmt: skip
        job.channels.append(_Channel(audio, f"channel {number + 1}" if split else None))
        yield job.channels[-1]


def _tagged(
    stream: Stream | None, job: _Job, channel: _Channel | None = None, index: int = 0
) -> Generator[Any, Any, _Ended]:
    transcription = None
    try:
        transcription = None if stream is None else (yield from stream)
    except Exception as error:
        job.error = item_error(error, job.name, AudioError)
    return _Ended(job, channel, index, transcription)


def _collected(
    ended: Iterable[_Ended], checkpoint: Checkpoint, options: Options, report: _Reporter
) -> Iterator[tuple[_Job, Result | MultimodalError]]:
    """Each job when its last stream ends."""
    for job, channel, index, transcription in ended:
        if channel is not None:
            job.pending -= 1
            if transcription is not None:
                channel.parts[index] = transcription
            while not channel.session.reports and (part := channel.parts.get(channel.reported)):
                report(job, channel, part.coverage[-1].stop, part.segments)
                channel.reported += 1
        if job.started and not job.pending:
            yield job, job.error or _result(job, checkpoint, options)


def _ordered(results: Iterable[tuple[_Job, Any]]) -> Iterator[tuple[_Job, Any]]:
    waiting, due = {}, 0
    for job, result in results:
        waiting[job.index] = job, result
        while due in waiting:
            yield waiting.pop(due)
            due += 1


def _result(job: _Job, checkpoint: Checkpoint, options: Options) -> Result:
    channels, session = job.channels, job.channels[0].session
    if len({channel.session.language for channel in channels}) > 1:
        for channel in channels:
            for segment in channel.segments():
                segment.setdefault("language", channel.session.language)
    segments = [segment for channel in channels for segment in channel.segments()]
    if len(channels) > 1:
        segments.sort(key=lambda segment: segment["start"])
    if isinstance(options, CtcOptions):
        text = " ".join(segment["text"] for segment in segments)
    elif len(channels) > 1:
        text = "".join(segment["text"] for segment in segments)
    else:
        tokens = [token for part in channels[0].transcriptions() for token in part.tokens]
        text = checkpoint.tokenizer.decode(tokens)
    result = {"text": text, "segments": [{"id": i, **segment} for i, segment in enumerate(segments)]}
    result["language"] = session.language
    if session.probability is not None:
        result["language_probability"] = session.probability
    result |= timeline.coverage(timeline.union([channel.coverage() for channel in channels]))
    result["damaged"] = [span._asdict() for span in channels[0].audio.damage]
    if options.decode_log:
        log = [(channel.speaker, e) for channel in channels for part in channel.transcriptions() for e in part.log]
        result["log"] = [entry if speaker is None else {**entry, "speaker": speaker} for speaker, entry in log]
    return result
