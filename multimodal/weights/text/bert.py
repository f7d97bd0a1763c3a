"""What text towers in BERT's names share: their configuration, tables and vocabulary (BERT and what grew from it, and
the decoders of BLIP and GIT).

Traps: norms come after each residual sum, with an epsilon of 1e-12, and one stands before the blocks. Logits go
through the embedding, whose tensor a file holds once or twice, or through a map of their own under the same name; so
with their bias."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.system.files import read_json
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.vocabulary import Tokenizer, WordPieceTokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import Row, Tensors, under, weight_and_bias
from multimodal.weights.text.sentence import sentence_card, sentence_length
from multimodal.weights.vision import clip_hf

ACTIVATIONS = clip_hf.ACTIVATIONS | {"relu": "relu", "silu": "silu", "swish": "silu"}
WORD = "embeddings.word_embeddings.weight"
SELF = {f"self.{part}": part for part in ("query", "key", "value")} | {"output.dense": "out"}
SIZES = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "is_decoder": False, "add_cross_attention": False,
}  # fmt: skip


class Head(NamedTuple):
    """The names of a map from states to logits: linear map, norm, the map to the vocabulary, and its bias, which may
    have a name besides `decoder`.bias."""

    dense: str
    norm: str
    decoder: str
    bias: str

    def tied(self, tensors: Tensors, embedding: str, config: dict[str, Any]) -> bool | None:
        """None: the file has no such head. Raises CheckpointError for a bias of two names that differ."""
        if f"{self.dense}.weight" not in tensors:
            return None
        if not same(tensors, twin := f"{self.decoder}.bias", self.bias, absent=True):
            raise CheckpointError(f"tensor {twin!r} is not the same as {self.bias!r}, which is another name of it")
        return same(tensors, f"{self.decoder}.weight", embedding, absent=config.get("tie_word_embeddings", True))

    def rows(self, embedding: str, config: TextConfig, ours: str = "") -> list[Row]:
        if config.tied is None:
            return []
        weight = f"{self.decoder}.weight"
        return [
            *weight_and_bias(self.dense, f"{ours}transform.linear"),
            *weight_and_bias(self.norm, f"{ours}transform.norm"),
            Row(self.bias, f"{ours}tied_bias" if config.tied else f"{ours}head.bias"),
            again(weight, embedding) if config.tied else Row(weight, f"{ours}head.weight"),
            *([again(f"{self.decoder}.bias", self.bias)] if self.bias != f"{self.decoder}.bias" else []),
        ]  # fmt: skip


def decoder_config(
    text: dict[str, Any], tied: bool | None, transform: bool, source_width: int | None = None
) -> TextConfig:
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


def encoder_config(
    name: str, config: dict[str, Any], tensors: Tensors, prefix: str, head: Head, defaults: dict[str, Any],
    gelu_head: bool = False,
) -> TextConfig:  # fmt: skip
    """The tower and its logits; `config` from config.json. `gelu_head`: in whatever the blocks have. Raises
    CheckpointError."""
    if not config:
        raise CheckpointError(f"{name} weights without config.json, which has the number of heads")
    text = SIZES | defaults | config
    if text["add_cross_attention"]:
        raise CheckpointError("config.json: add_cross_attention (a decoder over another model) is not supported")
    tied = head.tied(tensors, prefix + WORD, config)
    tower = decoder_config(text, tied, transform=tied is not None)
    if gelu_head and tied is not None and tower.stack.block.activation != "gelu":
        raise CheckpointError(f"config.json: hidden_act {text['hidden_act']!r} beside logits that go through gelu")
    segments = text["type_vocab_size"]
    return replace(tower, causal=bool(text["is_decoder"]), head_bias=tied is not None, segments=segments)


def with_classes(config: TextConfig, tensors: Tensors, pools: dict[str, str], *names: str) -> TextConfig:
    """`pools`: the linear maps that may stand before `names`, of which a file has one, and the activation of each.
    Raises CheckpointError for a classifier of tokens, which has none, and for a decoder, which pools its last token."""
    pool = next((activation for name, activation in pools.items() if f"{name}.weight" in tensors), None)
    classes = next((len(tensors[f"{name}.weight"]) for name in names if f"{name}.weight" in tensors), 0)
    if classes and pool is None:
        raise CheckpointError("a classifier without a pooler (it classifies tokens) is not supported")
    if pool and config.causal:
        raise CheckpointError("config.json: is_decoder True with a pooler, whose first token sees no other")
    return replace(config, pool=pool, classes=classes)


def same(tensors: Tensors, name: str, other: str, absent: bool) -> bool:
    """Whether a file has one tensor under two names; `absent`: what it means that it has no `name`."""
    return absent if name not in tensors else other in tensors and torch.equal(tensors[name], tensors[other])


def tower_rows(prefix: str, ours: str = "", cross: bool = False, segments: int = 0) -> list[Row]:
    """Embeddings and blocks."""
    block = [
        *attention_rows("attention", "attention"),
        *(attention_rows("crossattention", "cross") if cross else []),
        *weight_and_bias("intermediate.dense", "feed.up"),
        *weight_and_bias("output.dense", "feed.down"),
        *weight_and_bias("output.LayerNorm", "feed_branch.norm"),
    ]
    blocks = under(f"{prefix}encoder.layer.{{}}.", f"{ours}stack.blocks.{{}}.", block)
    return [*embedding_rows(prefix, ours, segments), *blocks]


def embedding_rows(prefix: str, ours: str, segments: int) -> list[Row]:
    rows = [
        Row("word_embeddings.weight", "embed.weight"),
        Row("position_embeddings.weight", "positions"),
        *([Row("token_type_embeddings.weight", "segments.weight")] if segments else []),
        *weight_and_bias("LayerNorm", "norm"),
        Row("position_ids", reason="0, 1, 2, …", optional=True),
    ]
    return under(f"{prefix}embeddings.", ours, rows)


def attention_rows(foreign: str, ours: str) -> list[Row]:
    rows = [row for theirs, own in SELF.items() for row in weight_and_bias(f"{foreign}.{theirs}", f"{ours}.{own}")]
    return [*rows, *weight_and_bias(f"{foreign}.output.LayerNorm", f"{ours}_branch.norm")]


def again(name: str, of: str) -> Row:
    """The row of a tensor that repeats another one."""
    return Row(name, reason=f"{of} again", rebuild=lambda made: made[of].clone(), optional=True)


def families(
    types: tuple[str, ...], config_from: Callable[..., TextConfig], rows: Callable[..., list[Row]],
    tokenizer: Callable[[Path | None, dict[str, Any]], Tokenizer | None],
) -> tuple[Family, Family]:  # fmt: skip
    """Of models with heads, whose names begin with the first of `types`, and of encoders alone, whose names do not.

    `config_from` and `rows` get that `prefix` too. What many models name alike is told apart by config.json."""

    def made(name: str, prefix: str, unnamed: str | None) -> Family:
        def recognises(tensors: Tensors, config: dict[str, Any]) -> bool:
            return prefix + WORD in tensors and config.get("model_type", unnamed) in types

        parts = (partial(function, prefix=prefix) for function in (config_from, rows))
        return Family(name, TextTransformer, recognises, *parts, tokenizer, card=sentence_card)

    return made(types[0], f"{types[0]}.", types[0]), made(f"{types[0]}-model", "", None)


def tokenizer(folder: Path | None, size: int, bos: Any, eos: Any, context: int) -> Tokenizer | None:
    """BERT's vocabulary where tokenizer_config.json says so; None for another. Raises CheckpointError when it does
    not go with the model."""
    if folder is None or not (folder / "tokenizer_config.json").exists():
        return None
    kind = str(read_json(folder / "tokenizer_config.json").get("tokenizer_class"))
    if kind.removesuffix("Fast") != "BertTokenizer":
        return None
    return WordPieceTokenizer.from_bert(folder, size, bos, eos, context)


def encoder_tokenizer(
    folder: Path | None, config: dict[str, Any], defaults: dict[str, Any], first: int = 0
) -> Tokenizer | None:
    """Of a folder as Hugging Face's; BERT's vocabulary alone has no file that says so. `first`: of the positions."""
    sizes = SIZES | defaults | config
    size, context = sizes["vocab_size"], sizes["max_position_embeddings"] - first
    if folder is None:
        return None
    context = sentence_length(folder, context)
    if (folder / "vocab.txt").exists() and not (folder / "tokenizer.json").exists():
        return WordPieceTokenizer.from_bert(folder, size, "[CLS]", "[SEP]", context)
    return hub_tokenizer(folder, config, size, context)
