"""Class names, and captions for labelled images: names, WordNet hypernyms and glosses in templates."""

import hashlib
import re
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
from multimodal.system.files import read_text_lines, strict_json

# WordNet's upper levels describe nothing visible
VAGUE = frozenset({
    "entity", "physical entity", "object", "whole", "artifact", "instrumentality", "living thing", "organism",
    "matter", "substance", "solid", "nutriment", "covering", "device", "article", "placental", "chordate",
    "vertebrate", "associate", "peer", "participant", "attachment", "connection", "medium", "natural object",
    "conveyance", "consumer goods", "commodity", "durables",
})  # fmt: skip
HYPERNYMS = 6  # levels above a class that captions use
MOST = 1 << 32  # bytes of the table of matches
LETTERS = re.compile(r"[^\W\d_]{3,}")
CLITIC = re.compile(r"(n't|'(?:s|re|ve|ll|m|d))\b")
WORD = re.compile(r"n't|'(?:s|re|ve|ll|m|d)\b|\w+(?:[-./]\w+)*|[&$%#@*+=/]")


def words(text: str) -> str:
    """Lower-case and split words by spaces, "man's" as "man 's", without the punctuation that coco-caption drops;
    hyphenated words stay whole, as in PTBTokenizer."""
    return " ".join(WORD.findall(CLITIC.sub(r" \1", text.lower().replace("’", "'"))))


@dataclass(frozen=True)
class Concept:
    """Names of a group of images (or whole captions), WordNet hypernyms from near to far, and the gloss."""

    names: tuple[str, ...]
    hypernyms: tuple[str, ...] = ()
    gloss: str = ""
    whole: bool = False  # the names are whole captions, used without templates

    def terms(self) -> set[str]:
        """Return names, hypernyms and gloss in lower case."""
        return {term.lower() for term in (*self.names, *self.hypernyms, self.gloss) if term}

    def above(self) -> tuple[str, ...]:
        """Return the nearest hypernyms that say something visible, which captions use."""
        return tuple(term for term in self.hypernyms if term not in VAGUE)[:HYPERNYMS]

    def extended(self, extra: "Concept | None") -> "Concept":
        """Merge `extra`: its names, if any, replace these, its hypernyms come first."""
        if extra is None:
            return self
        hypernyms = tuple(dict.fromkeys(extra.hypernyms + self.hypernyms))
        return Concept(extra.names or self.names, hypernyms, self.gloss, self.whole)


class CaptionSampler:
    """Draws captions and tells which concepts each matches: one dog breed matches the "dog" drawn for another. A term
    is a name, a hypernym or a gloss, or all captions of one image.

    `named`: share of the draws for captioned images that say one of the `classes` that two of the captions name, as for
    an image of that class. A model of long captions alone knows no short ones: "a man" is far from all images."""

    def __init__(
        self, concepts: list[Concept], templates: list[str], classes: Iterable[Concept] = (), named: float = 0.0
    ):  # fmt: skip
        self.concepts, self.templates, self.named = concepts, templates, named
        self.counts = counts_of_names([c.names if c.whole and named else () for c in concepts], classes)
        self.own = [  # a single caption is believed
            [one for one, count in counts.items() if count >= min(2, len(c.names))] if c.whole else [c]
            for c, counts in zip(concepts, self.counts, strict=True)
        ]
        self.index = {term: i for i, term in enumerate(sorted({t for own in self.own for c in own for t in c.terms()}))}

    def fits(self) -> Bool[Tensor, "N C"] | None:
        """Return the table of matching concepts and terms, the last of which (-1) matches none; None if concepts have
        captions alone. Raises DataError for a table over `MOST` bytes."""
        if not self.index:
            return None
        count, terms = len(self.concepts), len(self.index) + len(self.concepts) + 1
        if count * terms > MOST:
            raise DataError(
                f"holds {count} captioned images and classes, too many for one run with class names", argument="data"
            )
        table = torch.zeros(count, terms, dtype=torch.bool)
        for number, (row, concept) in enumerate(zip(table, self.concepts, strict=True)):
            row[len(self.index) + number] = concept.whole
            # "dog" also matches an image whose caption mentions a dog
            known = set(words(" ".join(concept.names)).split()) if concept.whole else concept.terms()
            known.update(*(one.terms() for one in self.counts[number]))
            row[[self.index[term] for term in known if term in self.index]] = True
        return table

    def texts(self) -> list[str]:
        """Return all captions, to train the tokenizer."""
        framed = [t.format(c.names[0]) for t in self.templates for c in self.concepts if not c.whole]
        return [*self.index, *framed, *(caption for c in self.concepts if c.whole for caption in c.names)]

    def draw(self, number: int, random: torch.Generator) -> tuple[int, str]:
        """Draw the term and text of a caption for concept `number`."""
        uniform = lambda count: torch.rand(count, generator=random, dtype=torch.float64).tolist()
        concept, own = self.concepts[number], self.own[number]
        chance, term_at, template_at = uniform(3)
        if concept.whole:
            says, class_at = uniform(2) if self.named and own else (1.0, 0.0)
            if says >= self.named:
                return len(self.index) + number, concept.names[int(term_at * len(concept.names))]
            concept = own[int(class_at * len(own))]
        name, above = concept.names[int(term_at * len(concept.names))], concept.above()
        if concept.gloss and chance < 0.04:
            return self.index[concept.gloss.lower()], concept.gloss
        if above and chance < 0.32:
            term = above[int(term_at * len(above))]
        else:
            term = concept.names[0] if chance < 0.75 else name
        return self.index[term.lower()], self.templates[int(template_at * len(self.templates))].format(term)


