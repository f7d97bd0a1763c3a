"""Options of transcription: of all speech models, of Whisper and of the others, of live audio, of voice activity."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.errors import CheckpointError, UsageError, did_you_mean
from multimodal.inference.options import MachineOptions
from multimodal.system.assets import shipped
from multimodal.system.options import OptionSet, entries, number, option
from multimodal.tokens.text.languages import language_code

if TYPE_CHECKING:
    from multimodal.weights.folder import Checkpoint

MOST = 1e9  # of numbers that only have to be finite
LONGEST_WINDOW = 8.0  # seconds; see conformer.windows


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"must be a string (got {value!r:.40})")
    return value


def _path(value: Any) -> Any:
    """A path or, from a program, a language model that is already loaded."""
    return value if isinstance(value, tuple) else _string(str(value) if isinstance(value, Path) else value)


def _language(value: Any) -> str:
    if value == "auto":  # whisper.cpp's
        raise UsageError("must be a code or English name; left out, it is detected (got 'auto')")
    return language_code(_string(value))


def _nonempty(found: tuple, value: Any) -> tuple:
    if not found:
        raise UsageError(f"needs at least one value (got {value!r})")
    return found


def _languages(value: Any) -> tuple[str, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if isinstance(value, str) and not all(parts):
        raise UsageError(f"must be names with commas between (got {value!r:.40})")
    return _nonempty(entries(parts, str, _language), value)


def _temperatures(value: Any) -> tuple[float, ...]:
    single = isinstance(value, Real)
    return _nonempty(entries([value] if single else value, float, partial(number, low=0, high=100)), value)


def _clips(value: Any) -> tuple[float, ...]:
    found = entries(value, float, partial(number, low=0, high=MOST))
    if any(later < earlier for earlier, later in pairwise(found)):
        raise UsageError(f"must be starts and ends in seconds, in ascending order (got {value!r:.40})")
    return found or (0.0,)


def _tokens(value: Any) -> tuple[int, ...]:
    return entries(value, int, partial(number, kind=int, low=-1))


class VadOptions(OptionSet):
    """silero-vad's options with faster-whisper's defaults.

    Speech begins at a probability of `threshold` and ends where it stays below `neg_threshold` (None: `threshold` -
    0.15, at least 0.01) for `min_silence_duration_ms`. Speech shorter than `min_speech_duration_ms` is dropped, longer
    than `max_speech_duration_s` is cut at its longest pause; `speech_pad_ms` is added on both sides."""

    threshold: float = option(0.5, "speech above this probability", "P", low=0, high=1, above=True)
    neg_threshold: float | None = option(None, low=0, high=1, above=True)
    min_speech_duration_ms: float = option(0.0, "drop speech shorter than MS", "MS", low=0, high=MOST)
    max_speech_duration_s: float = option(math.inf, "cut speech longer than SECONDS", "SECONDS", low=0, above=True)
    min_silence_duration_ms: float = option(2000.0, "pauses shorter than MS do not end speech", "MS", low=0, high=MOST)
    speech_pad_ms: float = option(400.0, "padding on each side", "MS", low=0, high=MOST)

    def check(self) -> None:
        if self.neg_threshold is not None and self.neg_threshold > self.threshold:
            raise UsageError(
                f"must be at most threshold, {self.threshold:g} (got {self.neg_threshold:g})", argument="neg_threshold"
            )
        least = (64 + 2 * self.speech_pad_ms) / 1000  # 64 ms: two frames
        if self.max_speech_duration_s < least:
            raise UsageError(
                f"must be at least {least:g}, two frames and the padding (got {self.max_speech_duration_s:g})",
                argument="max_speech_duration_s",
            )


class SpeechOptions(OptionSet):
    """Options of every speech model. `vad_*` as in faster-whisper. `beam_size` None: greedy for Whisper; for other
    models see `SpeechDecodingOptions`."""

    language: str | None = option(None, "code or English name (default: detected, if the model has several)",
                                  read=_language)  # fmt: skip
    task: str = option("transcribe", "transcribe, or translate into English", "TASK",
                       choices=("transcribe", "translate"))  # fmt: skip
    beam_size: int | None = option(None, "beams at temperature 0; 1: greedy (default: 5; a CTC model without decoder "
                                   "and LM: 1)", "N", low=1)  # fmt: skip
    word_timestamps: bool = option(False, "start, end and probability of each word (default: False)")
    token_logprobs: bool = option(False, "log-probability of each token; for a CTC model, of its mean probability "
                                  "in its frames")  # fmt: skip
    clip_timestamps: Sequence[float] = option((0.0,), "transcribe only these spans, in seconds (default: 0)", "S,E,…",
                                              read=_clips)  # fmt: skip
    vad_filter: bool = option(False, "decode only what sounds like speech (default: False for Whisper, else True)")
    vad_threshold: float = VadOptions.threshold.but(0.5, above=False)  # 0, for live audio: all is speech
    vad_min_speech_duration_ms: float = VadOptions.min_speech_duration_ms
    vad_max_speech_duration_s: float = VadOptions.max_speech_duration_s
    vad_min_silence_duration_ms: float = VadOptions.min_silence_duration_ms
    vad_speech_pad_ms: float = VadOptions.speech_pad_ms
    split_channels: bool = option(False, "transcribe each channel as a speaker of its own")
    decode_log: bool = option(False, "log the attempts at each window")
    compute_type: str = MachineOptions.compute_type
    device: str | None = MachineOptions.device.but("auto")
    batch_size: int = option(8, "recordings or windows per batch; the text does not depend on it", "N", low=1)
    on_truncated: str = option("warn", "refuse a recording that ends early or is damaged, or transcribe the rest",
                               choices=("error", "warn"))  # fmt: skip
    audio_track: int | None = option(None, "number of the track to read, from 1 (default: the one marked as "
                                     "default, or the first)", "N", low=1)  # fmt: skip

    def vad(self) -> VadOptions:
        own = {name: getattr(self, f"vad_{name}") for name in VadOptions.declared if f"vad_{name}" in self.declared}
        try:
            return VadOptions(**own)
        except UsageError as error:
            raise UsageError(error.args[0], argument=f"vad_{error.argument}") from None


class WhisperOptions(SpeechOptions):
    """openai-whisper's options with its names and defaults, faster-whisper's `hotwords`, `batched` and `multilingual`,
    and our own: `seed`, `languages`, `language_detection_segments`, `remove_repetitions` and `snap_words_to_audio` (see
    `word_times.snap_to_audio`)."""

    temperature: Sequence[float] = option((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "temperatures, tried in turn", "T,T,…",
                                          read=_temperatures)  # fmt: skip
    best_of: int | None = option(None, "candidates at other temperatures (default: 5)", "N", low=1)
    patience: float | None = option(None, "finished beams to wait for, as a factor of beam_size (default: 1)", "FACTOR",
                                    low=0, above=True)  # fmt: skip
    length_penalty: float | None = option(None, "0 to 1 (default: divide by the length)", "ALPHA", low=0, high=1)
    compression_ratio_threshold: float | None = option(
        2.4, "a text that zlib shortens more than this has failed", "RATIO"
    )
    logprob_threshold: float | None = option(-1.0, "a text with a lower mean log-probability has failed", "LOGPROB")
    no_speech_threshold: float | None = option(0.6, "a failed text counts as silence if its probability exceeds P", "P")
    condition_on_previous_text: bool = option(True, "prompt each window with the text of the one before")
    initial_prompt: str | None = option(None, "text before the first window", "TEXT")
    carry_initial_prompt: bool = option(False, "put --initial_prompt before every window (default: False)")
    hotwords: str | None = option(None, "words to expect, before every window", "TEXT")
    without_timestamps: bool = option(False, "no time tokens: one segment per window (default: False)")
    max_initial_timestamp: float | None = option(
        1.0, "latest time at which a window's first segment may begin", "SECONDS", low=0
    )
    suppress_blank: bool = option(True, "do not let a window's text begin with a blank or end at once")
    suppress_tokens: Sequence[int] | None = option((-1,), "ids that are never written; -1: most special characters "
                                                   "(default: -1)", "IDS", read=_tokens)  # fmt: skip
    sample_len: int | None = option(None, "most tokens per window", "N", low=1)
    prepend_punctuations: str = option("\"'“¿([{-", "marks that belong to the next word", "MARKS")
    append_punctuations: str = option("\"'.。,，!！?？:：”)]}、", "marks that belong to the word before", "MARKS")
    hallucination_silence_threshold: float | None = option(
        None, "skip silences longer than SECONDS around improbable words *", "SECONDS", low=0
    )
    snap_words_to_audio: bool = option(False, "begin and end words beside a pause where the sound does")
    languages: Sequence[str] | None = option(None, "detect only these languages", "A,B,…", read=_languages)
    language_detection_segments: int = option(8, "windows, spread over the recording, that detection uses; 1: the "
                                              "first 30 s", "N", low=1)  # fmt: skip
    multilingual: bool = option(False, "the language may change: detect it for each window")
    batched: bool = option(False, "cut at pauses and decode the windows independently instead of one after the other")
    remove_repetitions: bool = option(True, "remove text that repeats itself, and text over digital silence")
    seed: int = option(0, "seed of the sampling; the order of the files does not matter", "N", low=0)


class SpeechDecodingOptions(OptionSet):
    """Decoding of a window by a model other than Whisper. `beam_size` 1 is the CTC best path. None: 5 where there is an
    attention decoder or a language model, whose error rate is a third to a half lower, else 1; without the decoder a
    beam is a CTC prefix beam.

    `lm`: a shipped model or a checkpoint folder of a causal text model with the recognizer's tokens, or an ARPA file
    (.arpa, .arpa.gz), which each call reads again, or what `with_language_model` has loaded of it for several calls. A
    model's card may name a shipped one, with its weight and bonus; None: none. A window has no text
    where the CTC's probability of an empty one is above `no_speech_threshold`, the average log-probability under
    `logprob_threshold`, or the mean probability of its words under `confidence_threshold`. Noise scores differently in
    each model, so the last two belong in a model's card."""

    beam_size: int | None = SpeechOptions.beam_size
    word_timestamps: bool = SpeechOptions.word_timestamps
    token_logprobs: bool = SpeechOptions.token_logprobs
    no_speech_threshold: float | None = WhisperOptions.no_speech_threshold
    logprob_threshold: float | None = WhisperOptions.logprob_threshold.but(None)
    confidence_threshold: float | None = option(
        None, "CTC models: drop the text of a window whose words have a lower mean probability", "P", low=0, high=1
    )
    lm: str | Path | tuple | None = option(
        None, "CTC models: language model for the beams: ARPA file, folder, shipped model or None", "LM", read=_path
    )
    lm_weight: float = option(0.3, "weight of the language model's log-probabilities", "WEIGHT", low=0, high=MOST)
    lm_bonus: float = option(0.0, "bonus for each word, with a language model", "BONUS", low=-MOST, high=MOST)

    def check(self) -> None:
        if self.lm is not None and self.beam_size == 1:
            raise UsageError(f"{self.lm}: needs a beam_size above 1", argument="lm")


