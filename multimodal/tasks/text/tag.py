"""Tagging: the entities that a token classifier finds in texts, as transformers' token classification merges them."""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from multimodal.data.datasets.annotated.tagged import OUTSIDE
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.text_packing import encode_ragged
from multimodal.models.text import TextTransformer
from multimodal.tasks.encode.arguments import TagArguments, TaggerArguments
from multimodal.tasks.encode.loaded import LoadedModel, Model, device_of, loaded
from multimodal.tasks.text.options import TagOptions
from multimodal.tokens.text.pieces import overlapping
from multimodal.tokens.text.tokenizer import Piece, Tokenizer, texts_of
from multimodal.weights.folder import Checkpoint


class Entity(NamedTuple):
    """`label`: without its prefix, such as B- or I-. `score`: mean probability of its tokens or words. `word`: the
    tokens as text; the characters `start` to `end` of the text are the entity as written."""

    label: str
    score: float
    word: str
    start: int
    end: int


class Tagger(LoadedModel):
    """Token classifier, loaded once. `device`: `auto` is a GPU if there is one; `compute_type`: see
    `prepare_for_inference`; `options`: see `TagOptions`. A text beyond the context is read in windows that overlap;
    where their entities do, the longer one stays.

    Raises UsageError for another kind of model, CheckpointError for a checkpoint without labels or with a tokenizer
    whose tokens have no places."""

    def __init__(
        self, model: Model | None = None, *, device: str | torch.device | None = "auto", compute_type: str = "auto",
        **options: Unpack[TagArguments],
    ):  # fmt: skip
        checkpoint = tagger(loaded(model, "tag"))
        self.options = TagOptions(**options)
        self.checkpoint = prepare_for_inference(checkpoint, compute_type, device_of(device, checkpoint))

    def __call__(self, texts: str | Sequence[str]) -> list[list[Entity]]:
        """The entities of each text, in order. Raises TextError for one that is empty."""
        with self._lock:
            return _entities([texts] if isinstance(texts, str) else texts, self.checkpoint, self.options)


def tag(
    texts: str | Sequence[str], model: Model | None = None, **options: Unpack[TaggerArguments]
) -> list[list[Entity]]:
    """The entities of each text by a new `Tagger`, whose options it takes. Each call loads the model."""
    return Tagger(model, **options)(texts)


def tagger(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint. Raises UsageError unless it classifies tokens, CheckpointError if it lacks the labels."""
    network = checkpoint.model
    if not isinstance(network, TextTransformer) or not network.config.tags:
        raise UsageError(f"model {checkpoint.source}: expected a token classifier, got {checkpoint.kind} without one")
    checkpoint.required_tokenizer()
    if (found := len(checkpoint.card.get("labels", ()))) != network.config.tags:
        raise CheckpointError(
            f"model {checkpoint.source}: card must name the {network.config.tags} labels of the tokens (has {found})"
        )
    return checkpoint


def tag_logits(
    network: TextTransformer, tokenizer: Tokenizer, rows: Sequence[Sequence[int]]
) -> list[Float32[Tensor, "_ L"]]:
    """Logits of the tokens of each row, which is put between bos and eos."""
    start, end = tokenizer.frame
    states = encode_ragged(network, [[*start, *row, *end] for row in rows])
    with inference_mode():
        return [network.tags(own[len(start) : len(own) - len(end)]).float().cpu() for own in states]


def _entities(texts: Sequence[str], checkpoint: Checkpoint, options: TagOptions) -> list[list[Entity]]:
    network, tokenizer, labels = checkpoint.model, checkpoint.tokenizer, checkpoint.card["labels"]
    texts = texts_of(texts, "texts")
    if empty := [number for number, text in enumerate(texts, 1) if not text.strip()]:
        raise TextError(f"text {empty[0]}: is empty")
    room = network.config.context - sum(map(len, tokenizer.frame))
    pieces = [tokenizer.pieces(text) for text in texts]
    windows = [overlapping(len(own), room, min(options.overlap, room - 1)) for own in pieces]
    rows = [own[a:b] for own, parts in zip(pieces, windows, strict=True) for a, b in parts]
    logits = iter(tag_logits(network, tokenizer, [[piece.id for piece in row] for row in rows]))
    found, remaining = [], iter(rows)
    for text, parts in zip(texts, windows, strict=True):
        own: list[Entity] = []
        for _ in parts:
            own += merged(text, next(remaining), next(logits).numpy(), labels, tokenizer, options.merge)
        found.append(own if len(parts) == 1 else _without_overlaps(own))
    return found


def merged(
    text: str, pieces: Sequence[Piece], logits: Float32[np.ndarray, "T L"], labels: Sequence[str], tokenizer: Tokenizer,
    merge: str,
) -> list[Entity]:  # fmt: skip
    """Entities of a window. Neighbours of one label are one entity, unless the second begins with B-."""
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    scores = exponents / exponents.sum(-1, keepdims=True)
    words = [[number] for number in range(len(pieces))] if merge == "simple" else _words(pieces)
    groups: list[list[Entity]] = []
    for word in words:
        one = _tagged(text, [pieces[number] for number in word], scores[word], labels, tokenizer, merge)
        begins, label = one.label.startswith("B-"), _kind(one.label)
        if groups and not begins and _kind(groups[-1][-1].label) == label:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [
        Entity(_name(group), float(np.mean([one.score for one in group])),
               tokenizer.joined([one.word for one in group]), group[0].start, group[-1].end)
        for group in groups if _name(group) != OUTSIDE
    ]  # fmt: skip


def _kind(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _name(group: Sequence[Entity]) -> str:
    """Without a prefix, also one that sets apart neighbours, such as S- or E-."""
    return group[0].label.split("-", 1)[-1]


def _words(pieces: Sequence[Piece]) -> list[list[int]]:
    """Numbers of the pieces of each word."""
    words: list[list[int]] = []
    for number, piece in enumerate(pieces):
        if piece.subword and words:
            words[-1].append(number)
        else:
            words.append([number])
    return words


def _tagged(
    text: str, pieces: Sequence[Piece], scores: Float32[np.ndarray, "T L"], labels: Sequence[str], tokenizer: Tokenizer,
    merge: str,
) -> Entity:  # fmt: skip
    """One token, or a word with one label, which keeps its B- or I-."""
    own = {"max": scores[scores.max(-1).argmax()], "average": scores.mean(0)}.get(merge, scores[0])
    best = int(own.argmax())
    tokens = [text[p.start : p.end] if p.id == tokenizer.unknown_id else p.token for p in pieces]
    word = tokens[0] if merge == "simple" else tokenizer.joined(tokens)
    return Entity(labels[best], float(own[best]), word, pieces[0].start, pieces[-1].end)


def _without_overlaps(entities: Sequence[Entity]) -> list[Entity]:
    """Keep the longest of overlapping entities, of equally long ones the most probable."""
    kept: list[Entity] = []
    for entity in sorted(entities, key=lambda one: one.start):
        if kept and kept[-1].start <= entity.start < kept[-1].end:
            kept[-1] = max(kept[-1], entity, key=lambda one: (one.end - one.start, one.score))
        else:
            kept.append(entity)
    return kept
