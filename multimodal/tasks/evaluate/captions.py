"""Captions against references: BLEU, ROUGE-L and CIDEr-D, and CLIPScore with a CLIP model.

Captions come from a captioner or from a file. All scores are in %."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multimodal.data.datasets.class_names import words
from multimodal.data.datasets.image_sets import CaptionedImages, captioned, open_images
from multimodal.data.manifests import read_list
from multimodal.data.pending import PendingItems
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import PATHS, USUAL, ListColumns
from multimodal.errors import DataError
from multimodal.tasks.caption.caption import caption_many
from multimodal.tasks.encode.features import image_features
from multimodal.tasks.evaluate.caption_scores import References, agreement, best_constant
from multimodal.tasks.evaluate.clip_score import clip_scores
from multimodal.weights.folder import Checkpoint

TEXTS = ("caption", "text")
Watch = Callable[[int, int, int], None]


@dataclass(frozen=True)
class CaptionTexts:
    """Captions by the item of their image; those that were cut; what was left out, and why."""

    texts: dict[int, str]
    cut: list[int] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CaptionEvaluation:
    """`rows`: each image with its `file`, `caption`, `references` and scores; `keys`: their items. `people`: what each
    reference scores against the others, the mean."""

    scores: dict[str, float]
    rows: list[dict[str, Any]]
    keys: list[int]
    people: dict[str, float] | None
    cut: int
    broken: list[str]

    def figures(self) -> dict[str, Any]:
        said = [row["caption"] for row in self.rows]
        length = sum(len(words(text).split()) for text in said) / len(said)
        counts = {"images": len(said), "distinct": len(set(said)), "words_per_caption": length, "cut": self.cut}
        return {**counts, **self.scores, **({"people": self.people} if self.people else {})}


def open_references(
    data: Any, limit: int | None = None, least: int = 1, trust: Trust = OWN_FOLDER, columns: ListColumns = USUAL
) -> CaptionedImages:
    """Images with their references; at most `limit` images, evenly spread. Raises DataError for fewer than two
    images, and for one with fewer than `least` texts."""
    found = captioned(open_images(data, None, trust, columns), limit)
    if len(found.texts) < 2:
        raise DataError(f"{found.images.where}: {len(found.texts)} images with captions, scores need at least 2")
    if bare := [key for key, texts in found.texts.items() if len(texts) < least]:
        raise DataError(f"{found.name(bare[0])}: {len(found.texts[bare[0]])} captions, at least {least} are needed")
    return found


def write_captions(
    referenced: CaptionedImages, captioner: Checkpoint, watch: Watch = lambda *_: None, **options: Any
) -> CaptionTexts:
    """By a captioner with the options of `caption`; an image that cannot be read is left out."""
    items, texts, cut = PendingItems(referenced.images.source, referenced.images.keys), {}, []
    for key, found in caption_many(items.keyed(), captioner, keyed=True, **options):
        if isinstance(found, Exception):
            items.skip(key, found)
        else:
            texts[key] = found["caption"]
            cut += [] if found["finished"] else [key]
        watch(len(texts), len(items.keys), len(items.broken))
    return CaptionTexts({key: texts[key] for key in items.keys if key in texts}, cut, items.causes())


def read_captions(path: Path, referenced: CaptionedImages) -> CaptionTexts:
    """Captions of a CSV or JSON-lines file with columns such as `file` and `caption` (what `multimodal caption
    --output` writes), found by path, or by name where only one image has it. Several of an image: the first, with a
    warning. An image without one is left out; a caption of no image of the data is a warning.

    Raises DataError for a line that cannot be used."""
    find, texts, others, again = _finder(referenced), dict[int, str](), [], 0
    for line in read_list(path):
        place = f"{path} line {line.number}"
        file, text = (next((line.values[n] for n in names if n in line.values), None) for names in (PATHS, TEXTS))
        if line.fault or not isinstance(file, str) or not isinstance(text, str):
            raise DataError(f"{place}: {line.fault or 'needs a file and a caption, each a text'}")
        key = find(file)
        if key is None:
            others.append(file)
        elif key in texts:
            again += 1
        else:
            texts[key] = text
    if others:
        warnings.warn(f"{path}: {len(others)} captions of no image of the data, such as {others[0]}", stacklevel=2)
    if again:
        warnings.warn(f"{path}: {again} more captions of the same images; of each the first is scored", stacklevel=2)
    missing = [key for key in referenced.images.keys if key not in texts]
    broken = [f"{referenced.name(key)}: has no caption in {path}" for key in missing]
    return CaptionTexts({key: texts[key] for key in referenced.images.keys if key in texts}, [], broken)


def _finder(referenced: CaptionedImages) -> Callable[[str], int | None]:
    exact: dict[str, int] = {}
    loose: dict[str, int | None] = {}
    for key in referenced.images.keys:
        row = referenced.images.source.row(key)
        name = os.path.basename(row.name.rpartition("!")[2])
        loose[name] = None if name in loose else key
        exact |= {row.name: key} | ({os.path.abspath(row.media): key} if isinstance(row.media, str) else {})

    def find(file: str) -> int | None:
        near = loose.get(os.path.basename(file))
        return exact.get(file, exact.get(os.path.abspath(file), near))

    return find


def evaluate(
    referenced: CaptionedImages, captions: CaptionTexts, clip: Checkpoint | None = None, people: bool = False,
    watch: Watch = lambda *_: None, **reading: Any,
) -> CaptionEvaluation:  # fmt: skip
    """Scores of the captions there are; with `clip` also CLIPScore and RefCLIPScore, as means over the images.

    `reading`: `batch_size` and `workers` of the images for the CLIP. Raises DataError for fewer than two captions, or
    with `people` an image with one reference only; UsageError for a model that is no CLIP, CheckpointError."""
    images, texts, broken = referenced.images, captions.texts, [*referenced.images.broken, *captions.broken]
    if len(texts) < 2:
        raise DataError(f"{images.where}: {len(texts)} captions to score, at least 2 are needed")
    vectors = None
    if clip is not None:
        clip.required_tokenizer()
        some = replace(images, keys=list(texts), broken=[])
        vectors = image_features(clip, some, "embedding", watch=watch, **reading)
        texts = {key: texts[key] for key in vectors.keys}
        broken += vectors.broken
    references, said = [referenced.texts[key] for key in texts], list(texts.values())
    total, each = References(references).score(said)
    if vectors is not None:
        columns = clip_scores(clip, vectors.vectors, said, references)
        for name, column in zip(("clip_score", "ref_clip_score"), columns, strict=True):
            total[name] = 100 * sum(column) / len(column)
            for row, value in zip(each, column, strict=True):
                row[name] = 100 * value
    rows = [
        {"file": referenced.name(key), "caption": text, "references": referenced.texts[key], **scores}
        for (key, text), scores in zip(texts.items(), each, strict=True)
    ]
    cut = len(set(captions.cut) & set(texts))
    return CaptionEvaluation(total, rows, list(texts), agreement(references) if people else None, cut, broken)


def constant_caption(
    referenced: CaptionedImages, data: Any, trust: Trust = OWN_FOLDER, columns: ListColumns = USUAL
) -> dict[str, Any]:
    """Scores and text of the caption of `data` that does best when every image is given the same."""
    candidates = captioned(open_images(data, None, trust, columns)).texts.values()
    return best_constant([text for texts in candidates for text in texts], list(referenced.texts.values()))


def record(found: CaptionEvaluation, facts: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON: facts, figures, each caption, and what was left out; scores with four decimals."""
    return _rounded({**facts, **found.figures(), "captions": found.rows, "left_out": found.broken})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