class RecognizerOptions(SpeechOptions, SpeechDecodingOptions):
    """Options of speech models other than Whisper, which have no token for silence: voice activity detection gates
    them."""

    vad_filter: bool = SpeechOptions.vad_filter.but(True)
    target_language: str | None = option(None, "language of a translation by Canary, code or English name (default: "
                                         "English)", read=_language)  # fmt: skip

    def check(self) -> None:
        SpeechDecodingOptions.check(self)
        if self.target_language is not None and self.task != "translate":
            raise UsageError(f"needs task translate (got {self.task!r})", argument="target_language")


def _decoding(value: Any) -> Any:
    if not isinstance(value, SpeechDecodingOptions | WhisperOptions):
        raise UsageError(f"must be SpeechDecodingOptions or WhisperOptions (got {value!r:.40})")
    return value


class LiveOptions(OptionSet):
    """`rate` of the samples in Hz. A partial line comes after every `step` seconds of speech, a final one after
    `silence` seconds without (speech probability under `threshold` - 0.15) or, cut at a quiet place, when an utterance
    reaches `longest` seconds, or Whisper's window. `threshold` 0: all is speech; None: `vad_threshold` of `decode`,
    else the model's. `prefix_padding`: seconds kept before its first frame. `decode`: of the finals (None: the model's
    defaults); partials are the CTC best path, or greedy."""

    rate: int = option(16_000, "samples per second of --stream", "HZ", low=1000, high=3_072_000)
    step: float = option(0.5, low=0.1)
    silence: float = option(0.6, low=0.1, high=10)
    longest: float = option(LONGEST_WINDOW, low=2, high=30)
    threshold: float | None = SpeechOptions.vad_threshold.but(None)
    prefix_padding: float = option(0.4, low=0, high=10)
    decode: SpeechDecodingOptions | WhisperOptions | None = option(None, read=_decoding)

    def check(self) -> None:
        if self.step > self.longest:
            raise UsageError(f"must be at most longest, {self.longest:g} seconds (got {self.step:g})", argument="step")


