"""The options of transcription: their names, defaults and limits, of all speech models and of each kind."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from multimodal.errors import CheckpointError, UsageError
from multimodal.tasks.transcribe.conformer.decode import JointOptions
from multimodal.tokens.text.languages import language_code

if TYPE_CHECKING:
    from multimodal.tasks.transcribe.vad import VadOptions
    from multimodal.weights.folder import Checkpoint

COMPUTE_TYPES = ("auto", "float32", "bfloat16", "float16", "int8")


@dataclass(frozen=True)
class SpeechOptions:
    """What every speech model takes. `clip_timestamps`: seconds start, end, start, …; outside nothing is heard.
    `vad_*` as in faster-whisper. `device` None: where the model is. `beam_size` None: greedy for Whisper, for CTC
    models see `JointOptions`. `audio_track` counts from 1; None: see `stream_audio`."""

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    beam_size: int | None = None
    word_timestamps: bool = False
    clip_timestamps: Sequence[float] = (0.0,)
    vad_filter: bool = False
    vad_threshold: float = 0.5
    vad_min_speech_duration_ms: float = 0.0
    vad_max_speech_duration_s: float = math.inf
    vad_min_silence_duration_ms: float = 2000.0
    vad_speech_pad_ms: float = 400.0
    split_channels: bool = False
    decode_log: bool = False
    compute_type: str = "auto"
    device: str | None = None
    on_truncated: Literal["error", "warn"] = "warn"
    audio_track: int | None = None

    def vad(self) -> "VadOptions":
        from multimodal.tasks.transcribe.vad import VadOptions

        own = {field.name.removeprefix("vad_"): field.name for field in fields(self) if field.name != "vad_filter"}
        names = {field.name for field in fields(VadOptions)}
        return VadOptions(**{name: getattr(self, whole) for name, whole in own.items() if name in names})


@dataclass(frozen=True)
class WhisperOptions(SpeechOptions):
    """openai-whisper's options with its names and defaults, faster-whisper's `hotwords`, `batched` and `multilingual`,
    and our own: `seed` (of the sampled fallbacks), `languages` (the only ones that may be detected),
    `language_detection_segments` (windows over the whole recording), `cut_loops`, and `words_on_sound` (words beside a
    pause begin and end with their sound, see `word_timing.on_sound`)."""

    temperature: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    best_of: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    carry_initial_prompt: bool = False
    hotwords: str | None = None
    without_timestamps: bool = False
    max_initial_timestamp: float | None = 1.0
    suppress_blank: bool = True
    suppress_tokens: Sequence[int] | None = (-1,)
    sample_len: int | None = None
    prepend_punctuations: str = "\"'“¿([{-"
    append_punctuations: str = "\"'.。,，!！?？:：”)]}、"
    hallucination_silence_threshold: float | None = None
    words_on_sound: bool = False
    languages: Sequence[str] | None = None
    language_detection_segments: int = 8
    multilingual: bool = False
    batched: bool = False
    cut_loops: bool = True
    seed: int = 0


@dataclass(frozen=True)
class CtcOptions(SpeechOptions, JointOptions):
    """Of the joint CTC/attention model, which has no token for silence: voice activity detection is its gate."""

    vad_filter: bool = True


def options_for(checkpoint: "Checkpoint", given: Mapping[str, Any]) -> WhisperOptions | CtcOptions:
    """What was `given`, then what the model's card has under "transcribe", then the defaults.

    Raises UsageError for a name that is unknown or not for this kind of model, or a value that cannot be used;
    CheckpointError for such a thing in the card, or a model that hears nothing."""
    kind = _kind(checkpoint)
    own = checkpoint.card.get("transcribe", {})
    names = {field.name for field in fields(kind)}
    if not isinstance(own, Mapping) or (unknown := sorted(set(own) - names)):
        which = f"option {unknown[0]!r} is unknown" if isinstance(own, Mapping) else f"is no table ({own!r:.40})"
        raise CheckpointError(f"{checkpoint.source}: card, transcribe: {which}")
    try:
        defaults = {name: checked(name, value) for name, value in own.items()}
    except UsageError as error:
        raise CheckpointError(f"{checkpoint.source}: card, transcribe: {error}") from None
    chosen = {}
    for name, value in given.items():
        if name in names:
            chosen[name] = checked(name, value)
        elif not _asks_nothing(name, value):
            raise UsageError(_refusal(name, value, names, checkpoint.source))
    options = kind(**{**defaults, **chosen})
    _together(options)
    return options


def _kind(checkpoint: "Checkpoint") -> type[WhisperOptions] | type[CtcOptions]:
    kinds = {"speech_to_text": WhisperOptions, "joint_conformer": CtcOptions}
    if checkpoint.kind not in kinds:
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, transcription needs a speech model")
    return kinds[checkpoint.kind]


def _asks_nothing(name: str, value: Any) -> bool:
    """Whether a model that does not have the option does what is asked all the same."""
    known = {field.name for kind in (WhisperOptions, CtcOptions) for field in fields(kind)}
    if name not in known:
        return False
    if name == "batched":  # a CTC model's windows are independent anyway
        return isinstance(value, bool)
    return value is None or value is False or (name == "temperature" and checked(name, value) == (0.0,))


def _refusal(name: str, value: Any, names: set[str], source: str) -> str:
    for label, kind in (("Whisper models", WhisperOptions), ("CTC models", CtcOptions)):
        if name in {field.name for field in fields(kind)}:
            return f"option {name!r} = {value!r}: is for {label}, {source} has it not"
    return f"option {name!r}: unknown (known: {', '.join(sorted(names))})"


def checked(name: str, value: Any) -> Any:
    """The value of an option in the type of its dataclass. Raises UsageError."""
    return _READERS[name](name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name}: must be True or False ({value!r})")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name}: must be a text ({value!r})")
    return value


def _path(name: str, value: Any) -> str:
    return str(value) if isinstance(value, Path) else _text(name, value)


def _one_of(*values: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in values:
            raise UsageError(f"{name}: is neither {' nor '.join(map(repr, values))} ({value!r})")
        return value

    return read


def _number(name: str, value: Any, low: float = -math.inf, high: float = math.inf, above: bool = False) -> float:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not low <= value <= high or (above and value == low):
        limits = f" above {low:g}" if above else f" of {low:g} or more" if low > -math.inf else ""
        limits = f" from {low:g} to {high:g}" if high < math.inf else limits
        raise UsageError(f"{name}: must be a number{limits} ({value!r})")
    return float(value)


def _count(name: str, value: Any, low: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise UsageError(f"{name}: must be at least {low}, a whole number ({value!r})")
    return value


def _maybe(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else read(name, value)


def _listed(name: str, value: Any, read: Callable[[str, Any], Any], of: Callable[[str], Any]) -> tuple:
    """A text with commas or a sequence, each entry read."""
    try:
        parts = [of(part) for part in value.split(",") if part.strip()] if isinstance(value, str) else list(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name}: must be a list, or values with commas between ({value!r})") from None
    return tuple(read(name, part) for part in parts)


def _temperatures(name: str, value: Any) -> tuple[float, ...]:
    single = isinstance(value, int | float)
    found = _listed(name, [value] if single else value, partial(_number, low=0.0, high=100.0), float)
    if not found:
        raise UsageError(f"{name}: needs at least one value ({value!r})")
    return found


def _clips(name: str, value: Any) -> tuple[float, ...]:
    found = _listed(name, value, partial(_number, low=0.0, high=1e9), float)
    if any(later < earlier for earlier, later in pairwise(found)):
        raise UsageError(f"{name}: must be starts and ends in seconds that do not fall ({value!r})")
    return found or (0.0,)


def _codes(name: str, value: Any) -> tuple[str, ...]:
    found = _listed(name, value, lambda _, code: language_code(_text(name, code)), str)
    if not found:
        raise UsageError(f"{name}: needs at least one language ({value!r})")
    return found


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    return _listed(name, value, partial(_count, low=-1), int)


_ABOVE_ZERO = partial(_number, low=0.0, above=True)
_READERS: dict[str, Callable[[str, Any], Any]] = {
    **{f.name: _maybe(_number) for f in fields(JointOptions)},  # but for those below
    **{f.name: _flag for f in (*fields(WhisperOptions), *fields(CtcOptions)) if isinstance(f.default, bool)},
    **dict.fromkeys(("prepend_punctuations", "append_punctuations"), _text),
    **dict.fromkeys(("initial_prompt", "hotwords", "device"), _maybe(_text)),
    **dict.fromkeys(("beam_size", "best_of", "sample_len", "audio_track"), _maybe(_count)),
    **{name: _maybe(_number) for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")},
    "confidence_threshold": _maybe(partial(_number, low=0.0, high=1.0)),
    **dict.fromkeys(("max_initial_timestamp", "hallucination_silence_threshold"), _maybe(partial(_number, low=0.0))),
    **{f.name: _number for f in fields(SpeechOptions) if f.name.startswith("vad_") and f.name != "vad_filter"},
    "language": _maybe(lambda name, value: language_code(_text(name, value))),
    "languages": _maybe(_codes),
    "language_detection_segments": _count,
    "task": _one_of("transcribe", "translate"),
    "temperature": _temperatures,
    "clip_timestamps": _clips,
    "suppress_tokens": _maybe(_tokens),
    "patience": _maybe(_ABOVE_ZERO),
    "length_penalty": _maybe(partial(_number, low=0.0, high=1.0)),
    "seed": partial(_count, low=0),
    "lm": _maybe(_path),
    "lm_weight": partial(_number, low=0.0),
    "lm_bonus": _number,
    "compute_type": _one_of(*COMPUTE_TYPES),
    "on_truncated": _one_of("error", "warn"),
}


def _together(options: WhisperOptions | CtcOptions) -> None:
    """Raises UsageError for values that do not go together."""
    if options.vad_filter:
        options.vad()  # which checks its own limits
    if not isinstance(options, WhisperOptions):
        return
    if options.patience is not None and options.beam_size is None:
        raise UsageError(f"patience: needs a beam_size ({options.patience})")
    if options.hallucination_silence_threshold is not None and not options.word_timestamps:
        raise UsageError(
            f"hallucination_silence_threshold: needs word_timestamps ({options.hallucination_silence_threshold})"
        )
    if options.multilingual and options.language is not None:
        raise UsageError(f"language: multilingual detects it in each window, it cannot be named ({options.language})")
    if options.languages is not None and options.language not in (None, *options.languages):
        raise UsageError(f"language: {options.language!r} is not one of languages ({', '.join(options.languages)})")
