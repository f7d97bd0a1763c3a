"""Language models: the objective of causal and prefix LM, and their initialization."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.experts import balance_loss, router_logits
from multimodal.data.datasets.text import IGNORED, TokenBatch
from multimodal.models.text import TextTransformer
from multimodal.tasks.evaluate.perplexity import mask_of
from multimodal.train.losses import selected, vocabulary_loss
from multimodal.train.objective import Summed


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
def gpt2_weights(model: TextTransformer, std: float = 0.02) -> None:
    """Initialize as GPT-2 (Radford et al. 2019, section 2.3; openai/gpt-2): matrices and embeddings from N(0, std²),
    output projections of residual branches from N(0, std²/(2·layers)), biases 0. Norms stay."""
    layers = model.config.stack.layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.endswith((".attention.out", ".feed.down")) or (".experts." in name and name.endswith(".down"))
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * layers) if last else std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    if model.positions is not None:
        nn.init.normal_(model.positions, std=std / 2)
