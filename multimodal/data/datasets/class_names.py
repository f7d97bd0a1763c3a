"""Captions for labelled pictures: class names, synonyms, WordNet hypernyms and glosses in templates."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from multimodal.data.sources import Source
from multimodal.errors import DataError, UsageError

# WordNet's upper levels say nothing that can be seen
VAGUE = frozenset({
    "entity", "physical entity", "object", "whole", "artifact", "instrumentality", "living thing", "organism",
    "matter", "substance", "solid", "nutriment", "covering", "device", "article", "placental", "chordate",
    "vertebrate", "associate", "peer", "participant", "attachment", "connection", "medium", "natural object",
    "conveyance", "consumer goods", "commodity", "durables",
})  # fmt: skip
HYPERNYMS = 6  # how many levels above a class are named in captions
MOST = 1 << 32  # bytes of the table of what fits what


@dataclass(frozen=True)
class Concept:
    """What a group of pictures may be called: names (or whole captions), WordNet hypernyms from near to far, gloss."""

    names: tuple[str, ...]
    hypernyms: tuple[str, ...] = ()
    gloss: str = ""
    whole: bool = False  # the names are whole captions, which no template frames

    def terms(self) -> set[str]:
        """All that a picture of it may be called, in lower case."""
        return {term.lower() for term in (*self.names, *self.hypernyms, self.gloss) if term}

    def extended(self, extra: "Concept | None") -> "Concept":
        """With the names of `extra` where it has some, and its hypernyms before the own ones."""
        if extra is None:
            return self
        hypernyms = tuple(dict.fromkeys(extra.hypernyms + self.hypernyms))
        return Concept(extra.names or self.names, hypernyms, self.gloss, self.whole)


class Captions:
    """Draws captions, and knows which concepts each fits: a picture of one dog breed fits the "dog" that was drawn for
    another. A term is a name, a hypernym or a gloss, or all the captions of one picture."""

    def __init__(self, concepts: list[Concept], templates: list[str]):
        self.concepts, self.templates = concepts, templates
        self.above = [[h for h in c.hypernyms if h not in VAGUE][:HYPERNYMS] for c in concepts]
        self.index = {term: i for i, term in enumerate(sorted({t for c in concepts if not c.whole for t in c.terms()}))}

    def fits(self) -> Bool[Tensor, "N C"] | None:
        """Which term fits which concept; None where each concept has its own captions only. Raises DataError where the
        table would take more than `MOST` bytes."""
        if not self.index:
            return None
        count, terms = len(self.concepts), len(self.index) + len(self.concepts)
        if count * terms > MOST:
            raise DataError(f"--data: {count} captioned pictures and classes, too many for one run with class names")
        table = torch.zeros(count, terms, dtype=torch.bool)
        for number, (row, concept) in enumerate(zip(table, self.concepts, strict=True)):
            row[len(self.index) + number] = concept.whole
            # "dog" also fits a picture whose caption speaks of a dog
            known = set(" ".join(concept.names).lower().split()) if concept.whole else concept.terms()
            row[[self.index[term] for term in known if term in self.index]] = True
        return table

    def texts(self) -> list[str]:
        """Everything a caption may say, for the tokenizer's training."""
        framed = [t.format(c.names[0]) for t in self.templates for c in self.concepts if not c.whole]
        return [*self.index, *framed, *(caption for c in self.concepts if c.whole for caption in c.names)]

    def draw(self, number: int, random: torch.Generator) -> tuple[int, str]:
        """The term and the text of a caption for a picture of concept `number`."""
        concept, above = self.concepts[number], self.above[number]
        chance, term_at, template_at = torch.rand(3, generator=random, dtype=torch.float64).tolist()
        name = concept.names[int(term_at * len(concept.names))]
        if concept.whole:
            return len(self.index) + number, name
        if concept.gloss and chance < 0.04:
            return self.index[concept.gloss.lower()], concept.gloss
        if above and chance < 0.32:
            term = above[int(term_at * len(above))]
        else:
            term = concept.names[0] if chance < 0.75 else name
        return self.index[term.lower()], self.templates[int(template_at * len(self.templates))].format(term)


def held_out(sets: Sequence[Mapping[str, Concept]], share: float, seed: int = 0) -> dict[str, Concept]:
    """`share` of the classes of each set (id to concept), to be left out of training.

    They are drawn by a hash of their ids, among the classes none of whose names is a name or hypernym of another of any
    set: so no picture that is trained on is ever called by the name of a class that is not. Raises UsageError where too
    few are."""
    classes = {identity: concept for one in sets for identity, concept in one.items()}
    uses = Counter(term for concept in classes.values() for term in concept.terms())
    order = sorted(classes, key=lambda identity: hashlib.blake2b(f"{seed} {identity}".encode()).digest())
    apart = [i for i in order if all(uses[name.lower()] == 1 for name in classes[i].names)]
    drawn: dict[str, Concept] = {}
    for one in sets:
        own, wanted = [i for i in apart if i in one], round(share * len(one))
        if wanted > len(own):
            raise UsageError(
                f"--hold_out {share}: {wanted} classes of a set, only {len(own)} share no name with others"
            )
        drawn |= {i: classes[i] for i in own[:wanted]}
    return drawn


def speaks_of(caption: str, concepts: Iterable[Concept]) -> bool:
    """Whether a caption holds a name of one of the concepts."""
    words = f" {' '.join(caption.lower().split())} "
    return any(f" {name.lower()} " in words for concept in concepts for name in concept.names)


def class_names(files: Iterable[Path], sources: Iterable[str | Path] = ()) -> dict[str, Concept]:
    """Class id (key `id` or `wnid`) to concept, of files with one JSON object a line: `names`, and where known
    `hypernyms` and `gloss`. A `classes.jsonl` in or beside a source is read too, after `files`. A class that is named
    several times takes its names from the first, its hypernyms from all in turn."""
    beside = [place / "classes.jsonl" for source in sources for place in (Path(source), Path(source).parent)]
    found: dict[str, Concept] = {}
    for path in dict.fromkeys([*files, *filter(Path.is_file, beside)]):
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                identity, concept = _class(line, f"{path} line {number}")
                found[identity] = concept.extended(found.get(identity))
    return {identity: concept for identity, concept in found.items() if concept.names}


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise UsageError(f"{path}: {'is no file' if path.exists() else 'missing'} (it names the classes)")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start}), and is to name the classes") from None
    if not any(map(str.strip, lines)):
        raise UsageError(f"{path}: names no classes (it is empty)")
    return lines


def _class(line: str, where: str) -> tuple[str, Concept]:
    try:
        row = json.loads(line)
        for key in ("names", "hypernyms"):
            texts = row.get(key, [])
            if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
                raise TypeError(f"{key} is no list of texts: {str(texts)[:40]!r}")
        concept = Concept(tuple(row["names"]), tuple(row.get("hypernyms", ())), row.get("gloss", ""))
        return row.get("id") or row["wnid"], concept
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: no object with `id` and `names` ({error!r})") from None


def evenly(items: Sequence[Any], count: int | None) -> Sequence[Any]:
    """At most `count` of the items, evenly spread, in their order; all without a count."""
    if count is None or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def class_labels(source: Source, where: object, least: int = 2) -> tuple[str, ...]:
    """The class ids of a source, sorted. Raises DataError where its items have no classes, or fewer than `least`."""
    if not source.labels:
        raise DataError(f"{where}: its items have no classes (a folder a class, .cls members or a label column)")
    if len(source.labels) < least:
        raise DataError(f"{where}: has the class {source.labels[0]!r} alone, and classification needs {least}")
    return source.labels
