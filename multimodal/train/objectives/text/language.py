"""Language models: the objective of causal and prefix LM, the configuration of a new model and its initialization."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.experts import ExpertsConfig, balance_loss, router_logits
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.data.datasets.text import IGNORED, TokenBatch
from multimodal.errors import UsageError, demand, multiple_of
from multimodal.models.presets import preset
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.system.options import Limits, Natural, Positive, Rate, check_limits
from multimodal.tasks.evaluate.perplexity import mask_of
from multimodal.train.losses import selected, vocabulary_loss
from multimodal.train.objective import Summed

SHAW = 16  # clipping distance of Shaw et al. 2018, table 1


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


def loss_of_states(
    model: TextTransformer, states: Float[Tensor, "N D"], targets: Int[Tensor, "N"], chunk: int = 4096,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:  # fmt: skip
    """`vocabulary_loss` of `model.logits(states)`."""
    last = (model.embed.weight, model.tied_bias) if model.head is None else (model.head.weight, model.head.bias)
    states = model.before_logits(states[None])[0]
    return vocabulary_loss(states, *last, targets, chunk, smoothing, model.config.logit_cap)


def guesses_loss(model: TextTransformer, batch: TokenBatch, chunk: int = 4096) -> Float[Tensor, ""]:
    """Summed cross-entropy over all targets, computed in chunks of logits."""
    states = model.states(batch.ids, mask=mask_of(batch, model.config.window), positions=batch.places)
    targets, states = selected(batch.targets != IGNORED, batch.targets, states)
    return loss_of_states(model, states, targets, chunk)


class Language(Summed):
    """Next-token cross-entropy. A mixture of experts adds `balance` times its load-balancing loss, which each
    micro-batch of each process has for itself (Fedus et al. 2022, section 2.2)."""

    def __init__(self, model: TextTransformer, chunk: int = 4096, balance: float = 0.01):
        super().__init__(model)
        self.chunk, self.experts = chunk, model.config.stack.block.experts
        if self.experts is not None:
            self.weights = {"loss": 1.0, "balance": balance}
            self.partly = True  # an expert without tokens has no gradient

    def forward(self, batch: TokenBatch) -> dict[str, Tensor]:
        if self.experts is None:
            return {"loss": guesses_loss(self.model, batch, self.chunk)}
        with router_logits() as logits:
            loss = guesses_loss(self.model, batch, self.chunk)
        real = None if batch.documents is None else batch.documents.flatten() >= 0
        return {"loss": loss, "balance": balance_loss(logits, self.experts.top, real) * batch.ids.numel()}

    def counts(self, batch: TokenBatch) -> dict[str, int | Tensor]:
        found: dict[str, int | Tensor] = {"loss": (batch.targets != IGNORED).sum()}
        return found if self.experts is None else found | {"balance": batch.ids.numel()}


@torch.no_grad()
def gpt2_weights(model: TextTransformer) -> None:
    """Initialize as GPT-2 (Radford et al. 2019, section 2.3; openai/gpt-2): matrices and embeddings from N(0, 0.02²),
    output projections of residual branches from N(0, 0.02²/(2·layers)), biases 0. Norms stay."""
    std, layers = 0.02, model.config.stack.layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.endswith((".attention.out", ".feed.down")) or (".experts." in name and name.endswith(".down"))
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * layers) if last else std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    if model.positions is not None:
        nn.init.normal_(model.positions, std=std / 2)
