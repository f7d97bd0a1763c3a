"""Speech to text: any recording, any speech model of the suite."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Unpack, overload

import numpy as np

from multimodal.errors import AudioError, MultimodalError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.journal import Journal, JournalPart
from multimodal.tasks.encode.arguments import TranscribeArguments
from multimodal.tasks.encode.attempts import item_error
from multimodal.tasks.encode.columns import Columns, is_columns, result_columns, source_column
from multimodal.tasks.encode.loaded import (
    Item,
    Items,
    LoadedModel,
    Model,
    OnError,
    check_on_error,
    checked_results,
    device_of,
    loaded,
    local,
)
from multimodal.tasks.encode.search_defaults import warn_of_search
from multimodal.tasks.transcribe import scheduler, timeline
from multimodal.tasks.transcribe.audio_source import AudioSource, name_of_audio
from multimodal.tasks.transcribe.options import RecognizerOptions, SpeechDecodingOptions, WhisperOptions, options_for
from multimodal.tasks.transcribe.results import Transcription
from multimodal.tasks.transcribe.sessions import Open, Session, Stream, opener
from multimodal.tasks.transcribe.whisper.decode import batch_key
from multimodal.tokens.audio.arrays import AudioInput, as_audio
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.weights.folder import Checkpoint

Transcript = dict[str, Any]
Options = WhisperOptions | RecognizerOptions
OnProgress = Callable[[Any, float, float], None]
OnSegments = Callable[[Any, list[dict[str, Any]]], None]
OpenJournal = Callable[[Any], Journal]
MOST_AHEAD = 8  # recordings decoded ahead of the model


class Transcriber(LoadedModel):
    """Speech recognizer: loads a speech model once.

    `options`: those of `WhisperOptions` or, for other models, `RecognizerOptions`. Up to `batch_size` recordings, or
    independent windows of one recording, are decoded together; the text does not depend on it. `device`: `auto` is the
    GPU if there is one. `compute_type`: see `prepare_for_inference`. `urls`: allow http and https URLs.

    Raises UsageError (an option that the model does not have), CheckpointError."""

    def __init__(self, model: Model | None = None, *, urls: bool = False, **options: Unpack[TranscribeArguments]):
        checkpoint = loaded(model, "transcribe")
        self.options = options_for(checkpoint, options)
        warn_of_search(checkpoint, options, SpeechDecodingOptions)
        device = device_of(self.options.device, checkpoint)
        self.urls, self.checkpoint = urls, prepare_for_inference(checkpoint, self.options.compute_type, device)
        self._open, self._serve = opener(self.checkpoint, self.options)

    @overload
    def __call__(self, audio: Columns) -> dict[str, np.ndarray]: ...
    @overload
    def __call__(
        self, audio: AudioInput, sampling_rate: int | None = None, *, on_progress: OnProgress | None = None,
        on_segments: OnSegments | None = None,
    ) -> Transcript: ...  # fmt: skip
    def __call__(
        self, audio: Any, sampling_rate: int | None = None, *, on_progress: OnProgress | None = None,
        on_segments: OnSegments | None = None,
    ) -> Any:  # fmt: skip
        """Transcribe a recording: see `as_audio` for what it may be.

        As in openai-whisper, the result has `text`, `language` and `segments`, each with `id`, `seek` (10 ms frames),
        `start`, `end` (seconds), `text`, `tokens`, `temperature`, `avg_logprob`, `compression_ratio`, `no_speech_prob`;
        also `words` with `word_timestamps`, `token_logprobs` if asked for, `language` with `multilingual`, `speaker`
        with `split_channels`. In addition: `language_probability` (if detected), `duration`, `transcribed` [[start,
        end], …] and `skipped` [{start, end, reason}], which together tile the recording, `damaged` [{start, end,
        what}], and with `decode_log` a `log` of every decoding attempt. With `split_channels` the language is that of
        the channel with most text, a second is transcribed if it is on any channel, and `channels` has the `speaker`,
        `language` (None: without text), `language_probability`, `duration`, `transcribed` and `skipped` of each.

        Raises AudioError (unreadable, empty, not finite), UsageError.

        A batch of columns (bytes, audio or path) gives columns: text, language, error (see `encode/columns.py`)."""
        if is_columns(audio):
            failed = {"text": "", "language": ""}
            _, sources, kept = source_column(audio, (*failed, "error"))
            return result_columns(kept, (result for _, result in self.many(sources)), lambda one: one, failed)
        items = [as_audio(local(audio, self.urls), sampling_rate)]
        ((_, result),) = self.many(items, on_error="raise", on_progress=on_progress, on_segments=on_segments)
        return result  # type: ignore[return-value]

    def many(
        self, items: Iterable[Any], *, keyed: bool = False, in_order: bool = True, on_error: OnError = "return",
        on_progress: OnProgress | None = None, on_segments: OnSegments | None = None,
        journal: OpenJournal | None = None,
    ) -> Iterator[tuple[Any, Transcript | MultimodalError]]:  # fmt: skip
        """Yield (key, result) for each recording, in order or, without `in_order`, as each is done. With `keyed`, items
        are (key, audio) pairs; else a path is its own key, and any other audio has its position. A recording that fails
        gives its error as result, unless `on_error` is "raise".

        `on_progress(key, seconds done, seconds in total)` and `on_segments(key, new segments without `id`)` are called
        on the way. `journal(key)` opens the Journal of a recording when its turn comes: windows are kept there as
        they end, and those that it holds are not decoded again. Its settings must tell this recording, model and
        options from others; the caller closes it."""
        check_on_error(on_error)
        sources = Items(items, keyed)
        report = _Reporter(on_progress or (lambda *_: None), on_segments or (lambda *_: None))
        # an iterator may wait for a result before it gives its next item
        ahead = min(MOST_AHEAD, len(os.sched_getaffinity(0))) if isinstance(items, list | tuple) else 0
        streams = _streams(sources, self.options, self._open, report, self.urls, journal, ahead)
        ended = scheduler.run(streams, self._serve, self.options.batch_size, batch_key)
        results = _collected(ended, self.checkpoint, self.options, report)
        results = _unwrapped(_ordered(results) if in_order else results)
        return self._queued(checked_results(results, sources, on_error))


def transcribe(
    audio: AudioInput, model: Model | None = None, *, sampling_rate: int | None = None,
    on_progress: OnProgress | None = None, on_segments: OnSegments | None = None, urls: bool = False,
    **options: Unpack[TranscribeArguments],
) -> Transcript:  # fmt: skip
    """Transcribe a recording with a new `Transcriber`, whose options it takes. Each call loads the model."""
    made = Transcriber(model, urls=urls, **options)
    return made(audio, sampling_rate, on_progress=on_progress, on_segments=on_segments)


def transcribe_many(
    items: Iterable[Any], model: Model | None = None, *, keyed: bool = False, in_order: bool = True,
    on_error: OnError = "return", on_progress: OnProgress | None = None, on_segments: OnSegments | None = None,
    journal: OpenJournal | None = None, urls: bool = False, **options: Unpack[TranscribeArguments],
) -> Iterator[tuple[Any, Transcript | MultimodalError]]:  # fmt: skip
    """`Transcriber.many` of a new `Transcriber`."""
    made = Transcriber(model, urls=urls, **options)
    return made.many(
        items, keyed=keyed, in_order=in_order, on_error=on_error, on_progress=on_progress, on_segments=on_segments,
        journal=journal,
    )  # fmt: skip


class _CallbackError(BaseException):
    """An exception of a caller's function, to pass through the handlers of a source's errors."""

    def __init__(self, error: Exception):
        self.error = error


def _unwrapped(results: Iterable[tuple["_Job", Transcript | MultimodalError]]) -> Iterator[tuple[Any, Any]]:
    try:
        for job, result in results:
            yield job.item.key, result
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

    def language(self) -> dict[str, Any]:
        """`language`, and `language_probability` if it was detected."""
        own = {"language": self.session.language, "language_probability": self.session.probability}
        return {name: value for name, value in own.items() if name == "language" or value is not None}

    def coverage(self) -> list[timeline.Span]:
        spans = [*self.session.skipped, *(span for part in self.transcriptions() for span in part.coverage)]
        return timeline.tiled(spans, self.session.samples)


@dataclass
class _Job:
    """A source with `count` channels. `pending`: streams that have not ended; `started`: all of them have begun."""

    item: Item
    count: int = 1
    pending: int = 0
    started: bool = False
    channels: list[_Channel] = field(default_factory=list)
    error: MultimodalError | None = None

    @property
    def name(self) -> str:
        return name_of_audio(self.item.source)


@dataclass
class _Reporter:
    """The caller's callbacks."""

    progress: OnProgress
    segments: OnSegments

    def __call__(self, job: _Job, channel: _Channel, position: int, segments: list[dict[str, Any]]) -> None:
        """`position`: samples of the channel."""
        channel.position = min(position, channel.session.samples)
        if channel.speaker is not None:
            for segment in segments:
                segment["speaker"] = channel.speaker
        done, total = sum(one.position for one in job.channels), channel.session.samples
        try:
            if segments:
                self.segments(job.item.key, segments)
            self.progress(job.item.key, done / job.count / RATE, total / RATE)
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
    items: Iterable[Item], options: Options, open_: Open, report: _Reporter, urls: bool,
    journal: OpenJournal | None, ahead: int,
) -> Iterator[Generator[Any, Any, _Ended]]:  # fmt: skip
    """The streams of all sources, opened when their turn comes, and a marker after those of each source."""
    for item, audio in _read_ahead(items, options, ahead):
        job = _Job(item)
        try:
            kept = JournalPart(None if journal is None else journal(item.key))
            for number, channel in enumerate(_channels(job, audio or local(item.source, urls), options)):
                channel.session = open_(channel.audio, partial(report.at_frame, job, channel), kept.part(number))
                for index, stream in enumerate(channel.session.streams):
                    job.pending += 1
                    yield _tagged(stream, job, channel, index)
                    if job.error is not None:  # the rest of this source is not needed
                        raise job.error
        except Exception as error:
            job.error = item_error(error, job.name, AudioError)
        job.started = True
        yield _tagged(None, job)


