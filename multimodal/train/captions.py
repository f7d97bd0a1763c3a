"""Captions for labelled pictures: class names, synonyms, WordNet hypernyms and glosses in templates."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from multimodal.errors import UsageError

# WordNet's upper levels say nothing that can be seen
VAGUE = frozenset({
    "entity", "physical entity", "object", "whole", "artifact", "instrumentality", "living thing", "organism",
    "matter", "substance", "solid", "nutriment", "covering", "device", "article", "placental", "chordate",
    "vertebrate", "associate", "peer", "participant", "attachment", "connection", "medium", "natural object",
    "conveyance", "consumer goods", "commodity", "durables",
})  # fmt: skip
HYPERNYMS = 6  # how many levels above a class are named in captions


@dataclass(frozen=True)
class Concept:
    """What a group of pictures may be called: names (or whole captions), WordNet hypernyms from near to far, gloss."""

    names: tuple[str, ...]
    hypernyms: tuple[str, ...] = ()
    gloss: str = ""
    whole: bool = False  # the names are whole captions, which no template frames

    def extended(self, extra: "Concept | None") -> "Concept":
        """With the names of `extra` where it has some, and its hypernyms before the own ones."""
        if extra is None:
            return self
        hypernyms = tuple(dict.fromkeys(extra.hypernyms + self.hypernyms))
        return Concept(extra.names or self.names, hypernyms, self.gloss, self.whole)


def read_classes(path: Path) -> dict[str, Concept]:
    """Class id (key `id` or `wnid`) to concept, one JSON object a line."""
    if not path.is_file():
        raise UsageError(f"{path}: missing (it names the classes)")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {
        row.get("id") or row["wnid"]: Concept(tuple(row["names"]), tuple(row["hypernyms"]), row.get("gloss", ""))
        for row in rows
    }


class Captions:
    """Draws captions for a batch, and knows for every term which concepts it fits: a picture of one dog breed fits
    the "dog" that was drawn for another."""

    def __init__(self, concepts: list[Concept], templates: list[str]):
        self.concepts, self.templates = concepts, templates
        self.above = [[h for h in c.hypernyms if h not in VAGUE][:HYPERNYMS] for c in concepts]
        terms = [{t.lower() for t in (*c.names, *c.hypernyms, c.gloss) if t} for c in concepts]
        short = set().union(*(own for own, c in zip(terms, concepts, strict=True) if not c.whole))
        for own, concept in zip(terms, concepts, strict=True):
            if concept.whole:  # "dog" also fits a picture whose caption speaks of a dog
                words = set(" ".join(concept.names).lower().split())
                own |= short & words
        self.index = {term: i for i, term in enumerate(sorted(set().union(*terms)))}
        self.fits = torch.zeros(len(concepts), len(self.index), dtype=torch.bool)
        for row, own in zip(self.fits, terms, strict=True):
            row[[self.index[term] for term in own]] = True

    def texts(self) -> list[str]:
        """Everything a caption may say, for the tokenizer's training."""
        return [*self.index, *(t.format(name) for t in self.templates for c in self.concepts for name in c.names[:1])]

    def draw(self, groups: Int[Tensor, "B"], random: np.random.Generator) -> tuple[list[str], Bool[Tensor, "B C"]]:
        """One caption a concept of the batch, without repeats, and which picture each fits."""
        drawn: dict[int, str] = {}
        for group in groups.unique().tolist():
            term, caption = self._caption(group, random)
            drawn.setdefault(self.index[term.lower()], caption)
        return list(drawn.values()), self.fits[groups][:, list(drawn)]

    def _caption(self, group: int, random: np.random.Generator) -> tuple[str, str]:
        concept, chance = self.concepts[group], random.random()
        if concept.gloss and chance < 0.04:
            return concept.gloss, concept.gloss
        if self.above[group] and chance < 0.32:
            term = self.above[group][random.integers(len(self.above[group]))]
        elif chance < 0.75 and not concept.whole:
            term = concept.names[0]
        else:
            term = concept.names[random.integers(len(concept.names))]
        template = "{}" if concept.whole else self.templates[random.integers(len(self.templates))]
        return term, template.format(term)
