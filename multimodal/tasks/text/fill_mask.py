"""What a masked language model puts in the place of the mask in a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.text_packing import encode_ragged
from multimodal.models.text import TextTransformer
from multimodal.tokens.text.tokenizer import texts_of
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def fill_mask(texts: Sequence[str], model: str | Path | Checkpoint, top_k: int = 5) -> list[dict[str, Any]]:
    """Of each text: `masks`, for each of its masks the `top_k` most probable tokens with `token`, `id` and
    `probability`, the best first; and `filled`, the text with the best of each. Each mask is guessed by itself, with
    the others masked (Devlin et al. 2019).

    The mask is what the tokenizer calls it, such as [MASK] or <mask>. Raises UsageError for a model of another kind,
    TextError for a text that is empty, has no mask or is longer than the context, CheckpointError."""
    checkpoint = masked_model(load(model) if isinstance(model, str | Path) else model)
    texts = texts_of(texts, "texts")
    network, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not 1 <= top_k <= network.config.vocabulary:
        raise UsageError(f"top_k: {top_k}, expected 1 to {network.config.vocabulary}, the size of the vocabulary")
    rows = [masked_ids(text, tokenizer, network.config.context) for text in texts]
    states = encode_ragged(network, rows)
    return [
        _filled(text, network, tokenizer, row, own, top_k) for text, row, own in zip(texts, rows, states, strict=True)
    ]


def masked_model(checkpoint: Checkpoint) -> Checkpoint:
    """Raises UsageError for a model that guesses no masks, CheckpointError for one whose tokenizer has none."""
    network, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not isinstance(network, TextTransformer) or network.config.tied is None or network.config.causal:
        causal = isinstance(network, TextTransformer) and network.config.causal
        kind = "a causal language model" if causal else f"a {checkpoint.kind} without logits of masked tokens"
        raise UsageError(f"model {checkpoint.source}: is {kind}, fill-mask needs a masked language model")
    if tokenizer is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
    if tokenizer.mask_id is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer has no mask")
    return checkpoint


def spelling(tokenizer: Tokenizer) -> str:
    """How the mask is written in a text."""
    return tokenizer.decode([tokenizer.mask_id], skip_control=False).strip()


def masked_ids(text: str, tokenizer: Tokenizer, context: int) -> list[int]:
    """The ids of a text between bos and eos. Only here does a word of a text stand for a control token. Blanks before a
    mask are the mask's, as in the published vocabularies whose tokens begin with a blank. Raises TextError."""
    if not text.strip():
        raise TextError(f"text {text[:40]!r}: is empty")
    mask = spelling(tokenizer)
    *before, last = text.split(mask)
    if not before:
        raise TextError(f"text {text[:40]!r}: has no {mask}")
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for part in before:
        ids += [*tokenizer.encode(part.rstrip()), tokenizer.mask_id]
    ids += [*tokenizer.encode(last), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    if len(ids) > context:
        raise TextError(f"text {text[:40]!r}: has {len(ids)} tokens, the model's context is {context}")
    return ids


@torch.inference_mode()
def _filled(
    text: str, network: TextTransformer, tokenizer: Tokenizer, row: list[int], states: Float[Tensor, "T D"], top_k: int
) -> dict[str, Any]:
    at = torch.tensor([place for place, i in enumerate(row) if i == tokenizer.mask_id], device=states.device)
    found = network.logits(states[None, at])[0].float().softmax(-1).topk(top_k)
    masks = [
        [
            {"token": tokenizer.decode([i], skip_control=False), "id": i, "probability": p}
            for i, p in zip(*one, strict=True)
        ]
        for one in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
    first, *others = text.split(spelling(tokenizer))
    filled = first + "".join(guesses[0]["token"].strip() + part for guesses, part in zip(masks, others, strict=True))
    return {"text": text, "masks": masks, "filled": filled}
