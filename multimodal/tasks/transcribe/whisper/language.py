"""Which language is spoken: Whisper's language tokens over any number of windows."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.models.whisper import SpeechToText
from multimodal.tokens.text.languages import language_code
from multimodal.tokens.text.tiktokens import WhisperTokenizer

Probabilities = dict[str, float]


@torch.inference_mode()
def language_probabilities(
    model: SpeechToText, tokenizer: WhisperTokenizer, features: Float[Tensor, "B T D"]
) -> list[Probabilities]:
    """The probability of every language of the model by its code, of each window's encoder output: the softmax over
    the language tokens after <|startoftranscript|> alone, as openai-whisper's `detect_language`.

    A model of one language has that one with probability 1."""
    if not tokenizer.multilingual:
        return [{"en": 1.0} for _ in features]
    start = torch.full((len(features), 1), tokenizer.sot, device=features.device)
    logits = model.decoder(start, features)[:, 0, list(tokenizer.language_tokens)]
    return [dict(zip(tokenizer.languages, row, strict=True)) for row in logits.float().softmax(-1).tolist()]


def allowed_codes(tokenizer: WhisperTokenizer, languages: Iterable[str] | None) -> tuple[str, ...] | None:
    """The codes of `languages`, codes or English names, each once; None for None, which allows all.

    Raises UsageError for an empty list and for a language that the model does not know."""
    if languages is None:
        return None
    codes = tuple(dict.fromkeys(language_code(language) for language in languages))
    known = tokenizer.languages if tokenizer.multilingual else ("en",)
    if not codes:
        raise UsageError("languages: needs at least one language (none given)")
    if strange := [code for code in codes if code not in known]:
        some = ", ".join(known[:8]) + (" …" if len(known) > 8 else "")
        raise UsageError(f"languages: {strange[0]!r} is not one of the {len(known)} of this model ({some})")
    return codes


def combine(
    windows: Sequence[tuple[Probabilities, float | int]], allowed: Sequence[str] | None = None
) -> tuple[str, float]:
    """(code, probability) of the language of a whole recording, from the probabilities of some of its windows.

    Each window counts by its weight, how much speech it holds (its share of voice, or 1 - no-speech probability);
    where no window holds any they count alike. `allowed` codes alone are considered, and their probabilities made to
    sum to 1. On a tie the first window's order decides. Raises UsageError for a code that the windows do not have,
    for no window, and for a weight that is negative or not finite."""
    if not windows:
        raise UsageError("language: there is no window to hear it in (0)")
    weights = torch.tensor([weight for _, weight in windows], dtype=torch.float64)
    if not (weights.isfinite().all() and (weights >= 0).all()):
        raise UsageError(f"language: weights must be 0 or more ({weights.tolist()})")
    if not weights.any():
        weights = torch.ones_like(weights)
    first = windows[0][0]
    if strange := [code for code in allowed or () if code not in first]:
        raise UsageError(f"languages: {strange[0]!r} is not a language of this model ({', '.join(list(first)[:8])})")
    codes = list(first if allowed is None else allowed)
    if not codes:
        raise UsageError("languages: needs at least one language (none given)")
    rows = torch.tensor([[own[code] for code in codes] for own, _ in windows], dtype=torch.float64)
    found = (rows * weights[:, None]).sum(0)
    found = found / found.sum() if found.sum() else torch.full_like(found, 1 / len(codes))
    best = int(found.argmax())
    return codes[best], found[best].item()