def counts_of_names(images: Iterable[Sequence[str]], classes: Iterable[Concept]) -> list[Counter[Concept]]:
    """Count, for the captions of each image, how many have a name of each class."""
    named: dict[str, list[Concept]] = {}
    for concept in classes:
        for name in dict.fromkeys(map(words, concept.names)):
            named.setdefault(name, []).append(concept)
    longest = max((len(name.split()) for name in named), default=0)
    found = []
    for captions in images:
        counts: Counter[Concept] = Counter()
        for caption in captions:
            own = words(caption).split()
            runs = (" ".join(own[i : i + size]) for size in range(1, longest + 1) for i in range(len(own)))
            counts.update(list(dict.fromkeys(concept for run in runs for concept in named.get(run, ()))))
        found.append(counts)
    return found


def unseen_words(texts: Iterable[str], captions: Iterable[str]) -> list[str]:
    """Words of `texts` that are neither in `captions` nor a form of a word there: a form is that word and up to three
    letters more ("dogs" of "dog"), or shares with it all but the last three letters, at least four ("dances" of
    "dancing")."""
    found = lambda lines: {word for line in lines for word in LETTERS.findall(line.lower())}
    known = found(captions)
    starts = {word[:length] for word in known for length in range(3, len(word) + 1)}
    is_form = lambda word: word[: max(4, len(word) - 3)] in starts or any(word[:-more] in known for more in (1, 2, 3))
    return sorted(word for word in found(texts) if not is_form(word))


def held_out(sets: Sequence[Mapping[str, Concept]], share: float, seed: int = 0) -> dict[str, Concept]:
    """Choose a `share` of the classes of each set (id to concept) to hold out of training.

    They are chosen by a hash of their ids among classes whose names are no name or hypernym of another class of any
    set, so that no training caption uses the name of a held-out class. Raises UsageError for too few such classes."""
    classes = {identity: concept for one in sets for identity, concept in one.items()}
    uses = Counter(term for concept in classes.values() for term in concept.terms())
    order = sorted(classes, key=lambda identity: hashlib.blake2b(f"{seed} {identity}".encode()).digest())
    apart = [i for i in order if all(uses[name.lower()] == 1 for name in classes[i].names)]
    drawn: dict[str, Concept] = {}
    for one in sets:
        own, wanted = [i for i in apart if i in one], round(share * len(one))
        if wanted > len(own):
            raise UsageError(
                f"{share}: {wanted} classes of a set, only {len(own)} share no name with others", argument="hold_out"
            )
        drawn |= {i: classes[i] for i in own[:wanted]}
    return drawn


def speaks_of(caption: str, concepts: Iterable[Concept]) -> bool:
    """Return True if a caption contains a name of one of the concepts."""
    said = f" {words(caption)} "
    return any(f" {words(name)} " in said for concept in concepts for name in concept.names)


def class_names(files: Iterable[Path], sources: Iterable[str | Path] = ()) -> dict[str, Concept]:
    """Read concepts by class id (key `id` or `wnid`) from JSON lines with `names`, optional `hypernyms` and `gloss`:
    `files`, then a `classes.jsonl` in or beside each source. A class of several files keeps its first names and all
    hypernyms. Raises UsageError for one that a file repeats."""
    beside = [place / "classes.jsonl" for source in sources for place in (Path(source), Path(source).parent)]
    found: dict[str, Concept] = {}
    for path in dict.fromkeys([*files, *filter(Path.is_file, beside)]):
        lines = read_text_lines(path, "class names")
        if not any(map(str.strip, lines)):
            raise UsageError(f"{path}: names no classes (it is empty)")
        own: dict[str, Concept] = {}
        for number, line in enumerate(lines, 1):
            if line.strip():
                identity, concept = _class(line, f"{path} line {number}")
                if identity in own:
                    raise UsageError(f"{path} line {number}: repeats the class {identity!r}")
                own[identity] = concept
        found |= {identity: concept.extended(found.get(identity)) for identity, concept in own.items()}
    return {identity: concept for identity, concept in found.items() if concept.names}


def _class(line: str, where: str) -> tuple[str, Concept]:
    try:
        row = strict_json(line)
        for key in ("names", "hypernyms"):
            texts = row.get(key, [])
            if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
                raise TypeError(f"{key} is no list of texts: {str(texts)[:40]!r}")
        concept = Concept(tuple(row["names"]), tuple(row.get("hypernyms", ())), row.get("gloss", ""))
        return row.get("id") or row["wnid"], concept
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: no object with `id` and `names` ({error!r})") from None


def evenly(items: Sequence[Any], count: int | None) -> Sequence[Any]:
    """Return at most `count` evenly spread items in order, or all without a count."""
    if count is None or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def class_labels(source: Source, where: object, least: int = 2) -> tuple[str, ...]:
    """Return the sorted class ids of a source. Raises DataError for a source with fewer than `least`."""
    if not source.labels:
        columns = f"; columns: {', '.join(fields):.80}" if (fields := source.row(0).fields) else ""
        raise DataError(
            f"{where}: its items have no classes (a folder a class, .cls members or a label column{columns})"
        )
    if len(source.labels) < least:
        raise DataError(f"{where}: has the class {source.labels[0]!r} alone, and classification needs {least}")
    return source.labels


def names_of(labels: Sequence[str], files: Sequence[Path], sources: Sequence[str | Path]) -> list[str]:
    """Display name of each class id: the first in `files` or in a `classes.jsonl` beside `sources`, else the id with
    spaces for underscores."""
    known = class_names(files, sources)
    return [known[label].names[0] if label in known else label.replace("_", " ") for label in labels]
