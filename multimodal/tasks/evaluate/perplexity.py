"""Perplexity and bits per byte of language models, causal or with a bidirectional prefix."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.masks import causal, documents, window
from multimodal.data.batching import map_tensors, pad_rows
from multimodal.data.datasets.text import IGNORED, Split, TextCorpus, TokenBatch, texts_in
from multimodal.errors import DataError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig
from multimodal.weights.encode import evaluating
from multimodal.weights.folder import Checkpoint

CHUNK = 4096  # targets whose logits exist at a time


def evaluate_text(
    checkpoint: Checkpoint, path: Path, context: int | None = None, stride: int | None = None, split: Split = "none"
) -> dict[str, Any]:
    """`text_scores` of a file, packed or not, as one text or as `split` into documents.

    `context`: tokens of a window (default: those of training). `stride`: tokens by which
    windows move (default: the context; half of it for a prefix language model). Raises UsageError for a model that is
    no causal language model, CheckpointError without a tokenizer, TextError for text outside its vocabulary."""
    model, context = causal_model(checkpoint, context)
    prefix = checkpoint.card.get("objective") == "prefix"
    stride = stride or (max(1, context // 2) if prefix else context)
    if stride > context:
        raise UsageError(f"stride must be at most the context of {context} tokens (got {stride})")
    corpus = TextCorpus.of(texts_in(path, split), checkpoint.tokenizer)
    with evaluating(model):
        scores = text_scores(model, corpus, context=context, stride=stride, prefix=prefix)
    counts = {"texts": len(corpus), "tokens": len(corpus.ids), "characters": corpus.characters, "bytes": corpus.bytes}
    return scores | counts | {"context": context, "stride": stride}


def causal_model(checkpoint: Checkpoint, context: int | None = None) -> tuple[TextTransformer, int]:
    """The model of a checkpoint, and its context if `context` is None; errors as of `evaluate_text`."""
    model = checkpoint.model
    if not isinstance(model, TextTransformer) or not model.config.causal or model.config.tied is None:
        raise UsageError(f"model {checkpoint.source}: expected a causal language model, got {checkpoint.kind}")
    checkpoint.required_tokenizer()
    context = context or model.config.context
    if model.config.limit is not None and context > model.config.limit:
        raise UsageError(f"context must be at most the model's {model.config.limit} tokens (got {context})")
    return model, context


def _cross_entropy(model: TextTransformer, batch: TokenBatch) -> float:
    """Summed cross-entropy of all targets, in nats."""
    mask, places = mask_of(batch, model.config.window), places_of(batch, model.config.positions)
    states = model.states(batch.ids, mask=mask, positions=places)
    scored = batch.targets != IGNORED
    parts = zip(states[scored].split(CHUNK), batch.targets[scored].split(CHUNK), strict=True)
    return sum(
        F.cross_entropy(model.logits(rows[None])[0].float(), targets, reduction="sum").item() for rows, targets in parts
    )


def mask_of(batch: TokenBatch, seeing: int | None = None) -> Bool[Tensor, "_ 1 T T"] | None:
    """Attention mask: earlier tokens, the prefix too (Raffel et al. 2020, figure 4), in the own document alone, and
    of all that the last `seeing` tokens where the model has such a window. None: what the model does by itself."""
    if batch.documents is None and batch.given is None:
        return None
    size, device = batch.ids.shape[1], batch.ids.device
    seen = causal(size, size, device)[None, None]
    if batch.given is not None:
        seen = seen | batch.given[:, None, None]
    if seeing is not None:
        seen = seen & window(size, size, seeing - 1, size, device)
    return seen if batch.documents is None else seen & documents(batch.documents)


def places_of(batch: TokenBatch, positions: PositionConfig) -> Int[Tensor, "B T"] | None:
    """Positions of the ids, None: 0, 1, 2, …. Where rotations depend on the length of a text, its padding repeats the
    last position, so that it does not count."""
    if positions.switch is None or batch.places is not None:
        return batch.places
    order = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    last = torch.where(batch.targets == IGNORED, 0, order).amax(1, keepdim=True)
    return order.minimum(last)


def windows(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, end, first): the ids start..end-1 are read, of which those from `first` on tell the token after them.
    Each token of a text of `length` but the first is predicted once, with up to `context` ids before it and, except at
    the start of the text, at least `context - stride + 1`."""
    found, told = [], 0
    while told < length - 1:
        end = min(told + (stride if told else context), length - 1)
        found.append((max(0, end - context), end, told))
        told = end
    return found


@inference_mode()
def text_losses(
    model: TextTransformer, corpus: TextCorpus, context: int, stride: int, batch: int = 16, prefix: bool = False
) -> tuple[float, int]:
    """The summed cross-entropy (nats) of all tokens but the first of each text, and how many they are. `prefix`: the
    ids of a window before those that tell something are seen by all of it."""
    rows = [(n, *window) for n in range(len(corpus)) for window in windows(len(corpus.text(n)), context, stride)]
    rows.sort(key=lambda row: row[1] - row[2])  # rows of a batch are about as long as each other
    total, count = 0.0, 0
    for at in range(0, len(rows), batch):
        part = _padded(corpus, rows[at : at + batch], prefix)
        total += _cross_entropy(model, map_tensors(part, lambda tensor: tensor.to(model.device)))
        count += int((part.targets != IGNORED).sum())
    return total, count


def _padded(corpus: TextCorpus, rows: list[tuple[int, int, int, int]], prefix: bool) -> TokenBatch:
    """Rows padded on the right, which what is before does not see."""
    ids, targets, given = [], [], []
    for number, start, end, first in rows:
        text = corpus.text(number).long()
        ids.append(text[start:end])
        targets.append(torch.cat([torch.full((first - start,), IGNORED), text[first + 1 : end + 1]]))
        given.append(torch.arange(end - start) <= first - start)
    return TokenBatch(
        pad_rows(ids, multiple=1), pad_rows(targets, IGNORED, multiple=1),
        given=pad_rows(given, False, multiple=1) if prefix else None,
    )  # fmt: skip


def text_scores(model: TextTransformer, corpus: TextCorpus, **options) -> dict[str, float]:
    """Results of `text_losses` as nats per token (the tokens that end texts among them), perplexity of it, nats a
    character and bits a byte of the text."""
    total, count = text_losses(model, corpus, **options)
    return {
        "loss": total / count, "perplexity": math.exp(min(total / count, 700.0)),
        "nats_per_character": total / corpus.characters, "bits_per_byte": total / math.log(2) / corpus.bytes,
    }  # fmt: skip


@inference_mode()
def losses_by_place(model: TextTransformer, corpus: TextCorpus, context: int, batch: int = 16) -> Float[Tensor, "T"]:
    """Mean nats of the token after each place of a window, over whole windows side by side. Raises DataError where the
    text does not fill one."""
    starts, device = range(0, len(corpus.ids) - context, context), model.device
    if not starts:
        raise DataError(f"{len(corpus.ids)} tokens of validation text do not fill a context of {context}")
    total = torch.zeros(context, device=device)
    for at in range(0, len(starts), batch):
        rows = torch.stack([corpus.ids[i : i + context + 1].long() for i in starts[at : at + batch]]).to(device)
        logits = model.logits(model.states(rows[:, :-1])).float()
        total += F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").sum(0)
    return (total / len(starts)).cpu()
