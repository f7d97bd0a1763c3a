"""Spoken language identification: Whisper's language tokens over any number of windows."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.whisper import Whisper
from multimodal.tokens.text.languages import language_code
from multimodal.tokens.text.tiktokens import WhisperTokenizer

Probabilities = dict[str, float]


@inference_mode()
def language_probabilities(
    model: Whisper, tokenizer: WhisperTokenizer, features: Float[Tensor, "B T D"]
) -> list[Probabilities]:
    """{code: probability} for each window's encoder output: softmax over the language tokens after
    <|startoftranscript|>, as in openai-whisper's `detect_language`. An English-only model gives English 1."""
    if not tokenizer.multilingual:
        return [{"en": 1.0} for _ in features]
    start = torch.full((len(features), 1), tokenizer.sot, device=features.device)
    logits = model.decoder(start, features)[:, 0, list(tokenizer.language_tokens)]
    return [dict(zip(tokenizer.languages, row, strict=True)) for row in logits.float().softmax(-1).tolist()]


def allowed_codes(tokenizer: WhisperTokenizer, languages: Iterable[str] | None) -> tuple[str, ...] | None:
    """Unique codes of `languages`, given as codes or English names; None allows all.

    Raises UsageError for an empty list and for a language unknown to the model."""
    if languages is None:
        return None
    codes = tuple(dict.fromkeys(language_code(language) for language in languages))
    known = tokenizer.languages if tokenizer.multilingual else ("en",)
    if not codes:
        raise UsageError("languages: expected at least one language")
    if unknown := [code for code in codes if code not in known]:
        some = ", ".join(known[:8]) + (" …" if len(known) > 8 else "")
        raise UsageError(f"languages: {unknown[0]!r} is not one of the model's {len(known)} ({some})")
    return codes


def likeliest(probabilities: Probabilities, allowed: Sequence[str] | None) -> str:
    """The most probable code, of the allowed ones if given."""
    return max(allowed or probabilities, key=lambda code: probabilities.get(code, 0.0))


def combine(
    windows: Sequence[tuple[Probabilities, float | int]], allowed: Sequence[str] | None = None
) -> tuple[str, float]:
    """(code, probability) of the language of a recording, from the probabilities of some of its windows.

    Windows are weighted by the speech they hold (voice activity, or 1 - no-speech probability), equally if no window
    holds any. Only `allowed` codes are considered, renormalized to sum to 1; ties go to the first one. Raises
    UsageError for an unknown code, no window, or a weight that is negative or not finite."""
    if not windows:
        raise UsageError("language: expected at least one window (got 0)")
    weights = torch.tensor([weight for _, weight in windows], dtype=torch.float64, device="cpu")
    if not (weights.isfinite().all() and (weights >= 0).all()):
        raise UsageError(f"language: weights must be 0 or more ({weights.tolist()})")
    if not weights.any():
        weights = torch.ones_like(weights)
    known = windows[0][0]
    if unknown := [code for code in allowed or () if code not in known]:
        raise UsageError(f"languages: {unknown[0]!r} is not a language of the model ({', '.join(list(known)[:8])})")
    codes = list(known if allowed is None else allowed)
    if not codes:
        raise UsageError("languages: expected at least one language")
    rows = torch.tensor([[own[code] for code in codes] for own, _ in windows], dtype=torch.float64, device="cpu")
    mean = (rows * weights[:, None]).sum(0)
    mean = mean / mean.sum() if mean.sum() else torch.full_like(mean, 1 / len(codes))
    best = int(mean.argmax())
    return codes[best], mean[best].item()
