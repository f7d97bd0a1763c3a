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
from multimodal.tasks.transcribe.recording import Recording
from multimodal.tasks.transcribe.sessions import Open, Opened, Stream, opener
from multimodal.tasks.transcribe.whisper.decode import batch_key
from multimodal.tasks.transcribe.whisper.options import CtcOptions, WhisperOptions, options_for
from multimodal.tasks.transcribe.whisper.windows import Heard
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.audio.reading import count_channels
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

DEFAULT_MODEL = "asr-conformer-en"
Source = str | Path | bytes | Tensor
Result = dict[str, Any]


def transcribe(audio: Source, model: str | Path | Checkpoint = DEFAULT_MODEL, **options: Any) -> Result:
    """The text of a recording: a file, its bytes, or mono samples [T] at 16 kHz.

    As in openai-whisper `text`, `language` and `segments`, each with `id`, `seek` (10 ms frames), `start`, `end`
    (seconds), `text`, `tokens`, `temperature`, `avg_logprob`, `compression_ratio`, `no_speech_prob`, with
    `word_timestamps` also `words`, with `multilingual` `language`, with `split_channels` `speaker`. Then
    `language_probability` (where it was detected), `duration`, `transcribed` [[start, end], …] and `skipped`
    [{start, end, reason}], which together are the whole recording, `damaged` [{start, end, what}], and with
    `decode_log` a `log` of every attempt at every window.

    `options`: `WhisperOptions` or, for a CTC model, `CtcOptions`, and those of `transcribe_many`. Raises AudioError
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
    """(source, its `transcribe` result), in the order of the sources or, without `in_order`, each as soon as it is
    there; an error of one recording stands in its place.

    Up to `batch_size` recordings, or windows that are independent, are decoded side by side; the text does not depend
    on it. `on_progress(source, seconds done, seconds in all)` and `on_segments(source, new segments, without `id`)`
    are called on the way. Raises as `transcribe`, but for a recording's own errors, before anything is read."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size: must be at least 1 ({batch_size})")
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    chosen = options_for(checkpoint, options)
    checkpoint = prepare_for_inference(checkpoint, chosen.compute_type, _device(chosen.device, checkpoint))
    open_, serve = opener(checkpoint, chosen)
    watch = _Watch(on_progress or (lambda *_: None), on_segments or (lambda *_: None))
    answers = scheduler.run(_streams(sources, chosen, open_, watch), serve, batch_size, batch_key)
    results = _collected(answers, checkpoint, chosen, watch)
    return _given(_ordered(results) if in_order else results)


def _given(results: Iterable[tuple["_Job", Result | MultimodalError]]) -> Iterator[tuple[Source, Any]]:
    try:
        for job, result in results:
            yield job.source, result
    except _OfCaller as failure:
        raise failure.error from None


class _OfCaller(BaseException):
    """What a function of the caller raised in the middle of a recording: no fault of the recording."""

    def __init__(self, error: Exception):
        self.error = error


def _device(name: str | None, checkpoint: Checkpoint) -> torch.device:
    """The device of this name, or the model's own. Raises UsageError."""
    if name is None:
        return next(checkpoint.model.parameters()).device
    return usable_device(name)


@dataclass
class _Watch:
    progress: Callable[[Source, float, float], None]
    segments: Callable[[Source, list[dict[str, Any]]], None]

    def __call__(self, job: "_Job", channel: "_Channel", reached: int, segments: list[dict[str, Any]]) -> None:
        """`reached`: samples of the channel."""
        channel.reached = min(reached, channel.opened.samples)
        if channel.speaker is not None:
            for segment in segments:
                segment["speaker"] = channel.speaker
        done, whole = sum(one.reached for one in job.channels), channel.opened.samples
        try:
            if segments:
                self.segments(job.source, segments)
            self.progress(job.source, done / job.count / RATE, whole / RATE)
        except Exception as error:
            raise _OfCaller(error) from None


@dataclass
class _Channel:
    """One recording: all of a source, or a channel of it."""

    recording: Recording
    speaker: str | None
    opened: Opened | None = None
    found: dict[int, Heard] = field(default_factory=dict)
    told: int = 0
    reached: int = 0

    @property
    def parts(self) -> list[Heard]:
        """What its streams heard, in their order."""
        return [self.found[number] for number in sorted(self.found)]

    @property
    def account(self) -> list[timeline.Span]:
        spans = [*self.opened.gaps, *(span for part in self.parts for span in part.account)]
        return timeline.tiled(spans, self.opened.samples)


