r"""Questions about images, as conversations to train and to evaluate an any-to-text model: captions and classes.

    d=data/vision
    python recipes/any/ask_images.py questions/train --captioned $d/flickr8k-1000/train.jsonl \
        --labelled "$d/tiny-imagenet/train-*.tar" $d/caltech101/train --classes recipes/data/classes.jsonl \
        $d/tiny-imagenet/classes.jsonl --captioner captioner-mini --described 12000
    python recipes/any/ask_images.py questions/test --captioned $d/flickr8k-1000/test.jsonl \
        --labelled "$d/tiny-imagenet/val-*.tar" $d/caltech101/val --classes recipes/data/classes.jsonl \
        $d/tiny-imagenet/classes.jsonl --limit 1000

Writes `captions.jsonl` (all captions of an image are its answers), `classes.jsonl` ("What is this?") and
`yes_no.jsonl`: of each labelled image one question that is true and one that is not, about its class or a class above
it in WordNet. With `--captioner` also `described.jsonl`: what that model says of the captioned and of `--described`
labelled images (sequence-level distillation, Kim and Rush 2016).
Images from tars are written beside them, others are named by their absolute path (train with `--trust_paths`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from multimodal.data.datasets.captions import TEMPLATES, tidy
from multimodal.data.datasets.chats import question, write_chats
from multimodal.data.datasets.class_names import VAGUE, Concept, class_names, evenly
from multimodal.data.loader import generator
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import Sample, Source, open_source
from multimodal.errors import DataError, MultimodalError, UsageError
from multimodal.system.files import read_json, write_whole
from multimodal.system.options import Natural
from multimodal.tasks.caption.caption import Captioner
from multimodal.train import log, start

QUESTIONS: dict[str, list[str]] = read_json(Path(__file__).parents[1] / "data" / "questions.json")
NAMING = tuple(template.partition("{")[0] for template in TEMPLATES)
LEVELS = 4  # above a class of which is asked


@dataclass(frozen=True)
class ImageQuestions:
    folder: tyro.conf.Positional[Path]  # may hold questions of the other recipes
    captioned: tuple[str, ...] = ()  # images with captions
    labelled: tuple[str, ...] = ()  # images with classes
    classes: tuple[Path, ...] = ()  # JSONL of class names
    limit: Natural = 0  # labelled images, evenly spread; 0: all
    captioner: str | None = None  # whose captions to learn from
    described: Natural = 0  # labelled images that the captioner describes, evenly spread
    seed: int = 0
    trust: Trust = Trust()


def with_article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def placed(sample: Sample, folder: Path) -> Path:
    """The image's own file, or one written from its bytes, of which the name tells it from others of the same name."""
    if isinstance(sample.media, Path):
        return sample.media.resolve()
    name = Path(sample.name.rpartition("!")[2])
    path = folder / f"{name.stem}-{hashlib.sha256(sample.media).hexdigest()[:16]}{name.suffix}"
    if not path.exists():
        write_whole(path, sample.media)
    return Path(folder.name) / path.name


def chosen(options: list[str], random: torch.Generator) -> str:
    return options[int(torch.randint(len(options), (), generator=random))]


def readable(source: Source, keys: Iterable[int]) -> Iterator[tuple[int, Sample]]:
    """Samples by key; warnings name broken ones, which are left out."""
    for key in keys:
        try:
            yield key, source.read(key)
        except DataError as error:
            log.warning("%s", error)


def captions(source: Source, s: ImageQuestions) -> Iterator[dict[str, Any]]:
    for key, sample in readable(source, range(len(source))):
        random = generator(s.seed, "captions", key)
        if not sample.texts:
            log.warning("%s: no caption", sample.name)
            continue
        path = placed(sample, s.folder / "images")
        answers = [tidy(text) for text in sample.texts]
        yield question(chosen(QUESTIONS["describe"], random), answers, "captions", "cider", image=path)


def described(paths: list[Path], s: ImageQuestions) -> Iterator[dict[str, Any]]:
    """The captioner's sentences, without class names in a template. Images that cannot be read are left out."""
    captioner = Captioner(s.captioner, beam_size=4)
    for key, (path, found) in enumerate(captioner.many(((path, s.folder / path) for path in paths), keyed=True)):
        if isinstance(found, MultimodalError):
            log.warning("%s", found)
            continue
        if found["caption"].startswith(NAMING):
            continue
        asked = chosen(QUESTIONS["describe"], generator(s.seed, "described", key))
        yield question(asked, [found["caption"]], "captions of a model", "cider", image=path)


def labelled(source: Source, keys: list[int], s: ImageQuestions) -> Iterator[tuple[Path, str, torch.Generator]]:
    for key, sample in readable(source, keys):
        yield placed(sample, s.folder / "images"), sample.label, generator(s.seed, "classes", key)


def seen_terms(concept: Concept) -> list[str]:
    return [concept.names[0], *[h for h in concept.hypernyms if h not in VAGUE][:LEVELS]]


def yes_no(path: Path, label: str, names: Mapping[str, Concept], random: torch.Generator) -> Iterator[dict[str, Any]]:
    own, others = names[label], sorted(names.keys() - {label})
    true = chosen(seen_terms(own), random)
    while (false := chosen(seen_terms(names[chosen(others, random)]), random)).lower() in own.terms():
        pass
    for term, answer in ((true, "yes"), (false, "no")):
        yield question(chosen(QUESTIONS["true"], random).format(with_article(term)), [answer], "yes or no", image=path)


def checked_names(source: Source, keys: list[int], s: ImageQuestions) -> dict[str, Concept]:
    """Names of the classes. Raises UsageError or DataError where questions about an item could not be made."""
    names = class_names(s.classes, s.labelled)
    if len(names) < 2:
        raise UsageError(f"expected two classes or more, got {', '.join(names) or 'none'}", argument="classes")
    for label, place in {row.label: row.place for row in map(source.row, keys) if not row.fault}.items():
        if label not in names:
            raise DataError(f"{place}: expected a label that --classes names, got {label!r}")
        own, others = names[label].terms(), (concept for other, concept in names.items() if other != label)
        if all(term.lower() in own for concept in others for term in seen_terms(concept)):
            raise UsageError(f"expected a class with a term that {label!r} lacks, got none", argument="classes")
    return names


def main(s: ImageQuestions) -> None:
    if s.labelled:
        source = open_source(s.labelled, trust=s.trust)
        keys = evenly(range(len(source)), s.limit) if s.limit else list(range(len(source)))
        names = checked_names(source, keys, s)
    (s.folder / "images").mkdir(parents=True, exist_ok=True)
    made = {}
    paths: list[Path] = []  # what the captioner describes
    if s.captioned:
        made["captions"] = list(captions(open_source(s.captioned, trust=s.trust), s))
        if not made["captions"]:
            raise DataError(f"{', '.join(s.captioned)}: no image with a caption")
        paths += [Path(row["messages"][0]["content"][0]["path"]) for row in made["captions"]]
    if s.labelled:
        items = list(labelled(source, keys, s))
        made["classes"] = (
            question(
                chosen(QUESTIONS["name"], random), list(map(with_article, names[label].names)), "classes", image=path
            )
            for path, label, random in items
        )
        made["yes_no"] = (one for path, label, random in items for one in yes_no(path, label, names, random))
        paths += [path for path, _, _ in evenly(items, s.described)]
    if s.captioner is not None:
        made["described"] = described(paths, s)
    for name, rows in made.items():
        log.info("%s: %d questions", name, write_chats(s.folder / f"{name}.jsonl", rows))


if __name__ == "__main__":
    start(main)
