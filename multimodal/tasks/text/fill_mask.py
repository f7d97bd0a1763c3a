"""Fill-mask: the tokens that a masked language model predicts for the masks in a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.text_packing import encode_ragged
from multimodal.models.text import TextTransformer
from multimodal.tasks.text.options import FillMaskOptions
from multimodal.tokens.text.tokenizer import Tokenizer, texts_of
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def fill_mask(
    texts: Sequence[str], model: str | Path | Checkpoint, top_k: int = FillMaskOptions.top_k.default
) -> list[dict[str, Any]]:
    """For each text, `masks` (the `top_k` most probable tokens of each mask, best first, as `token`, `id` and
    `probability`) and `filled` (the text with the best ones). Masks are predicted independently, with the others masked
    (Devlin et al. 2019).

    The mask is spelled as in the tokenizer, such as [MASK] or <mask>. Raises UsageError for another kind of model,
    TextError for a text that is empty, has no mask or exceeds the context, CheckpointError."""
    checkpoint = masked_model(load(model, task="fill-mask") if isinstance(model, str | Path) else model)
    texts = texts_of(texts, "texts")
    network, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not 1 <= top_k <= network.config.vocabulary:
        raise UsageError(f"top_k must be from 1 to the vocabulary size {network.config.vocabulary} (got {top_k})")
    rows = [masked_ids(text, tokenizer, network.config.context) for text in texts]
    states = encode_ragged(network, rows)
    return [
        _filled(text, network, tokenizer, row, own, top_k) for text, row, own in zip(texts, rows, states, strict=True)
    ]


def masked_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint. Raises UsageError unless it is a masked language model, CheckpointError without a mask."""
    network = checkpoint.model
    if not isinstance(network, TextTransformer) or network.config.tied is None or network.config.causal:
        causal = isinstance(network, TextTransformer) and network.config.causal
        kind = "a causal one" if causal else f"{checkpoint.kind} without token logits"
        raise UsageError(f"model {checkpoint.source}: expected a masked language model, got {kind}")
    if checkpoint.required_tokenizer().mask_id is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer has no mask")
    return checkpoint


def spelling(tokenizer: Tokenizer) -> str:
    """The mask as text."""
    return tokenizer.decode([tokenizer.mask_id], skip_control=False).strip()


def masked_ids(text: str, tokenizer: Tokenizer, context: int) -> list[int]:
    """Ids of a text between bos and eos, the mask's spelling read as its control token. Spaces before a mask belong to
    it, as in vocabularies whose tokens begin with a space. Raises TextError."""
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
    positions = torch.tensor(
        [position for position, i in enumerate(row) if i == tokenizer.mask_id], device=states.device
    )
    best = network.logits(states[None, positions])[0].float().softmax(-1).topk(top_k)
    masks = [
        [
            {"token": tokenizer.decode([i], skip_control=False), "id": i, "probability": p}
            for i, p in zip(*one, strict=True)
        ]
        for one in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    first, *others = text.split(spelling(tokenizer))
    filled = first + "".join(guesses[0]["token"].strip() + part for guesses, part in zip(masks, others, strict=True))
    return {"text": text, "masks": masks, "filled": filled}
