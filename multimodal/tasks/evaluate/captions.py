"""Captions against what people wrote: BLEU, ROUGE-L and CIDEr-D, and with a CLIP how they fit the pictures.

Captions come from a captioner or from a file. All scores are in %."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multimodal.data.datasets.captions import words
from multimodal.data.datasets.image_sets import Captioned, captioned, open_pictures
from multimodal.data.loader import BROKEN
from multimodal.data.manifests import read_list
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import PATHS
from multimodal.errors import CheckpointError, DataError
from multimodal.tasks.caption.caption import caption_many
from multimodal.tasks.encode.features import picture_features
from multimodal.tasks.evaluate.caption_scores import References, agreement
from multimodal.tasks.evaluate.clip_score import clip_scores
from multimodal.weights.folder import Checkpoint

TEXTS = ("caption", "text")
Watch = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Written:
    """Captions by the item of their picture; those that were cut; what was left out, and why."""

    texts: dict[int, str]
    cut: list[int] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """`rows`: each picture with its `file`, `caption`, `references` and scores. `people`: what each reference scores
    against the others, the mean."""

    scores: dict[str, float]
    rows: list[dict[str, Any]]
    people: dict[str, float] | None
    cut: int
    broken: list[str]

    def figures(self) -> dict[str, Any]:
        said = [row["caption"] for row in self.rows]
        length = sum(len(words(text).split()) for text in said) / len(said)
        counts = {"pictures": len(said), "distinct": len(set(said)), "words_per_caption": length, "cut": self.cut}
        return {**counts, **self.scores, **({"people": self.people} if self.people else {})}


def open_references(data: Any, limit: int | None = None, least: int = 1, trust: Trust = OWN_FOLDER) -> Captioned:
    """What `open_pictures` takes; at most `limit` pictures, evenly spread. Raises DataError for fewer than two
    pictures, and for one with fewer than `least` texts."""
    found = captioned(open_pictures(data, trust=trust), limit)
    if len(found.texts) < 2:
        raise DataError(f"{found.pictures.where}: {len(found.texts)} pictures with captions, scores need at least 2")
    if bare := [key for key, texts in found.texts.items() if len(texts) < least]:
        raise DataError(f"{found.name(bare[0])}: {len(found.texts[bare[0]])} captions, at least {least} are needed")
    return found


def write_captions(
    referenced: Captioned, captioner: Checkpoint, watch: Watch = lambda *_: None, **options: Any
) -> Written:
    """By a captioner with the options of `caption`; a picture that cannot be read is left out."""
    source, keys, broken = referenced.pictures.source, referenced.pictures.keys, dict[int, str]()
    waiting: dict[int, list[tuple[int, Any]]] = {}  # by identity, since captions do not come in order

    def media() -> Iterator[Any]:
        for key in keys:
            try:
                found = source.read(key).media
            except BROKEN as error:
                broken[key] = _cause(referenced.place(key), error)
            else:
                waiting.setdefault(id(found), []).append((key, found))
                yield found

    texts, cut = {}, []
    for given, found in caption_many(media(), captioner, **options):
        key, _ = waiting[id(given)].pop(0)
        if isinstance(found, Exception):
            text = str(found)
            broken[key] = _cause(referenced.place(key), text.partition(": ")[2] if isinstance(given, bytes) else text)
        else:
            texts[key] = found["caption"]
            cut += [] if found["finished"] else [key]
        watch(len(texts), len(keys), len(broken))
    order = [key for key in keys if key in texts]
    return Written({key: texts[key] for key in order}, cut, [broken[key] for key in sorted(broken)])


def read_captions(path: Path, referenced: Captioned) -> Written:
    """Captions of a CSV or JSON-lines file with columns such as `file` and `caption` (what `multimodal caption
    --output` writes), found by path, or by name where only one picture has it. Several of a picture: the first, with a
    warning. A picture without one is left out; a caption of no picture of the data is a warning.

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
        warnings.warn(f"{path}: {len(others)} captions of no picture of the data, such as {others[0]}", stacklevel=2)
    if again:
        warnings.warn(f"{path}: {again} more captions of the same pictures; of each the first is scored", stacklevel=2)
    missing = [key for key in referenced.pictures.keys if key not in texts]
    broken = [f"{referenced.name(key)}: has no caption in {path}" for key in missing]
    return Written({key: texts[key] for key in referenced.pictures.keys if key in texts}, [], broken)


def _finder(referenced: Captioned) -> Callable[[str], int | None]:
    exact: dict[str, int] = {}
    loose: dict[str, int | None] = {}
    for key in referenced.pictures.keys:
        row = referenced.pictures.source.row(key)
        name = os.path.basename(row.name.rpartition("!")[2])
        loose[name] = None if name in loose else key
        exact |= {row.name: key} | ({os.path.abspath(row.media): key} if isinstance(row.media, str) else {})

    def find(file: str) -> int | None:
        near = loose.get(os.path.basename(file))
        return exact.get(file, exact.get(os.path.abspath(file), near))

    return find


def evaluate(
    referenced: Captioned, captions: Written, clip: Checkpoint | None = None, people: bool = False,
    watch: Watch = lambda *_: None, **reading: Any,
) -> Evaluation:  # fmt: skip
    """Scores of the captions there are; with `clip` also CLIPScore and RefCLIPScore, as means over the pictures.

    `reading`: `batch_size` and `workers` of the pictures for the CLIP. Raises DataError for fewer than two captions, or
    with `people` a picture with one reference only; UsageError for a model that is no CLIP, CheckpointError."""
    pictures, texts, broken = referenced.pictures, captions.texts, [*referenced.pictures.broken, *captions.broken]
    if len(texts) < 2:
        raise DataError(f"{pictures.where}: {len(texts)} captions to score, at least 2 are needed")
    vectors = None
    if clip is not None:
        if clip.tokenizer is None:
            raise CheckpointError(f"model {clip.source}: its tokenizer is not known, and is not guessed")
        some = replace(pictures, keys=list(texts), broken=[])
        vectors = picture_features(clip, some, "embedding", watch=watch, **reading)
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
    return Evaluation(total, rows, agreement(references) if people else None, cut, broken)


def record(found: Evaluation, facts: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON: facts, figures, each caption, and what was left out; scores with four decimals."""
    return _rounded({**facts, **found.figures(), "captions": found.rows, "left_out": found.broken})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def _cause(name: str, cause: object) -> str:
    text = str(cause)
    return text if name in text else f"{name}: {text}"