@dataclass
class _Job:
    """A source, of `count` channels, and what is known of it so far. `left`: streams that have not ended; `whole`: all
    of them have begun."""

    source: Source
    number: int
    count: int = 1
    left: int = 0
    whole: bool = False
    channels: list[_Channel] = field(default_factory=list)
    error: MultimodalError | None = None

    @property
    def name(self) -> str:
        return str(self.source) if isinstance(self.source, str | Path) else f"<{type(self.source).__name__}>"


class _Answer(NamedTuple):
    job: _Job
    channel: _Channel | None = None
    number: int = 0
    heard: Heard | None = None


def _streams(
    sources: Iterable[Source], options: WhisperOptions | CtcOptions, open_: Open, watch: _Watch
) -> Iterator[Generator[Any, Any, _Answer]]:
    """The streams of all sources, opened when their turn comes; after those of each source one that says so."""
    for place, source in enumerate(sources):
        job = _Job(source, place)
        try:
            for channel in _channels(job, options):
                channel.opened = open_(channel.recording, partial(_tell, watch, job, channel))
                for number, stream in enumerate(channel.opened.streams):
                    job.left += 1
                    yield _tagged(stream, job, channel, number)
                    if job.error is not None:  # nothing more of this source is of use
                        raise job.error
        except Exception as error:
            job.error = item_error(error, job.name, AudioError)
        job.whole = True
        yield _tagged(None, job)


def _channels(job: _Job, options: WhisperOptions | CtcOptions) -> Iterator[_Channel]:
    if options.split_channels:
        job.count = 1 if isinstance(job.source, Tensor) else count_channels(job.source, options.audio_track)
    for number in range(job.count):
        chosen = number if options.split_channels else None
        how = {"on_truncated": options.on_truncated, "audio_track": options.audio_track}
        recording = Recording(job.source, channel=chosen, **how)
        job.channels.append(_Channel(recording, f"channel {number + 1}" if options.split_channels else None))
        yield job.channels[-1]


def _tell(watch: _Watch, job: _Job, channel: _Channel, seek: int, segments: list[dict[str, Any]]) -> None:
    watch(job, channel, seek * HOP, segments)


def _tagged(
    stream: Stream | None, job: _Job, channel: _Channel | None = None, number: int = 0
) -> Generator[Any, Any, _Answer]:
    heard = None
    try:
        heard = None if stream is None else (yield from stream)
    except Exception as error:
        job.error = item_error(error, job.name, AudioError)
    return _Answer(job, channel, number, heard)


def _collected(
    answers: Iterable[_Answer], checkpoint: Checkpoint, options: WhisperOptions | CtcOptions, watch: _Watch
) -> Iterator[tuple[_Job, Result | MultimodalError]]:
    """Each source as its last stream ends."""
    for job, channel, number, heard in answers:
        if channel is not None:
            job.left -= 1
        if heard is not None:
            channel.found[number] = heard
        while channel is not None and not channel.opened.told and (next_ := channel.found.get(channel.told)):
            watch(job, channel, next_.account[-1].stop, next_.segments)
            channel.told += 1
        if job.whole and not job.left:
            yield job, job.error or _result(job, checkpoint, options)


def _ordered(results: Iterable[tuple[_Job, Any]]) -> Iterator[tuple[_Job, Any]]:
    waiting, due = {}, 0
    for job, result in results:
        waiting[job.number] = job, result
        while due in waiting:
            yield waiting.pop(due)
            due += 1


def _result(job: _Job, checkpoint: Checkpoint, options: WhisperOptions | CtcOptions) -> Result:
    channels, opened = job.channels, job.channels[0].opened
    segments = [segment for channel in channels for part in channel.parts for segment in part.segments]
    if len({channel.opened.language for channel in channels}) > 1:
        for channel in channels:
            for segment in (segment for part in channel.parts for segment in part.segments):
                segment.setdefault("language", channel.opened.language)
    if len(channels) > 1:
        segments.sort(key=lambda segment: segment["start"])
    if isinstance(options, CtcOptions):
        text = " ".join(segment["text"] for segment in segments)
    elif len(channels) > 1:
        text = "".join(segment["text"] for segment in segments)
    else:
        text = checkpoint.tokenizer.decode([token for part in channels[0].parts for token in part.tokens])
    result = {"text": text, "segments": [{"id": i, **segment} for i, segment in enumerate(segments)]}
    result["language"] = opened.language
    if opened.probability is not None:
        result["language_probability"] = opened.probability
    result |= timeline.entries(timeline.together([channel.account for channel in channels]))
    result["damaged"] = [one._asdict() for one in channels[0].recording.damage]
    if options.decode_log:
        log = ((channel.speaker, entry) for channel in channels for part in channel.parts for entry in part.log)
        result["log"] = [entry if speaker is None else {**entry, "speaker": speaker} for speaker, entry in log]
    return result
