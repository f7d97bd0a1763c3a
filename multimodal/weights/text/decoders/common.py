"""Families of decoders in transformers' names: one description gives a family of language models, and one of decoders
alone, such as embedding models, whose names lack the prefix."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import LayerPattern, PositionConfig, TextConfig
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.any.chat import chat_format
from multimodal.weights.family import Family
from multimodal.weights.folder import MOST_LAYERS
from multimodal.weights.table import NameRow, Op, Tensors, joined, linears, qkv, repeat, under, weight_and_bias
from multimodal.weights.text import bert
from multimodal.weights.text.sentence import lowers, sentence_length

KINDS = ("full_attention", "sliding_attention")
ENDS = {"embed_tokens": "embed", "norm": "stack.norm"}
SELF = {f"self_attn.{part}_proj": f"attention.{ours}" for part, ours in
        (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))}  # fmt: skip
GATED = {f"mlp.{part}_proj": f"feed.{part}" for part in ("gate", "up", "down")}
NORMS = {"input_layernorm": "attention_branch.norm", "post_attention_layernorm": "feed_branch.norm"}
LLAMA = SELF | GATED | NORMS


class DecoderSpec(NamedTuple):
    """`types`: of its configurations. `config_from`: our configuration without `tied`. `names`: of a layer's linear
    maps and norms; parts that a model lacks, such as biases, have no row. `fused`: rows of a layer's maps that hold
    several of ours. `ends`: names outside of the layers. `base`: prefix of all names but the head's. `first`: a tensor
    of each layer that tells the family. `only`: options of which only these values, the first by default, are
    supported. `others`: rows outside of the layers. `bare`: prefix without a head. `unread`: tensors of a layer that
    follow from the configuration."""

    types: tuple[str, ...]
    config_from: Callable[[dict[str, Any]], TextConfig]
    names: dict[str, str]
    defaults: dict[str, Any]
    fused: Callable[[TextConfig], list[NameRow]] = lambda config: []
    ends: dict[str, str] = ENDS
    base: str = "model."
    layer: str = "layers.{}."
    head: str = "lm_head"
    first: str = "self_attn.q_proj.weight"
    only: dict[str, tuple[Any, ...]] = {}  # noqa: RUF012
    unread: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    others: tuple[NameRow, ...] = ()
    bare: str = ""

    @property
    def embedding(self) -> str:
        return next(foreign for foreign, ours in self.ends.items() if ours == "embed") + ".weight"


def families(spec: DecoderSpec, **parts: Any) -> tuple[Family, Family]:
    """`parts`: further fields of both."""

    def made(name: str, base: str) -> Family:
        own = Family(
            name, TextTransformer, (base + spec.embedding, base + spec.layer.replace("{}", "0") + spec.first),
            lambda text, tensors: config_of(spec, text, tensors, base), lambda config: rows_of(spec, config, base),
            tokenizer, needs="config.json", defaults=spec.defaults | {"model_type": spec.types[0]}, types=spec.types,
            chat=chat_format,
        )  # fmt: skip
        return replace(own, **parts)

    return made(spec.types[0], spec.base), made(f"{spec.types[0]}-model", spec.bare)


def config_of(spec: DecoderSpec, text: dict[str, Any], tensors: Tensors, base: str) -> TextConfig:
    """Raises CheckpointError for unsupported options, by name and value."""
    for key, values in spec.only.items():
        if (value := text.get(key, values[0])) not in values:
            raise CheckpointError(f"config.json: {key} {value!r:.80} is not supported")
    head, tie = f"{spec.head}.weight", bool(text["tie_word_embeddings"])
    config = directed(spec.config_from(text), text)
    if base == spec.bare and head not in tensors:
        alone = not any(str(name).endswith("ForCausalLM") for name in text.get("architectures") or ()) or not tie
        return replace(config, tied=None if alone else True)
    if tie and not bert.same(tensors, head, base + spec.embedding, absent=True):
        raise CheckpointError(f"tensor {head!r} differs from the embedding it should repeat")
    if not tie and config.logit_scale != 1:
        raise CheckpointError("config.json: tie_word_embeddings False with a factor of logits is not supported")
    return replace(config, tied=tie)


def rows_of(spec: DecoderSpec, config: TextConfig, base: str) -> list[NameRow]:
    layer = [*linears(spec.names), *spec.fused(config)]
    unread = [NameRow(spec.layer + name, reason="follows from config.json", optional=True) for name in spec.unread]
    body = [*linears(spec.ends), *spec.others, *under(spec.layer, "stack.blocks.{}.", layer)]
    own = bert.names_of(config)
    rows = under(base, "", [row for row in body if all(target in own for target in row.targets)])
    rows += [replace(row, foreign=base + row.foreign) for row in unread]
    if config.tied and base == spec.bare:
        return rows
    head = f"{spec.head}.weight"
    heads = {None: [], True: [repeat(head, base + spec.embedding)], False: weight_and_bias(spec.head, "head")}
    return rows + [row for row in heads[config.tied] if row.reason or row.targets[0] in own]


def fused_qkv(foreign: str, groups: int, queries: int, keys: int, width: int) -> list[NameRow]:
    """Rows of one map that holds `groups` of so many queries, keys and values, each of this `width`."""

    def load(fused: torch.Tensor) -> list[torch.Tensor]:
        parts = fused.unflatten(0, (groups, queries + 2 * keys, width)).split((queries, keys, keys), 1)
        return [part.flatten(0, 2) for part in parts]

    def export(ours: list[torch.Tensor]) -> torch.Tensor:
        return joined([part.unflatten(0, (groups, -1, width)) for part in ours], 1).flatten(0, 2)

    return weight_and_bias(foreign, qkv("attention"), Op(load, export))


def windowed(
    config: TextConfig, text: dict[str, Any], slides: Callable[[int], bool], local: PositionConfig | None = None
) -> TextConfig:
    """With `sliding_window` in the layers that `layer_types` says, or else in those that `slides`; these may have
    positions of their own. Raises CheckpointError for unknown kinds of layers."""
    layers, kinds, window = config.stack.layers, text.get("layer_types"), text.get("sliding_window")
    if layers > MOST_LAYERS:
        raise CheckpointError(f"layers: {layers}, more than {MOST_LAYERS}")
    if kinds is None:
        kinds = [KINDS[bool(slides(layer))] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= set(KINDS):
        raise CheckpointError(f"config.json: layer_types {kinds!r:.80}: expected {layers} of {' or '.join(KINDS)}")
    own = tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[1])
    if not own or (window is None and local is None):
        return config
    if window is not None and (type(window) is not int or window < 1):
        raise CheckpointError(f"config.json: sliding_window {window!r} is not a number of tokens")
    if len(own) == layers and local is None:
        return replace(config, window=window)
    return replace(config, pattern=LayerPattern(own, window, local or config.positions))


def directed(config: TextConfig, text: dict[str, Any]) -> TextConfig:
    """In both directions where `is_causal` is false, as in transformers from 5.2 on. Raises CheckpointError beside a
    window, which would have another width, and beside ALiBi, which would grow towards later keys."""
    if text.get("is_causal") is not False:
        return config
    if config.positions.kind == "alibi":
        raise CheckpointError("config.json: is_causal False with ALiBi is not supported")
    if window := config.window or (config.pattern and config.pattern.window):
        raise CheckpointError(f"config.json: is_causal False with a window of {window} tokens is not supported")
    return replace(config, causal=False)


def changed(config: TextConfig, block: dict[str, Any] | None = None, **attention: Any) -> TextConfig:
    """With other options of the blocks and their attention."""
    own = config.stack.block
    own = replace(own, attention=replace(own.attention, **attention), **block or {})
    return replace(config, stack=replace(config.stack, block=own))


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    if folder is None:
        return None
    length = sentence_length(folder, config["max_position_embeddings"])
    # a model that reads in both directions gets an eos only if its tokenizer adds one
    named_end = config.get("is_causal") is not False
    return hub_tokenizer(folder, config, context=length, lowercase=lowers(folder), named_end=named_end)
