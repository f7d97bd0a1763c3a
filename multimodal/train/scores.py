"""Scores of what a model gave against what was wanted, as shares of 1."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def evenly(items: Sequence[Any], count: int | None) -> Sequence[Any]:
    """At most `count` of the items, evenly spread, in their order; all without a count."""
    if count is None or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def word_errors(references: Sequence[str], hypotheses: Sequence[str], language: str = "en") -> dict[str, float]:
    """Corpus-level word and character error rates (jiwer): all errors over all words or characters of the references.

    Both sides pass Whisper's normaliser first, the English one or that of all other languages (Radford et al. 2022,
    appendix C)."""
    import jiwer
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

    normal = EnglishTextNormalizer() if language == "en" else BasicTextNormalizer()
    wanted, found = [normal(text) for text in references], [normal(text) for text in hypotheses]
    return {"wer": round(jiwer.wer(wanted, found), 4), "cer": round(jiwer.cer(wanted, found), 4)}


def bleu(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Corpus BLEU in percent (sacrebleu's defaults: 13a tokens, cased, exponential smoothing; Post 2018)."""
    import sacrebleu

    return round(sacrebleu.corpus_bleu(list(hypotheses), [list(references)]).score, 2)


def top_shares(scores: Float[Tensor, "N C"], labels: Int[Tensor, "N"]) -> dict[str, float]:
    """Share of rows whose label has the highest score, and one of the five highest."""
    hits = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]
    return {"top1": _share(hits[:, 0]), "top5": _share(hits.any(1))}


def _share(hits: Tensor) -> float:
    return round(hits.to(torch.float64).mean().item(), 4)
