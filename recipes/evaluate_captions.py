"""Figures of captioners, for evaluate.py: BLEU-4 and CIDEr, with levels to judge them by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.errors import DataError
from multimodal.tasks.caption import caption
from multimodal.tokens.image import read_image
from multimodal.train.caption_scores import agreement, best_constant, caption_scores
from multimodal.train.scores import evenly
from multimodal.train.sources import open_source
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class CaptionOptions:
    """Of captioners."""

    beams: int = 4
    """of the search; 1: greedy"""
    constant: str | None = None
    """captioned pictures, of whose captions the best single one for all pictures is scored too"""
    shown: int = 10
    """captions in the report"""


def captions(checkpoint: Checkpoint, path: Path, options: CaptionOptions, count: int | None) -> dict[str, Any]:
    """BLEU-4 and CIDEr of the captions, in %; `people`: of each reference against the others of its picture;
    `constant`: of one caption for all pictures. `distinct`: different captions among the pictures'."""
    source = open_source(path)
    samples = [source.read(key) for key in evenly(range(len(source)), count)]
    references = [sample.texts for sample in samples]
    if bare := [sample.name for sample in samples if not sample.texts]:
        raise DataError(f"{bare[0]}: has no caption to score against")
    said: list[str] = []
    for start in range(0, len(samples), 32):
        part = [read_image(sample.media) for sample in samples[start : start + 32]]
        said += [row["caption"] for row in caption(part, checkpoint, beam_size=options.beams)]
    figures: dict[str, Any] = {"pictures": len(samples), "distinct": len(set(said))}
    figures |= _rounded(caption_scores(said, references))
    if min(map(len, references)) > 1:
        figures["people"] = _rounded(agreement(references))
    if options.constant:
        others = open_source(options.constant)
        candidates = [text for key in range(len(others)) for text in others.row(key).texts]
        figures["constant"] = _rounded(best_constant(candidates, references))
    shown = evenly(list(zip(samples, said, strict=True)), options.shown)
    figures["examples"] = [f"{Path(sample.name).name}: {text} (a person: {sample.texts[0]})" for sample, text in shown]
    return figures


def _rounded(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str) else round(value, 2) for name, value in scores.items()}
