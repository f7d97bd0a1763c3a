"""Classifying texts: labelled texts, a classifier above an encoder or a causal model, figures, and a bag of words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.masks import padding
from multimodal.data.batching import bucketed, padded_length
from multimodal.data.datasets.documents import read_lines
from multimodal.data.loader import Plan, generator
from multimodal.errors import CheckpointError, DataError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.device import moved
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint

HEADERS = (("sentence", "label"), ("text", "label"))  # GLUE's and the usual one


class Labelled(NamedTuple):
    text: str
    label: str


def read_labelled(path: Path, columns: tuple[str, str] | None = None) -> list[Labelled]:
    """Rows of a table with tabs between its columns, gzip or not: the `columns` of text and label that its header
    names; without them the first and the last column, and no header but GLUE's. Raises DataError naming the line."""
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), 1) if line]
    header = [cell.strip() for cell in lines[0][1]]
    text, label = 0, -1
    if columns is not None:
        if absent := [name for name in columns if name not in header]:
            raise DataError(f"{path}: has no column {absent[0]} ({', '.join(header)})")
        text, label = (header.index(name) for name in columns)
    width = len(header)
    rows = lines[1:] if columns is not None or tuple(header) in HEADERS else lines
    if not rows:
        raise DataError(f"{path}: has no rows below its header")
    for number, row in rows:
        if len(row) != width or width < 2:
            raise DataError(f"{path}: line {number} has {len(row)} columns, not {max(width, 2)}")
    return [Labelled(row[text].strip(), row[label].strip()) for _, row in rows]


def classes_of(rows: Sequence[Labelled], path: Path) -> list[str]:
    """The labels in order. Raises DataError where there are fewer than two."""
    found = sorted({row.label for row in rows})
    if len(found) < 2:
        raise DataError(f"{path}: has one label only ({found[0]})")
    return found


class Example(NamedTuple):
    ids: list[int]
    label: int


@dataclass(frozen=True)
class ClassBatch:
    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"]
    labels: Int[Tensor, "B"]

    @property
    def padding(self) -> float:
        return 1 - float(self.lengths.sum()) / self.ids.numel()


