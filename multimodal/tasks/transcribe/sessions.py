"""Sessions: recordings opened as streams of model requests, for both kinds of speech model."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.models.speech.canary import Canary
from multimodal.system.journal import JournalPart
from multimodal.tasks.transcribe.audio_source import AudioSource, AudioSurvey, MelReader, clip_waves, survey
from multimodal.tasks.transcribe.conformer import windows
from multimodal.tasks.transcribe.conformer.decode import decode_windows, with_language_model
from multimodal.tasks.transcribe.conformer.text_decoder import ENGLISH
from multimodal.tasks.transcribe.options import RecognizerOptions, WhisperOptions
from multimodal.tasks.transcribe.results import Transcription, journalled
from multimodal.tasks.transcribe.segmentation import Clip, LevelMeter, cut, plan
from multimodal.tasks.transcribe.timeline import Span
from multimodal.tasks.transcribe.vad import SpeechDetector
from multimodal.tasks.transcribe.whisper.decode import Encode, Identify, model_and_tokenizer, server
from multimodal.tasks.transcribe.whisper.language import allowed_codes, combine
from multimodal.tasks.transcribe.whisper.windows import StreamAudio, WhisperTranscriber
from multimodal.tasks.transcribe.whisper.words import STRIDE, alignment_heads
from multimodal.tokens.audio.levels import SILENT
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.weights.folder import Checkpoint

Stream = Generator[Any, Any, Transcription]
Serve = Callable[[list[Any]], list[Any]]
Report = Callable[[int, list[dict[str, Any]]], None]


class Session(NamedTuple):
    """A recording of `samples` samples: its language (None: unknown) and the probability if it was detected, the spans
    skipped in advance, and the streams of the rest, in order. `reports`: the streams call `report` themselves."""

    samples: int
    language: str | None
    probability: float | None
    skipped: list[Span]
    streams: Iterable[Stream]
    reports: bool = False


Open = Callable[[AudioSource, Report, JournalPart], Session]


def opener(checkpoint: Checkpoint, options: WhisperOptions | RecognizerOptions) -> tuple[Open, Serve]:
    """Return a function that opens a recording, and one that answers the requests of its streams.

    Raises UsageError for a language or task unknown to the model, CheckpointError for a missing vocabulary."""
    if isinstance(options, WhisperOptions):
        language, serve = whisper_language(checkpoint, options), server(checkpoint, options)
        _check_tokens(checkpoint, options)
        if options.batched:
            _check_padding(options, STRIDE * checkpoint.model.config.encoder.context * HOP)
        if options.word_timestamps:
            alignment_heads(checkpoint)  # report a faulty card before reading anything
        return partial(_open_whisper, checkpoint, options, language, serve), serve
    own = only_language(checkpoint, options.language, options.task)
    _check_padding(options, windows.longest(checkpoint))
    options = with_language_model(checkpoint, options)  # refuse an unfit one before reading anything
    spoken = own or options.language or (ENGLISH if isinstance(checkpoint.model, Canary) else None)
    open_ = partial(_open_conformer, checkpoint, options, spoken)
    return open_, partial(decode_windows, checkpoint=checkpoint, options=options)


def only_language(checkpoint: Checkpoint, language: str | None, task: str) -> str | None:
    """The language of a model that is no Whisper, if its card states it. Raises UsageError for another language, and
    for a task that it does not have."""
    own = checkpoint.card.get("language")
    if language is not None and own is not None and language != own:
        raise UsageError(f"{language!r}: {checkpoint.source} knows {own!r} only", argument="language")
    if task != "transcribe" and not isinstance(checkpoint.model, Canary):
        raise UsageError(f"task {task!r}: {checkpoint.source} can only transcribe")
    return own


def _check_padding(options: WhisperOptions | RecognizerOptions, longest: int) -> None:
    """Raises UsageError where padding leaves no room for two frames of speech in a window of `longest` samples."""
    most = (1000 * longest / RATE - 64) / 2
    if options.vad_filter and options.vad_speech_pad_ms > most:
        problem = f"must be at most {most:g} in a window of {longest / RATE:g} s (got {options.vad_speech_pad_ms:g})"
        raise UsageError(problem, argument="vad_speech_pad_ms")


def _check_tokens(checkpoint: Checkpoint, options: WhisperOptions) -> None:
    (model, tokenizer), tokens = model_and_tokenizer(checkpoint), options.suppress_tokens or ()
    size = model.config.decoder.vocabulary
    if unknown := next((token for token in tokens if token >= size), None):
        raise UsageError(f"suppress_tokens: {unknown} is not one of the {size} tokens of {checkpoint.source}")
    time = next((token for token in tokens if token >= tokenizer.timestamp_begin), None)
    if time is not None and not options.without_timestamps:
        raise UsageError(f"suppress_tokens: {time} is a timestamp, which only without_timestamps can suppress")


def whisper_language(checkpoint: Checkpoint, options: WhisperOptions) -> str | None:
    """The language of the options or the model's only one; None if it must be detected. Raises UsageError for a
    language or task unknown to the model."""
    tokenizer = model_and_tokenizer(checkpoint)[1]
    allowed_codes(tokenizer, options.languages)
    if not tokenizer.multilingual and options.multilingual:
        raise UsageError(f"multilingual: {checkpoint.source} knows English only")
    if tokenizer.multilingual and options.language is None:
        return None
    tokenizer.sot_sequence(options.language, options.task)
    return options.language or "en"


def _open_whisper(
    checkpoint: Checkpoint, options: WhisperOptions, language: str | None, serve: Serve, source: AudioSource,
    report: Report, journal: JournalPart,
) -> Session:  # fmt: skip
    model, tokenizer = model_and_tokenizer(checkpoint)
    size, bands = STRIDE * model.config.encoder.context, model.config.encoder.bands
    segments = options.language_detection_segments if language is None else 1
    device = next(model.parameters()).device
    meter = LevelMeter(options.vad_filter, device)
    overview = survey(
        source, bands=bands, push=meter.push, windows=segments if segments > 1 else 0, size=size * HOP, device=device
    )  # fmt: skip
    probability = None
    if language is None:
        known = journal.part("language")
        if known.records:
            language, probability = known.records[0]
        else:
            language, probability = _identify(source, overview, bands, size, options, serve)
            known.add([language, probability])
    content, (peaks, powers) = overview.samples // HOP, meter.levels()
    speech = meter.speech(options, overview.samples, size if options.batched else None)
    clips, skipped = plan(options, content, speech)
    reader = MelReader(source, bands, overview.mel_peak, overview.samples, device, overview.mel)

    def silent(seek: int, count: int) -> bool:
        return options.remove_repetitions and bool((peaks[seek : seek + count] < SILENT).all())

    audio, common = StreamAudio(reader.window, content, size, silent), (model.config.decoder.context, options, language)
    if options.batched:
        parts = [part for clip in clips for part in cut(powers, *clip, size)]
        streams = _independent(audio, parts, journal, tokenizer, *common)
    else:
        streams = [WhisperTranscriber(audio, clips, tokenizer, *common, report, journal).run()]
    return Session(overview.samples, language, probability, skipped, streams, reports=not options.batched)


def _independent(
    audio: StreamAudio, parts: Sequence[Clip], journal: JournalPart, *common: Any
) -> Iterator[Stream]:  # fmt: skip
    """A stream for each part, which reads its mel when its turn comes."""
    for start, stop in parts:
        mel = audio.mel(start, stop - start)
        window = WhisperTranscriber(audio._replace(mel=partial(_frames, mel, start)), [(start, stop)], *common)
        yield journalled(window.run(), journal.part(start))


def _frames(mel: Float[Tensor, "M F"], first: int, seek: int, count: int) -> Float[Tensor, "M _"]:
    """Frames [seek, seek + count) of a recording, of which `mel` holds those from `first` on."""
    return mel[:, seek - first : seek - first + count]


def _identify(
    source: AudioSource, overview: AudioSurvey, bands: int, size: int, options: WhisperOptions, serve: Serve
) -> tuple[str, float]:
    """Language and probability over the survey's windows, weighted by the speech in each; without windows, over the
    beginning of the recording, as in openai-whisper."""
    waves = [wave for _, wave in overview.windows]
    peak = overview.mel_peak
    readers = [MelReader(AudioSource(wave, quiet=True), bands, peak, len(wave)) for wave in waves]
    readers = readers or [MelReader(source, bands, peak, overview.samples, mel=overview.mel)]
    weights = [_speech_share(wave) for wave in waves] if len(waves) > 1 else [1.0]
    votes = []
    for reader, weight in zip(readers, weights, strict=True):
        (features,) = serve([Encode(reader.window(0, size))])
        (probabilities,) = serve([Identify(features)])
        votes.append((probabilities, weight))
    return combine(votes, options.languages)


def _speech_share(wave: Float[Tensor, "_"]) -> float:
    """Mean probability of speech."""
    detector = SpeechDetector()
    detector.push(wave)
    return detector.probabilities().mean().item()


def _open_conformer(
    checkpoint: Checkpoint, options: RecognizerOptions, language: str | None, source: AudioSource, report: Report,
    journal: JournalPart,
) -> Session:  # fmt: skip
    meter = LevelMeter(options.vad_filter, next(checkpoint.model.parameters()).device)
    samples = survey(source, push=meter.push).samples
    longest, content = windows.longest(checkpoint) // HOP, -(-samples // HOP)  # a partial frame counts
    _, powers = meter.levels()
    clips, skipped = plan(options, content, meter.speech(options, samples, longest))
    parts = [part for clip in clips for part in cut(powers, *clip, longest)]
    waves = clip_waves(source, [(start * HOP, min(stop * HOP, samples)) for start, stop in parts])
    streams = (
        journalled(windows.stream(start, wave, checkpoint, options, source.name), journal.part(start))
        for start, wave in waves
    )
    return Session(samples, language, None, skipped, streams)
