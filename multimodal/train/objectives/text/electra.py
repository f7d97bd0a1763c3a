"""ELECTRA (Clark et al. 2020): a small generator replaces masked tokens, a discriminator detects the replacements."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.train.device import moved
from multimodal.train.losses import detection_loss
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.masked import EncoderSettings, MaskedBatch, bert, encode


class Electra(nn.Module):
    """Generator and discriminator with shared embeddings (section 3.2). Training is for the discriminator."""

    def __init__(self, generator: TextConfig, discriminator: TextConfig):
        super().__init__()
        self.discriminator, self.generator = TextTransformer(discriminator), TextTransformer(generator)
        for name in ("embed", "positions", "segments"):
            setattr(self.generator, name, getattr(self.discriminator, name))


def electra(vocabulary: int, s: EncoderSettings, share: float) -> Electra:
    """Build an Electra whose generator has `share` of the width, heads of the same width and projected embeddings."""
    heads = max(1, round(share * s.heads))
    small = bert(vocabulary, replace(s, width=heads * (s.width // s.heads), heads=heads))
    large = replace(bert(vocabulary, s), tied=None, transform=False, head_bias=False, detect=True)
    return Electra(replace(small, embed_width=s.width), large)


class Replaced(NamedTuple):
    generator: Float[Tensor, "N V"]  # logits of the masked tokens
    detector: Float[Tensor, "B T"]  # logit of having been replaced
    replaced: Bool[Tensor, "B T"]


def drawn(logits: Float[Tensor, "N V"], draws: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Sample tokens by the softmax's inverse distribution function at `draws`, so that they depend on the item alone,
    not on the micro-batch."""
    sums = logits.detach().double().softmax(-1).cumsum(-1)
    result = torch.searchsorted(sums, draws.to(sums)[:, None] * sums[:, -1:], right=True)[:, 0]
    return result.clamp(max=logits.shape[-1] - 1)


def run(model: Electra, batch: MaskedBatch) -> Replaced:
    """The generator's guesses of masked tokens, and the discriminator's verdict on a draw of them."""
    states = encode(model.generator, batch, batch.ids)
    logits = model.generator.logits(states.flatten(0, 1)[batch.places][None])[0]
    ids, replaced = batch.ids.clone(), torch.zeros_like(batch.chosen)
    result = drawn(logits, batch.draws)
    ids.view(-1)[batch.places] = result
    replaced.view(-1)[batch.places] = result != batch.targets  # not if the generator was right
    return Replaced(logits, model.discriminator.detect(encode(model.discriminator, batch, ids)), replaced)


class ReplacedTokens(Summed):
    """The generator's loss per masked token plus `detect` times the discriminator's per token (section 2)."""

    def __init__(self, model: Electra, detect: float = 50.0):
        super().__init__(model)
        self.weights: Mapping[str, float] = {"masked": 1.0, "detect": detect}

    def forward(self, batch: MaskedBatch) -> dict[str, Tensor]:
        result, real = run(self.model, batch), batch.valid
        return {
            "masked": F.cross_entropy(result.generator.float(), batch.targets, reduction="sum"),
            "detect": detection_loss(result.detector, result.replaced, real),
        }

    def counts(self, batch: MaskedBatch) -> dict[str, int | Tensor]:
        return {"masked": len(batch.targets), "detect": batch.lengths.sum()}


@torch.inference_mode()
def detection_figures(model: Electra, batches: Sequence[MaskedBatch]) -> dict[str, float]:
    """Return the generator's cross-entropy (nats), the discriminator's F1 at probability 0.5 and area under the ROC
    curve, and the share of replaced tokens."""
    from sklearn.metrics import f1_score, roc_auc_score

    loss, logits, replaced = 0.0, [], []
    for batch in moved(list(batches), next(model.parameters()).device):
        result, real = run(model, batch), batch.valid
        loss += float(F.cross_entropy(result.generator.float(), batch.targets, reduction="sum"))
        logits.append(result.detector[real].float().cpu())
        replaced.append(result.replaced[real].cpu())
    scores, labels = torch.cat(logits).numpy(), torch.cat(replaced).numpy()
    auc = float(roc_auc_score(labels, scores)) if 0 < labels.sum() < len(labels) else 0.5
    return {
        "masked": loss / sum(len(b.targets) for b in batches),
        "f1": float(f1_score(labels, scores > 0, zero_division=0.0)), "auc": auc, "replaced": float(labels.mean()),
    }  # fmt: skip