class Classed:
    """Labelled texts as the loader's source, framed as the tokenizer frames texts; `cut` counts those that are longer
    than `context`. Raises DataError for a label that is none of `labels`."""

    def __init__(self, rows: Sequence[Labelled], tokenizer: Tokenizer, labels: Sequence[str], context: int, where: str):
        index = {label: number for number, label in enumerate(labels)}
        if wrong := [row.label for row in rows if row.label not in index]:
            raise DataError(f"{where}: label {wrong[0]!r:.40} is none of the training texts' ({', '.join(labels)})")
        start, end = ([] if i is None else [i] for i in (tokenizer.bos_id, tokenizer.eos_id))
        room = context - len(start) - len(end)
        whole = [tokenizer.encode(row.text) for row in rows]
        self.cut = sum(len(ids) > room for ids in whole)
        self.rows = rows
        self.examples = [
            Example([*start, *ids[:room], *end], index[row.label]) for ids, row in zip(whole, rows, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, key: int) -> str:
        return f"text {key} ({self.rows[key].text[:40]})"

    def read(self, key: int) -> Example:
        return self.examples[key]

    def plan(self, budget: int, seed: int) -> Plan:
        """Batches of like length with at most `budget` padded tokens, a pure function of the epoch."""
        sizes = [len(example.ids) for example in self.examples]
        return lambda epoch: bucketed(sizes, budget, generator(seed, epoch))


def as_they_are(example: Example, random: torch.Generator) -> Example:
    return example


@dataclass(frozen=True)
class CollateClassed:
    """`context`: no row gets longer than it by its padding."""

    pad_id: int
    context: int

    def __call__(self, examples: Sequence[Example]) -> ClassBatch:
        lengths = torch.tensor([len(example.ids) for example in examples])
        ids = torch.full((len(examples), padded_length(int(lengths.max()), self.context)), self.pad_id)
        for row, example in zip(ids, examples, strict=True):
            row[: len(example.ids)] = torch.tensor(example.ids)
        return ClassBatch(ids, lengths, torch.tensor([example.label for example in examples]))


def classifier(
    known: Checkpoint, classes: int, dropout: float, fresh: bool = False
) -> tuple[TextTransformer, list[str]]:
    """A classifier with the weights of a text model, or with random ones where `fresh`, and what parts of it are new.
    What guesses tokens is left out; an encoder without a pooler gets one (Devlin et al. 2019, section 4.1), and of a
    causal model the last token tells (Radford et al. 2018, section 3.2). `dropout` takes the place of its own.

    Raises CheckpointError for a model of another kind."""
    if not isinstance(known.model, TextTransformer) or known.model.embed is None or known.tokenizer is None:
        raise CheckpointError(f"{known.source}: is a {known.kind}; an encoder or a causal model of text is needed")
    own: TextConfig = known.model.config
    attention = replace(own.stack.block.attention, dropout=dropout)
    block = replace(own.stack.block, attention=attention, dropout=dropout)
    pool = own.pool or (None if own.causal else "tanh")
    model = TextTransformer(replace(
        own, stack=replace(own.stack, block=block), tied=None, transform=False, head_bias=False, detect=False,
        stem_dropout=dropout, pool=pool, classes=classes,
    ))  # fmt: skip
    torch.nn.init.normal_(model.classes.weight, std=0.02)
    torch.nn.init.zeros_(model.classes.bias)
    if fresh:
        return model, []
    weights = known.model.state_dict()
    new = [name for name in model.state_dict() if name not in weights or name.startswith("classes.")]
    model.load_state_dict({name: weights[name] for name in model.state_dict() if name not in new}, strict=False)
    return model, sorted({name.split(".")[0] for name in new})


def class_logits(model: TextTransformer, batch: ClassBatch) -> Float[Tensor, "B C"]:
    valid = padding(batch.lengths, batch.ids.shape[1])
    pooled = model.pooled(model.states(batch.ids, valid=valid), valid)
    return model.classes(F.dropout(pooled, model.config.stem_dropout, model.training)).float()


class ClassifyText(Summed):
    """Cross-entropy of the label."""

    def forward(self, batch: ClassBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(class_logits(self.model, batch), batch.labels, reduction="sum")}

    def counts(self, batch: ClassBatch) -> dict[str, int]:
        return {"loss": len(batch.labels)}


@torch.inference_mode()
def class_figures(model: TextTransformer, batches: Sequence[ClassBatch]) -> dict[str, float]:
    """Share of the texts that get their label, and mean cross-entropy (nats)."""
    right, loss, count = 0, 0.0, sum(len(batch.labels) for batch in batches)
    for batch in moved(list(batches), model.device):
        logits = class_logits(model, batch)
        right += int((logits.argmax(-1) == batch.labels).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return {"accuracy": right / count, "loss": loss / count}


@torch.inference_mode()
def classified(model: TextTransformer, source: Classed, collate: CollateClassed, batch: int = 32) -> list[int]:
    """The label of each text, by number, in their order."""
    order = sorted(range(len(source)), key=lambda key: len(source.read(key).ids))
    found: dict[int, int] = {}
    for keys in (order[i : i + batch] for i in range(0, len(order), batch)):
        made = moved(collate([source.read(key) for key in keys]), model.device)
        found |= dict(zip(keys, class_logits(model, made).argmax(-1).tolist(), strict=True))
    return [found[key] for key in range(len(source))]


def bag_of_words(train: Sequence[Labelled], test: Sequence[Labelled]) -> Mapping[str, float]:
    """Accuracy of logistic regression on counts of words (scikit-learn, C = 1)."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    words = CountVectorizer(token_pattern=r"\S+")
    counts = words.fit_transform([row.text for row in train])
    model = LogisticRegression(max_iter=1000).fit(counts, [row.label for row in train])
    return {"accuracy": float(model.score(words.transform([row.text for row in test]), [row.label for row in test]))}
