"""Vectors of texts, by any model that reads text."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.text_packing import pool_ragged
from multimodal.models.clip import CLIP
from multimodal.models.encoder_decoder import TextToText
from multimodal.models.text import TextTransformer
from multimodal.tasks.encode.texts import text_features
from multimodal.tokens.text.tokenizer import checked, texts_of, warn_of_cut
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

POOLINGS = ("mean", "cls", "last", "pooler")


def embed(
    texts: Sequence[str], model: str | Path | Checkpoint, pooling: str | None = None, normalize: bool | None = None,
    batch_tokens: int | None = None,
) -> Float[Tensor, "N D"]:  # fmt: skip
    """A vector a text, in their order and on the model's device. It does not depend on the other texts (≤ 1e-5 in
    float32): short texts share a row without seeing each other, and a text that is there twice is computed once.

    `pooling`: the `mean` of the states of all tokens, bos and eos among them as sentence-transformers has it; the state
    of the first token (`cls`) or of the `last`; or BERT's `pooler` on the first. By default what the checkpoint's card
    says, else `last` of a causal model, whose texts then have no eos, and the `mean` of others. A CLIP has its own.
    `normalize`: to length 1, by default where the card says so. `batch_tokens`: of a batch at most.

    Raises UsageError for a model or a pooling that cannot be used, TextError for an empty text, CheckpointError. A
    TextCut warning says what is beyond the context and left out."""
    checkpoint = load(model) if isinstance(model, str | Path) else model
    if not (texts := texts_of(texts, "texts")):
        raise TextError("texts: there are none")
    for number, text in enumerate(texts, 1):
        check_text(text, f"text {number}")
    normalize = bool(checkpoint.card.get("normalize")) if normalize is None else normalize
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    if isinstance(checkpoint.model, CLIP):
        if pooling is not None:
            raise UsageError(f"pooling {pooling!r}: model {checkpoint.source} is a CLIP, which has its own")
        vectors = text_features(checkpoint.model, _tokenizer(checkpoint), list(rows))
    else:
        vectors = _pooled(checkpoint, list(rows), checked_pooling(checkpoint, pooling), batch_tokens)
    vectors = vectors[torch.tensor([rows[text] for text in texts], device=vectors.device)].float()
    return nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def check_text(text: str, name: str) -> None:
    """Raises TextError with its `name` for a text that is empty or no UTF-8."""
    try:
        empty = not checked(text).strip()
    except TextError as error:
        raise TextError(f"{name}: {error}") from None
    if empty:
        raise TextError(f"{name}: is empty")


class _Reader(NamedTuple):
    """What reads: a tower, and the embedding where that is another's."""

    tower: TextTransformer
    table: nn.Embedding | None


def _reader(checkpoint: Checkpoint) -> _Reader:
    model = checkpoint.model
    if isinstance(model, TextTransformer):
        return _Reader(model, None)
    if not isinstance(model, TextToText):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, embed needs a model that reads text")
    if _tokenizer(checkpoint).language_ids:
        raise UsageError(f"model {checkpoint.source}: translates, and its encoder needs a language; embed gives none")
    return _Reader(model.encoder, model.decoder.embed)


def checked_pooling(checkpoint: Checkpoint, pooling: str | None) -> str:
    """The pooling asked for, or the model's own. Raises UsageError where the model has none such."""
    tower = _reader(checkpoint).tower
    if pooling is None:
        pooling = str(checkpoint.card.get("pooling") or ("last" if tower.config.causal else "mean"))
    if pooling not in POOLINGS:
        raise UsageError(f"pooling {pooling!r}: unknown (known: {', '.join(POOLINGS)})")
    if pooling == "pooler" and tower.pool is None:
        raise UsageError(f"pooling 'pooler': model {checkpoint.source} has no pooler")
    if pooling in ("cls", "pooler") and (_tokenizer(checkpoint).bos_id is None or tower.config.causal):
        raise UsageError(f"pooling {pooling!r}: model {checkpoint.source} has no first token that has seen a text")
    return pooling


def _pooled(checkpoint: Checkpoint, texts: list[str], pooling: str, batch_tokens: int | None) -> Float[Tensor, "N D"]:
    tower, table = _reader(checkpoint)
    rows = text_rows(_tokenizer(checkpoint), texts, tower.config.context, ends=not tower.config.causal)
    pool = "first" if pooling in ("cls", "pooler") else pooling
    vectors = pool_ragged(tower, rows, pool, table=table, tokens=batch_tokens)
    with torch.inference_mode():
        return tower.pooled(vectors[:, None]) if pooling == "pooler" else vectors


def text_rows(tokenizer: Tokenizer, texts: Sequence[str], context: int, ends: bool) -> list[list[int]]:
    """Ids of each text behind bos and, with `ends`, before eos. One TextCut warning says what the context cuts."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    end = [tokenizer.eos_id] if ends and tokenizer.eos_id is not None else []
    length = min(context, tokenizer.context or context)
    room = length - len(start) - len(end)
    ids = [tokenizer.encode(text) for text in texts]
    warn_of_cut(texts, [max(0, len(own) - room) for own in ids], length)
    rows = [start + own[:room] + end for own in ids]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise TextError(f"text {text[:40]!r}: has no tokens")
    return rows


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
    return checkpoint.tokenizer
