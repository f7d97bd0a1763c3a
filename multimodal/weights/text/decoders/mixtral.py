"""Mixtral in transformers' names (Jiang et al. 2024): Mistral with a mixture of experts in place of each feed-forward.

Traps: of an expert, `w1` is the gate, `w3` is up, `w2` is down; `gate` is the router."""

from dataclasses import replace
from typing import Any

from multimodal.blocks.experts import ExpertsConfig
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.weights.any.chat import chat_format
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, under
from multimodal.weights.text import llama
from multimodal.weights.text.decoders.common import tokenizer

# MixtralConfig's defaults that differ from Llama's
DEFAULTS = llama.DEFAULTS | {"num_key_value_heads": 8, "rope_theta": 1e6, "num_local_experts": 8,
                             "num_experts_per_tok": 2, "model_type": "mixtral", "rms_norm_eps": 1e-5,
                             "max_position_embeddings": 131072}  # fmt: skip
MOST = 1024  # experts
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def config_from(text: dict[str, Any], tensors: Tensors) -> TextConfig:
    """Raises CheckpointError as Llama's does, and for more experts a token than there are."""
    made = replace(llama.hf_config(text, tensors), window=text["sliding_window"])
    count, top = text["num_local_experts"], text["num_experts_per_tok"]
    if type(count) is not int or type(top) is not int or not 1 <= top <= count <= MOST:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {top!r} of num_local_experts {count!r} is not possible"
        )
    block = replace(made.stack.block, experts=ExpertsConfig(count, top))
    return replace(made, stack=replace(made.stack, block=block))


def rows(config: TextConfig) -> list[NameRow]:
    dense = [row for row in llama.hf_rows(config) if ".mlp." not in row.foreign]
    experts = [
        NameRow(f"experts.{number}.{theirs}.weight", f"experts.{number}.{own}.weight")
        for number in range(config.stack.block.experts.count)
        for theirs, own in PARTS.items()
    ]
    router = NameRow("gate.weight", "router.weight")
    return [*dense, *under("model.layers.{}.block_sparse_moe.", "stack.blocks.{}.feed.", [router, *experts])]


FAMILY = Family(
    "mixtral", TextTransformer,
    (llama.HUGGING_FACE[0], "model.layers.0.self_attn.q_proj.weight", "model.layers.0.block_sparse_moe.gate.weight"),
    config_from, rows, tokenizer, needs="config.json", defaults=DEFAULTS, types=("mixtral",),
    chat=chat_format,
)  # fmt: skip