def _read_ahead(
    items: Iterable[Item], options: Options, count: int
) -> Iterator[tuple[Item, AudioSource | None]]:  # fmt: skip
    """Items with their audio, of which the next `count` are decoded by threads. None: opened when its turn comes."""
    waiting = deque[tuple[Item, AudioSource | None]]()
    try:
        for item in items:
            audio = None
            if count and not options.split_channels:
                with contextlib.suppress(MultimodalError):  # raised again when its turn comes
                    audio = AudioSource(
                        local(item.source, False), on_truncated=options.on_truncated, audio_track=options.audio_track
                    )
                    audio.read_ahead()
            waiting.append((item, audio))
            if len(waiting) > count:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, audio in waiting:
            if audio is not None:
                audio.close()


def _channels(job: _Job, source: Any, options: Options) -> Iterator[_Channel]:
    if isinstance(source, AudioSource):
        job.channels.append(_Channel(source, None))
        yield job.channels[-1]
        return
    split = options.split_channels
    open_ = partial(AudioSource, source, on_truncated=options.on_truncated, audio_track=options.audio_track)
    job.count = open_().count_channels() if split else 1
    for number in range(job.count):
        one = _Channel(open_(channel=number), f"channel {number + 1}") if split else _Channel(open_(), None)
        job.channels.append(one)
        yield one


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
) -> Iterator[tuple[_Job, Transcript | MultimodalError]]:
    """Each job when its last stream ends."""
    for one in ended:
        if (result := _taken(one, checkpoint, options, report)) is not None:
            yield one.job, result


