"""Recordings as the streams that hear them, of both kinds of speech models."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.tasks.transcribe import segmentation
from multimodal.tasks.transcribe.conformer import windows
from multimodal.tasks.transcribe.conformer.decode import tokenizer_of, with_language_model
from multimodal.tasks.transcribe.recording import MelReader, Recording, Survey
from multimodal.tasks.transcribe.recording import cut as samples_of
from multimodal.tasks.transcribe.timeline import Span
from multimodal.tasks.transcribe.whisper import decode
from multimodal.tasks.transcribe.whisper.options import CtcOptions, WhisperOptions
from multimodal.tasks.transcribe.whisper.windows import STRIDE, Heard, Sound, WhisperStream, held
from multimodal.tokens.audio.levels import SILENT
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.weights.folder import Checkpoint

Stream = Generator[Any, Any, Heard]
Serve = Callable[[list[Any]], list[Any]]
Tell = Callable[[int, list[dict[str, Any]]], None]


class Opened(NamedTuple):
    """A recording of `samples`: its language (None: not known), with what probability if it was detected, what is left
    out (`gaps`), and the streams that hear the rest, in order. `told`: the streams call `tell` themselves."""

    samples: int
    language: str | None
    probability: float | None
    gaps: list[Span]
    streams: Iterable[Stream]
    told: bool = False


Open = Callable[[Recording, Tell], Opened]


def opener(checkpoint: Checkpoint, options: WhisperOptions | CtcOptions) -> tuple[Open, Serve]:
    """What opens a recording for a model, and what answers its streams' requests.

    Raises UsageError for a language or a task that the model does not know, CheckpointError for one that lacks its
    vocabulary."""
    if isinstance(options, WhisperOptions):
        language, serve = named_language(checkpoint, options), decode.server(checkpoint, options)
        _known_tokens(checkpoint, options)
        if options.word_timestamps:
            from multimodal.tasks.transcribe.whisper.words import alignment_heads

            alignment_heads(checkpoint)  # what is wrong with them is told before anything is read
        return partial(_open_whisper, checkpoint, options, language, serve), serve
    own = checkpoint.card.get("language")
    if options.language is not None and own is not None and options.language != own:
        raise UsageError(f"language {options.language!r}: {checkpoint.source} knows {own!r} only")
    if options.task != "transcribe":
        raise UsageError(f"task {options.task!r}: {checkpoint.source} can only transcribe")
    options = with_language_model(checkpoint, options)  # one that does not fit is refused before anything is read
    open_ = partial(_open_joint, checkpoint, options, own or options.language)
    return open_, partial(windows.serve, checkpoint, options=options)


def _known_tokens(checkpoint: Checkpoint, options: WhisperOptions) -> None:
    (model, tokenizer), listed = decode.parts(checkpoint), options.suppress_tokens or ()
    size = model.config.decoder.vocabulary
    if strange := next((token for token in listed if token >= size), None):
        raise UsageError(f"suppress_tokens: {strange} is not one of the {size} tokens of {checkpoint.source}")
    time = next((token for token in listed if token >= tokenizer.timestamp_begin), None)
    if time is not None and not options.without_timestamps:
        raise UsageError(f"suppress_tokens: {time} is a time, which must be written (without_timestamps writes none)")


def named_language(checkpoint: Checkpoint, options: WhisperOptions) -> str | None:
    """The language that is given or the only one; None: it must be found. Raises UsageError for one, or a task, that
    the model does not know."""
    from multimodal.tasks.transcribe.whisper.language import allowed_codes

    tokenizer = decode.parts(checkpoint)[1]
    allowed_codes(tokenizer, options.languages)
    if not tokenizer.multilingual and options.multilingual:
        raise UsageError(f"multilingual: {checkpoint.source} knows English only")
    if tokenizer.multilingual and options.language is None:
        return None
    tokenizer.sot_sequence(options.language, options.task)
    return options.language or "en"


def _open_whisper(
    checkpoint: Checkpoint, options: WhisperOptions, language: str | None, serve: Serve, recording: Recording,
    tell: Tell,
) -> Opened:  # fmt: skip
    model, tokenizer = decode.parts(checkpoint)
    size, bands = STRIDE * model.config.encoder.context, model.config.encoder.bands
    several = options.language_detection_segments if language is None else 1
    listened = several if several > 1 else 0
    found, ear = segmentation.listen(recording, options, bands=bands, windows=listened, size=size * HOP)
    probability = None
    if language is None:
        language, probability = _identified(_listened(recording, found, bands, size), found, options, serve)
    content, (peaks, powers) = found.samples // HOP, ear.levels()
    clips, gaps = segmentation.plan(
        options, content, segmentation.speech(options, found, size if options.batched else None)
    )
    reader = MelReader(recording, bands, found.mel_peak, found.samples)

    def silent(seek: int, count: int) -> bool:
        return options.cut_loops and bool((peaks[seek : seek + count] < SILENT).all())

    sound, common = Sound(reader.window, content, size, silent), (model.config.decoder.context, options, language)
    if options.batched:
        parts = [part for clip in clips for part in segmentation.cut(powers, *clip, size)]
        streams = _independent(sound, parts, tokenizer, *common)
    else:
        streams = [WhisperStream(sound, clips, tokenizer, *common, tell).run()]
    return Opened(found.samples, language, probability, gaps, streams, told=not options.batched)


def _independent(sound: Sound, parts: Sequence[segmentation.Clip], *common: Any) -> Iterator[Stream]:
    """A stream for each part, which takes its mel when its turn comes."""
    for start, stop in parts:
        mel = sound.mel(start, stop - start)
        yield WhisperStream(sound._replace(mel=held(mel, start)), [(start, stop)], *common).run()


def _listened(recording: Recording, found: Survey, bands: int, size: int) -> Iterator[Float[Tensor, "M F"]]:
    """The mel of each window that is listened to; without any the recording's begin, as openai-whisper has it."""
    if not found.windows:
        yield MelReader(recording, bands, found.mel_peak, found.samples).window(0, size)
    for _, wave in found.windows:
        yield MelReader(Recording(wave), bands, found.mel_peak, len(wave)).window(0, size)


