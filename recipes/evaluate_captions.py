"""Figures of captioners, for evaluate.py: those of `multimodal evaluate captions`, with levels to judge them by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.data.datasets.class_names import evenly
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import open_source
from multimodal.errors import DataError
from multimodal.tasks.evaluate.caption_scores import best_constant
from multimodal.tasks.evaluate.captions import evaluate, open_references, write_captions
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


def captions(
    checkpoint: Checkpoint, path: Path, options: CaptionOptions, count: int | None, trust: Trust = OWN_FOLDER
) -> dict[str, Any]:
    """BLEU, ROUGE-L and CIDEr-D of the captions, in %; `people`: of each reference against the others of its picture;
    `constant`: of one caption for all pictures. `distinct`: different captions among the pictures'."""
    given = open_references(path, count, trust=trust)
    said = write_captions(given, checkpoint, beam_size=options.beams)
    found = evaluate(given, said, people=min(map(len, given.texts.values())) > 1)
    if found.broken:
        raise DataError(found.broken[0])
    figures: dict[str, Any] = {"pictures": len(found.rows), "distinct": found.figures()["distinct"]}
    figures |= _rounded(found.scores)
    if found.people:
        figures["people"] = _rounded(found.people)
    if options.constant:
        others = open_source(options.constant, trust=trust)
        candidates = [text for key in range(len(others)) for text in others.row(key).texts]
        figures["constant"] = _rounded(best_constant(candidates, list(given.texts.values())))
    figures["examples"] = [
        f"{Path(row['file']).name}: {row['caption']} (a person: {row['references'][0]})"
        for row in evenly(found.rows, options.shown)
    ]
    return figures


def _rounded(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str) else round(value, 2) for name, value in scores.items()}