def _taken(
    ended: _Ended, checkpoint: Checkpoint, options: Options, report: _Reporter
) -> Transcript | MultimodalError | None:
    """Give a job the transcription of a stream; the job's result if that was the last one."""
    job, channel, index, transcription = ended
    if channel is not None:
        job.pending -= 1
        if transcription is not None:
            channel.parts[index] = transcription
        while not channel.session.reports and (part := channel.parts.get(channel.reported)):
            report(job, channel, part.coverage[-1].stop, part.segments)
            channel.reported += 1
    if not job.started or job.pending:
        return None
    try:
        result = job.error or _result(job, checkpoint, options)
    except Exception as error:
        result = item_error(error, job.name, AudioError)
    for one in job.channels:
        one.audio.close()
    return result


class RecordingStreams:
    """One recording as streams of requests to the model, for a scheduler of several clients: `streams` are opened when
    taken, each runs as in `scheduler.run`, `serve` answers requests, and `taken` is given what each stream returns."""

    def __init__(self, transcriber: Transcriber, audio: Any, on_segments: OnSegments | None):
        self.transcriber, self.serve = transcriber, transcriber._serve
        self._report = _Reporter(lambda *_: None, on_segments or (lambda *_: None))
        items = [Item(None, audio, 0)]
        self.streams = _streams(items, transcriber.options, transcriber._open, self._report, transcriber.urls, None, 0)

    def taken(self, ended: Any) -> Transcript | None:
        """The result, if the stream that `ended` was the last. Raises AudioError."""
        result = _taken(ended, self.transcriber.checkpoint, self.transcriber.options, self._report)
        if isinstance(result, MultimodalError):
            raise result
        return result


