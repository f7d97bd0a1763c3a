"""Text embeddings from any model with a text encoder."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.errors import TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.inference.text_packing import pool_ragged
from multimodal.models.clip import CLIP
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.tasks.encode.loaded import Model, loaded
from multimodal.tasks.text.options import EmbedOptions
from multimodal.tokens.text.tokenizer import Tokenizer, checked, texts_of, warn_of_cut
from multimodal.weights.encode import text_features
from multimodal.weights.folder import Checkpoint


def embed(
    texts: Sequence[str], model: Model, pooling: str | None = None, normalize: bool | None = None,
    batch_tokens: int | None = None, prompt: str | None = None,
) -> Float[Tensor, "N D"]:  # fmt: skip
    """One vector per text, in order, on the model's device. Vectors do not depend on the other texts (≤ 1e-5 in
    float32): short texts share a row under a document mask, and duplicates are computed once.

    `pooling`, `normalize`, `batch_tokens`, `prompt`: see `EmbedOptions`.

    Raises UsageError for an unsuitable model or pooling, TextError for an empty text, CheckpointError. Warns (TextCut)
    of texts cut to the context."""
    EmbedOptions(pooling=pooling, normalize=normalize, batch_tokens=batch_tokens, prompt=prompt)  # checks them
    checkpoint = loaded(model, "embed")
    check_normalize(checkpoint, normalize)
    if not (texts := texts_of(texts, "texts")):
        raise TextError("texts: expected at least one")
    for number, text in enumerate(texts, 1):
        check_text(text, f"text {number}")
    before = prompt_text(checkpoint, prompt)
    texts = [before + text for text in texts]
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    if isinstance(checkpoint.model, CLIP):
        if pooling is not None:
            cause = f"{pooling!r}: CLIP models have their own pooling ({checkpoint.source})"
            raise UsageError(cause, argument="pooling")
        vectors = text_features(checkpoint.model, checkpoint.required_tokenizer(), list(rows))
    else:
        vectors = _pooled(checkpoint, list(rows), checked_pooling(checkpoint, pooling), batch_tokens)
    return scaled(vectors[torch.tensor([rows[text] for text in texts], device=vectors.device)], checkpoint, normalize)


def scaled(vectors: Float[Tensor, "N D"], checkpoint: Checkpoint, normalize: bool | None) -> Float[Tensor, "N D"]:
    """Vectors in float32, of length 1 with `normalize`, or with None where the model's card says so."""
    normalize = bool(checkpoint.card.get("normalize")) if normalize is None else normalize
    return nn.functional.normalize(vectors.float(), dim=-1) if normalize else vectors.float()


def check_normalize(checkpoint: Checkpoint, normalize: bool | None) -> None:
    """Raises UsageError for a CLIP, whose vectors have length 1, with `normalize` False."""
    if normalize is False and isinstance(checkpoint.model, CLIP):
        cause = f"must be True or None: vectors of a CLIP have length 1 ({checkpoint.source}) (got False)"
        raise UsageError(cause, argument="normalize")


def prompt_text(checkpoint: Checkpoint, prompt: str | None) -> str:
    """Text of the card's prompt of this name, or of its default. Raises UsageError for an unknown name."""
    known = checkpoint.card.get("prompts") or {}
    name = checkpoint.card.get("prompt") if prompt is None else prompt
    if name is None:
        return ""
    if name not in known:
        has = f"no such prompt; it has {', '.join(known)}" if known else "no prompts"
        raise UsageError(f"{name[:40]!r}: model {checkpoint.source} has {has}", argument="prompt")
    return known[name]


def check_text(text: Any, name: str) -> None:
    """Raises TextError, naming the text, for one that is empty or not valid Unicode."""
    try:
        empty = not checked(text).strip()
    except TextError as error:
        raise TextError(f"{name}: {error}") from None
    if empty:
        raise TextError(f"{name}: is empty")


class _Reader(NamedTuple):
    """A text encoder, and its embedding table if that belongs to another module."""

    tower: TextTransformer
    table: nn.Embedding | None


def _reader(checkpoint: Checkpoint) -> _Reader:
    model = checkpoint.model
    if isinstance(model, TextTransformer):
        return _Reader(model, None)
    if not isinstance(model, EncoderDecoder):
        raise UsageError(f"model {checkpoint.source}: expected a model with a text encoder, got {checkpoint.kind}")
    if checkpoint.required_tokenizer().language_ids:
        raise UsageError(
            f"model {checkpoint.source}: embed does not support translators, whose encoder needs a language"
        )
    return _Reader(model.encoder, model.decoder.embed)


def is_language_model(checkpoint: Checkpoint) -> bool:
    """Return True for a decoder with logits, unless its card has a pooling, as Qwen3-Embedding's."""
    model = checkpoint.model
    writes = isinstance(model, TextTransformer) and model.config.causal and model.config.tied is not None
    return writes and checkpoint.card.get("pooling") is None


def checked_pooling(checkpoint: Checkpoint, pooling: str | None) -> str:
    """The given pooling or the model's default. Raises UsageError for one that the model does not support."""
    tower = _reader(checkpoint).tower
    if pooling is None:
        pooling = str(checkpoint.card.get("pooling") or ("last" if tower.config.causal else "mean"))
        if pooling not in (known := EmbedOptions.pooling.choices):
            cause = f"{pooling!r:.80} of its modules.json or card is not supported"
            raise UsageError(f"model {checkpoint.source}: {cause}; name a pooling: {', '.join(known)}")
    EmbedOptions.checked({"pooling": pooling})
    if pooling == "pooler" and tower.pool is None:
        raise UsageError(f"pooling 'pooler': model {checkpoint.source} has no pooler")
    if pooling in ("cls", "pooler") and (checkpoint.required_tokenizer().bos_id is None or tower.config.causal):
        raise UsageError(f"pooling {pooling!r}: model {checkpoint.source} has no first token that attends to the text")
    return pooling


def _pooled(checkpoint: Checkpoint, texts: list[str], pooling: str, batch_tokens: int | None) -> Float[Tensor, "N D"]:
    tower, table = _reader(checkpoint)
    rows = text_rows(checkpoint.required_tokenizer(), texts, tower.config.context, ends=not tower.config.causal)
    mean = pooling == "pooler" and tower.config.pools_mean
    pool = "mean" if mean else "first" if pooling in ("cls", "pooler") else pooling
    vectors = pool_ragged(tower, rows, pool, table=table, tokens=batch_tokens)
    with inference_mode():
        vectors = tower.pooled(vectors[:, None]) if pooling == "pooler" else vectors
        return vectors if tower.project is None else tower.project(vectors.to(tower.project.dtype))


def text_rows(tokenizer: Tokenizer, texts: Sequence[str], context: int, ends: bool) -> list[list[int]]:
    """Ids of each text after bos and, with `ends` or where the tokenizer puts it, before eos. Warns (TextCut) of texts
    cut to the context."""
    start, end = tokenizer.frame
    end = end if ends or tokenizer.puts_end else []
    length = tokenizer.length_in(context)
    capacity = length - len(start) - len(end)
    ids = [tokenizer.encode(text) for text in texts]
    warn_of_cut(texts, [max(0, len(own) - capacity) for own in ids], length)
    rows = [start + tokenizer.kept(own, capacity) + end for own in ids]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise TextError(f"text {text[:40]!r}: has no tokens")
    return rows
