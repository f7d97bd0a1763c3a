"""Settings and configuration of a new language model."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.experts import ExpertsConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import UsageError, demand, multiple_of
from multimodal.models.presets import preset
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.system.options import Limits, Natural, Positive, Rate, check_limits


@dataclass(frozen=True)
class LanguageModelSettings:
    """Architecture of the model; with --preset only --context and the dropouts apply."""

    preset: str = ""  # such as gpt2
    width: Positive = 256
    layers: Positive = 6
    heads: Positive = 4
    kv_heads: Natural = 0  # 0: as many as heads; 1: multi-query
    hidden: Natural = 0  # 0: four widths, or 8/3 if gated
    context: Annotated[int, Limits(2)] = 256  # tokens
    positions: Literal["learned", "sinusoidal", "rotary", "bucket", "alibi", "shaw", "none"] = "rotary"
    norm: Literal["layer", "rms"] = "layer"
    post_norm: bool = False
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    gated: bool = False  # gated feed-forward (with silu: SwiGLU)
    bias: bool = True
    tied: bool = True  # share embedding and output weights
    dropout: Rate = 0.0  # of embeddings, residual branches and inside the feed-forward
    attention_dropout: Rate = 0.0
    experts: Natural = 0  # feed-forwards per layer, of which each token uses `experts_per_token`; 0: one
    experts_per_token: int = 2

    def __post_init__(self):
        check_limits(self)
        demand("experts_per_token", self.experts_per_token, 1 <= self.experts_per_token <= (self.experts or 10**6),
               f"1 to {self.experts}, the number of experts")  # fmt: skip
        multiple_of("heads", self, "width")
        demand("kv_heads", self.kv_heads, not self.kv_heads or self.heads % self.kv_heads == 0,
               f"0 or a divisor of heads ({self.heads})")  # fmt: skip
        even = self.positions != "rotary" or self.width // self.heads % 2 == 0
        demand("heads", self.heads, even, f"so many that width {self.width} leaves each an even width, for rotary")


SHAW = 16  # clipping distance of Shaw et al. 2018, table 1


def language_config(s: LanguageModelSettings, vocabulary: int) -> TextConfig:
    """Configure a causal model. Raises UsageError for a preset of another model."""
    if s.preset:
        return _of_preset(s, vocabulary)
    shaw = SHAW if s.positions == "shaw" else 0
    attention = AttentionConfig(
        s.width, s.heads, s.kv_heads or None, bias=s.bias, shaw=shaw, dropout=s.attention_dropout
    )
    hidden = s.hidden or (-(-8 * s.width // 24) * 8 if s.gated else 4 * s.width)
    experts = ExpertsConfig(s.experts, s.experts_per_token) if s.experts else None
    block = BlockConfig(
        attention, hidden, s.activation, s.gated, s.norm, post_norm=s.post_norm, dropout=s.dropout, experts=experts
    )
    return TextConfig(
        vocabulary, s.context, StackConfig(block, s.layers, final_norm=not s.post_norm), causal=True, tied=s.tied,
        positions=PositionConfig("none" if shaw else s.positions), stem_dropout=s.dropout,
    )  # fmt: skip


def _of_preset(s: LanguageModelSettings, vocabulary: int) -> TextConfig:
    config = preset(s.preset)
    if not isinstance(config, TextConfig) or not config.causal or config.tied is None:
        raise UsageError(f"{s.preset}: expected a causal language model", argument="preset")
    block = config.stack.block
    attention = replace(block.attention, dropout=s.attention_dropout)
    stack = replace(config.stack, block=replace(block, attention=attention, dropout=s.dropout))
    return replace(config, vocabulary=vocabulary, context=s.context, stack=stack, stem_dropout=s.dropout)
