"""What checkpoints with a BERT-like text decoder share: its configuration, tables and vocabulary (BLIP, GIT).

Traps: norms come after each residual sum, with an epsilon of 1e-12, and one stands before the blocks. Logits go
through the embedding, whose tensor a file holds once or twice, or through a map of their own under the same name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text import TextConfig
from multimodal.tokens.files import read_json
from multimodal.tokens.text import Tokenizer, WordPieceTokenizer
from multimodal.weights.clip_hf import ACTIVATIONS
from multimodal.weights.table import Row, Tensors, under, weight_and_bias

SELF = {f"self.{part}": part for part in ("query", "key", "value")} | {"output.dense": "out"}


def decoder_config(text: dict[str, Any], tied: bool, transform: bool, source_width: int | None = None) -> TextConfig:
    """Raises CheckpointError for another activation, or positions that are not absolute."""
    if (kind := text.get("position_embedding_type", "absolute")) != "absolute":
        raise CheckpointError(f"config.json: position_embedding_type {kind!r} is not supported")
    if text["hidden_act"] not in ACTIVATIONS:
        raise CheckpointError(f"config.json: hidden_act {text['hidden_act']!r} is not supported")
    stack = transformer(
        text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"], text["intermediate_size"],
        activation=ACTIVATIONS[text["hidden_act"]], norm_eps=text["layer_norm_eps"], final_norm=False,
        source_width=source_width,
    )  # fmt: skip
    stack = replace(stack, block=replace(stack.block, post_norm=True))
    return TextConfig(
        text["vocab_size"], text["max_position_embeddings"], stack, causal=True, tied=tied, stem_norm=True,
        transform=transform, head_bias=True,
    )  # fmt: skip


def same(tensors: Tensors, name: str, other: str, absent: bool) -> bool:
    """Whether a file has one tensor under two names; `absent`: what it means that it has no `name`."""
    return absent if name not in tensors else other in tensors and torch.equal(tensors[name], tensors[other])


def decoder_rows(prefix: str, cross: bool) -> list[Row]:
    """Embeddings and blocks, from `prefix` to `decoder.`."""
    block = [
        *attention_rows("attention", "attention"),
        *(attention_rows("crossattention", "cross") if cross else []),
        *weight_and_bias("intermediate.dense", "feed.up"),
        *weight_and_bias("output.dense", "feed.down"),
        *weight_and_bias("output.LayerNorm", "feed_branch.norm"),
    ]
    rows = [
        Row("embeddings.word_embeddings.weight", "embed.weight"),
        Row("embeddings.position_embeddings.weight", "positions"),
        *weight_and_bias("embeddings.LayerNorm", "norm"),
        *under("encoder.layer.{}.", "stack.blocks.{}.", block),
    ]
    return [
        *under(prefix, "decoder.", rows),
        Row(f"{prefix}embeddings.position_ids", reason="0, 1, 2, …", optional=True),
    ]


def attention_rows(foreign: str, ours: str) -> list[Row]:
    rows = [row for theirs, own in SELF.items() for row in weight_and_bias(f"{foreign}.{theirs}", f"{ours}.{own}")]
    return [*rows, *weight_and_bias(f"{foreign}.output.LayerNorm", f"{ours}_branch.norm")]


def again(name: str, of: str) -> Row:
    """The row of a tensor that repeats another one."""
    return Row(name, reason=f"{of} again", rebuild=lambda made: made[of].clone(), optional=True)


def tokenizer(folder: Path | None, size: int, bos: Any, eos: Any, context: int) -> Tokenizer | None:
    """BERT's vocabulary where tokenizer_config.json says so; None for another. Raises CheckpointError when it does
    not go with the model."""
    if folder is None or not (folder / "tokenizer_config.json").exists():
        return None
    kind = str(read_json(folder / "tokenizer_config.json").get("tokenizer_class"))
    if kind.removesuffix("Fast") != "BertTokenizer":
        return None
    return WordPieceTokenizer.from_bert(folder, size, bos, eos, context)