def _identified(
    mels: Iterable[Float[Tensor, "M F"]], found: Survey, options: WhisperOptions, serve: Serve
) -> tuple[str, float]:
    """Language and its probability over all windows, of which each counts as much as there is speech in it."""
    from multimodal.tasks.transcribe.vad import SpeechDetector, speech_share
    from multimodal.tasks.transcribe.whisper.language import combine

    heard = []
    for mel in mels:
        (features,) = serve([decode.Encode(mel)])
        (chances,) = serve([decode.Identify(features)])
        heard.append(chances)
    weights = [1.0] * len(heard)
    if len(heard) > 1:
        for i, (_, wave) in enumerate(found.windows):
            detector = SpeechDetector()
            detector.push(wave)
            weights[i] = speech_share(detector.probabilities(), 0, len(wave))
    return combine(list(zip(heard, weights, strict=True)), options.languages)


def _open_joint(
    checkpoint: Checkpoint, options: CtcOptions, language: str | None, recording: Recording, tell: Tell
) -> Opened:  # fmt: skip
    found, ear = segmentation.listen(recording, options)
    longest, content = windows.LONGEST // HOP, -(-found.samples // HOP)  # a started frame counts
    _, powers = ear.levels()
    clips, gaps = segmentation.plan(options, content, segmentation.speech(options, found, longest))
    parts = [part for clip in clips for part in segmentation.cut(powers, *clip, longest)]
    sounds = samples_of(recording, [(start * HOP, min(stop * HOP, found.samples)) for start, stop in parts])
    streams = (_joint(start, wave, checkpoint, options) for start, wave in sounds)
    return Opened(found.samples, language, None, gaps, streams)


def _joint(start: int, wave: Tensor, checkpoint: Checkpoint, options: CtcOptions) -> Stream:
    stream, log, answer = windows.stream(start, wave, checkpoint, options), [], None
    while True:
        try:
            answer = yield stream.send(answer)
        except StopIteration as stop:
            window = stop.value
            break
        if options.decode_log:
            log.append({
                "seek": round(start / HOP), "start": start / RATE, "end": (start + len(wave)) / RATE,
                "temperature": 0.0, "avg_logprob": answer.avg_logprob, "no_speech_prob": answer.no_speech_prob,
                "tokens": answer.ids, "text": tokenizer_of(checkpoint).decode(answer.ids),
            })  # fmt: skip
    tokens = [token for segment in window.segments for token in segment["tokens"]]
    return Heard(window.segments, tokens, [Span(start, start + len(wave), window.skipped)], log)