def options_for(checkpoint: "Checkpoint", given: Mapping[str, Any]) -> WhisperOptions | RecognizerOptions:
    """`given` options, else those of the model's card under "transcribe", else the beams of its generation_config.json,
    else the defaults.

    Raises UsageError for a name that is unknown or for another kind of model, or a bad value; CheckpointError for such
    a card, or a model that is no speech model."""
    from multimodal.tasks.encode.search_defaults import search_defaults

    kind = _kind(checkpoint)
    own = checkpoint.card.get("transcribe") or {}
    try:
        defaults = kind.checked(search_defaults(checkpoint, own, SpeechDecodingOptions))
    except UsageError as error:
        raise CheckpointError(f"{checkpoint.source}: card, transcribe: {error}") from None
    chosen = {}
    for name, value in given.items():
        if name in kind.declared:
            chosen |= kind.checked({name: value})
        elif not _is_off(name, value):
            raise _refusal(name, value, kind, checkpoint.source)
    result = kind(**{**_fitting(defaults, chosen, checkpoint.source), **chosen})
    _check_combination(result)
    return result


def _fitting(defaults: dict[str, Any], chosen: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Drop the card's language model if the caller chose another one, or no beams.

    Raises CheckpointError for a language model that is not shipped: a card must not point to other files."""
    if (own := defaults.get("lm")) is None:
        return defaults
    if own not in shipped():
        raise CheckpointError(f"{source}: card, transcribe: lm must be a shipped model (got {own!r:.40})")
    if "lm" not in chosen and chosen.get("beam_size", defaults.get("beam_size")) != 1:
        return defaults
    return {name: value for name, value in defaults.items() if name not in ("lm", "lm_weight", "lm_bonus")}


def _kind(checkpoint: "Checkpoint") -> type[WhisperOptions] | type[RecognizerOptions]:
    kinds = {
        "speech_to_text": WhisperOptions,
        "joint_conformer": RecognizerOptions,
        "transducer": RecognizerOptions,
        "moonshine": RecognizerOptions,
        "canary": RecognizerOptions,
    }
    if checkpoint.kind not in kinds:
        raise UsageError(f"model {checkpoint.source}: expected a speech model, got {checkpoint.kind}")
    return kinds[checkpoint.kind]


def _is_off(name: str, value: Any) -> bool:
    """Return True if the value of an option of the other kind of model asks for nothing."""
    if name not in WhisperOptions.declared | RecognizerOptions.declared:
        return False
    if name == "batched":  # a CTC model's windows are independent anyway
        return isinstance(value, bool)
    return value is None or value is False or (name == "temperature" and _temperatures(value) == (0.0,))


def _refusal(name: str, value: Any, own: type[SpeechOptions], source: str) -> UsageError:
    for label, kind in (("Whisper models", WhisperOptions), ("models other than Whisper", RecognizerOptions)):
        if name in kind.declared:
            return UsageError(f"is for {label}, not for {source} (got {value!r})", argument=name)
    known = ", ".join(sorted(own.declared))
    return UsageError(f"option {name!r}: unknown{did_you_mean(name, own.declared)} (known: {known})")


def _check_combination(result: WhisperOptions | RecognizerOptions) -> None:
    """Raises UsageError for values that contradict each other."""
    if result.vad_filter:
        result.vad()  # checks its own limits
    if not isinstance(result, WhisperOptions):
        return
    o = result
    if o.patience is not None and o.beam_size is None:
        raise UsageError(f"{o.patience:g} needs a beam_size", argument="patience")
    if o.patience is not None and round(o.beam_size * o.patience) < 1:
        raise UsageError(f"{o.patience:g} of beam_size {o.beam_size} waits for no beam", argument="patience")
    if o.hallucination_silence_threshold is not None and not o.word_timestamps:
        raise UsageError(
            f"{o.hallucination_silence_threshold:g} needs word_timestamps", argument="hallucination_silence_threshold"
        )
    if o.multilingual and o.language is not None:
        raise UsageError(f"{o.language!r}: multilingual detects it for each window", argument="language")
    if o.languages is not None and o.language not in (None, *o.languages):
        raise UsageError(f"{o.language!r} is not one of languages ({', '.join(o.languages)})", argument="language")