def _ordered(results: Iterable[tuple[_Job, Any]]) -> Iterator[tuple[_Job, Any]]:
    waiting, due = {}, 0
    for job, result in results:
        waiting[job.item.position] = job, result
        while due in waiting:
            yield waiting.pop(due)
            due += 1


def _result(job: _Job, checkpoint: Checkpoint, options: Options) -> Transcript:
    for one in job.channels if options.split_channels else ():
        if one.session.probability is not None and not one.segments():  # what silence sounds like is nobody's
            one.session = one.session._replace(language=None, probability=None)
    channels = job.channels
    if len({channel.session.language for channel in channels}) > 1:
        for channel in channels:
            for segment in channel.segments():
                segment.setdefault("language", channel.session.language)
    segments = [segment for channel in channels for segment in channel.segments()]
    if len(channels) > 1:
        segments.sort(key=lambda segment: segment["start"])
    between = " " if isinstance(options, RecognizerOptions) else ""
    text = between.join(segment["text"] for segment in segments)
    if not between and len(channels) == 1:
        tokens = [token for part in channels[0].transcriptions() for token in part.tokens]
        text = checkpoint.tokenizer.decode(tokens)
    result = {"text": text, "segments": [{"id": i, **segment} for i, segment in enumerate(segments)]}
    result |= max(channels, key=lambda one: sum(len(segment["tokens"]) for segment in one.segments())).language()
    result |= timeline.coverage(timeline.union(spans := [channel.coverage() for channel in channels]))
    if options.split_channels:
        result["channels"] = [
            {"speaker": channel.speaker, **channel.language(), **timeline.coverage(own)}
            for channel, own in zip(channels, spans, strict=True)
        ]
    result["damaged"] = [span._asdict() for span in channels[0].audio.damage]
    if options.decode_log:
        log = [(channel.speaker, e) for channel in channels for part in channel.transcriptions() for e in part.log]
        result["log"] = [entry if speaker is None else {**entry, "speaker": speaker} for speaker, entry in log]
    return result
