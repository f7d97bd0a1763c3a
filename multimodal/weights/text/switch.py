"""Switch Transformer (Fedus et al. 2022) in transformers' names: T5 whose every second block, or so, has experts, of
which each token uses one.

Traps: the distance of these blocks follows from `num_sparse_encoder_layers`, whatever `encoder_sparse_step` says. An
expert's output is multiplied by its probability. Tokens beyond `expert_capacity` of a text get 0 from the experts; with
a cache each step counts for itself."""

from dataclasses import replace
from typing import Any

from multimodal.blocks.experts import ExpertsConfig
from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoderConfig
from multimodal.models.text_config import TextConfig
from multimodal.weights.table import NameRow, Tensors, under
from multimodal.weights.text import t5, umt5
from multimodal.weights.text.decoders import mixtral

# SwitchTransformersConfig's defaults that differ from T5's
DEFAULTS = t5.T5 | {"d_model": 768, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "num_experts": 8,
                    "expert_capacity": 64, "num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 3,
                    "router_bias": False, "router_dtype": "float32"}  # fmt: skip
PARTS = {"wi": "up", "wo": "down"}


def _with_experts(c: dict[str, Any], side: str, tower: TextConfig) -> TextConfig:
    count, capacity, sparse = c["num_experts"], c["expert_capacity"], c[f"num_sparse_{side}_layers"]
    layers = tower.stack.layers
    for key, value, most in (
        ("num_experts", count, mixtral.MOST),
        ("expert_capacity", capacity, None),
        (f"num_sparse_{side}_layers", sparse, layers),
    ):
        if type(value) is not int or not 1 <= value <= (most or value):
            raise CheckpointError(f"config.json: {key} must be 1 to {most or 'any number'} (got {value!r})")
    experts = ExpertsConfig(count, 1, normalized=False, capacity=capacity, every=layers // sparse)
    return replace(tower, stack=replace(tower.stack, block=replace(tower.stack.block, experts=experts)))


def config_from(c: dict[str, Any], tensors: Tensors) -> EncoderDecoderConfig:
    """Raises CheckpointError as T5's does, and for a router with a bias or another type, which no release has."""
    if c["router_bias"] is not False or c["router_dtype"] != "float32":
        raise CheckpointError(
            f"config.json: router_bias {c['router_bias']!r}, router_dtype {c['router_dtype']!r} is not supported"
        )
    made = t5.config_from(c, tensors)
    return replace(made, **{side: _with_experts(c, side, getattr(made, side)) for side in ("encoder", "decoder")})


def rows(config: EncoderDecoderConfig) -> list[NameRow]:
    made = [replace(row, foreign=row.foreign.replace("DenseReluDense", "mlp")) for row in t5.rows(config)]
    for side, layer in (("encoder", 1), ("decoder", 2)):
        prefix = f"{side}.block.{{}}.layer.{layer}.mlp."
        experts = getattr(config, side).stack.block.experts
        if experts.every == 1:  # no block has one feed-forward
            made = [row for row in made if not row.foreign.startswith(prefix)]
        sparse = [
            NameRow(f"experts.expert_{number}.{theirs}.weight", f"experts.{number}.{own}.weight")
            for number in range(experts.count)
            for theirs, own in PARTS.items()
        ]
        router = NameRow("router.classifier.weight", "router.weight")
        made += under(prefix, f"{side}.stack.blocks.{{}}.feed.", [router, *sparse])
    return made


FAMILY = replace(
    t5.FAMILY, name="switch", config_from=config_from, rows=rows, complete=umt5.complete,
    defaults=DEFAULTS, types=("switch_transformers",),
)  # fmt: skip
