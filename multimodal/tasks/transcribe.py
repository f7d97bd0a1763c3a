"""Speech to text: any recording, any speech model of the suite."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from multimodal.errors import AudioError, UsageError
from multimodal.models.seq2seq import JointConformer, SpeechToText
from multimodal.tasks import joint_windows, whisper_windows
from multimodal.tasks.whisper_windows import WhisperOptions
from multimodal.tokens.audio import read_audio, stream_audio
from multimodal.tokens.languages import language_code
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

DEFAULT_MODEL = "asr-conformer-en"


def transcribe(
    audio: str | Path | bytes | Tensor, model: str | Path | Checkpoint = DEFAULT_MODEL, *,
    language: str | None = None, task: str = "transcribe", beam_size: int | None = None, batch_size: int = 8,
    on_truncated: str = "error", **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The text of a recording, in openai-whisper's shape: `text`, `language` and `segments`, each with `id`, `seek`
    (10 ms frames), `start`, `end` (seconds), `text`, `tokens`, `temperature`, `avg_logprob`, `compression_ratio` and
    `no_speech_prob`.

    `audio`: a file, its bytes, or mono samples [T] at 16 kHz. `language`: code or English name; None: detected by a
    Whisper model that knows several. `beam_size` None: greedy (CTC best path for a joint model). `batch_size`:
    windows decoded at once by a joint model. `on_truncated`: "error", or "warn" to take a recording that ends early.
    `options` are those of Whisper (`WhisperOptions`), for Whisper models only, except a `temperature` of 0.

    Raises AudioError (unreadable, empty, not finite), UsageError (an option that the model does not have),
    CheckpointError."""
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    if beam_size is not None and beam_size < 1:
        raise UsageError(f"beam_size: must be at least 1 ({beam_size})")
    if batch_size < 1:
        raise UsageError(f"batch_size: must be at least 1 ({batch_size})")
    if task not in ("transcribe", "translate"):
        raise UsageError(f"task: is neither 'transcribe' nor 'translate' ({task!r})")
    language = None if language is None else language_code(language)
    if isinstance(checkpoint.model, SpeechToText):
        chosen = whisper_options(language=language, task=task, beam_size=beam_size, **options)
        samples = _checked(audio) if isinstance(audio, Tensor) else read_audio(audio, on_truncated=on_truncated)
        return whisper_windows.transcribe_windows(samples, checkpoint, chosen)
    if not isinstance(checkpoint.model, JointConformer):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, transcription needs a speech model")
    known = _joint_language(checkpoint, language, task, options)
    chunks = [_checked(audio)] if isinstance(audio, Tensor) else stream_audio(audio, on_truncated=on_truncated)
    segments = joint_windows.transcribe_windows(chunks, checkpoint, beam_size, batch_size)
    return {"text": " ".join(segment["text"] for segment in segments), "segments": segments, "language": known}


def whisper_options(**options: Any) -> WhisperOptions:
    """Raises UsageError for a name or a combination of values that Whisper does not know."""
    names = {field.name for field in fields(WhisperOptions)}
    if unknown := sorted(set(options) - names):
        raise UsageError(f"option {unknown[0]!r}: unknown (known: {', '.join(sorted(names))})")
    chosen = WhisperOptions(**options)
    temperatures = chosen.temperature if isinstance(chosen.temperature, tuple | list) else [chosen.temperature]
    if not temperatures or any(not value >= 0 for value in temperatures):
        raise UsageError(f"temperature: needs values of 0 or more ({chosen.temperature!r})")
    if chosen.patience is not None and (chosen.beam_size is None or not chosen.patience > 0):
        raise UsageError(f"patience: needs a beam_size and a value above 0 ({chosen.patience})")
    if chosen.length_penalty is not None and not 0 <= chosen.length_penalty <= 1:
        raise UsageError(f"length_penalty: must lie between 0 and 1 ({chosen.length_penalty})")
    for name in ("best_of", "sample_len"):
        if (value := getattr(chosen, name)) is not None and value < 1:
            raise UsageError(f"{name}: must be at least 1 ({value})")
    return chosen


def _joint_language(checkpoint: Checkpoint, language: str | None, task: str, options: dict[str, Any]) -> str | None:
    """The one language of a joint model, if its card names it; what such a model cannot do is refused."""
    own = checkpoint.card.get("language")
    if language is not None and own is not None and language != own:
        raise UsageError(f"language {language!r}: {checkpoint.source} knows {own!r} only")
    if task != "transcribe":
        raise UsageError(f"task {task!r}: {checkpoint.source} can only transcribe")
    for name, value in options.items():
        if name != "temperature" or value != 0:
            raise UsageError(f"option {name!r} = {value!r}: is for Whisper models, {checkpoint.source} has it not")
    return own or language


def _checked(wave: Tensor) -> Tensor:
    if wave.ndim != 1 or not wave.is_floating_point():
        raise AudioError(f"samples: must be one row of floats (shape {list(wave.shape)}, {wave.dtype})")
    if not wave.numel():
        raise AudioError("samples: there are none (0)")
    if not wave.isfinite().all():
        raise AudioError(f"samples: {int((~wave.isfinite()).sum())} of {wave.numel()} are not finite")
    return wave.detach().float().cpu()
