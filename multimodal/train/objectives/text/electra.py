"""ELECTRA (Clark et al. 2020): a small generator replaces masked tokens, and the model tells which were replaced."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.masks import padding
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.train.device import moved
from multimodal.train.losses import detection_loss
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.masked import EncoderSettings, MaskedBatch, bert, encode


class Electra(nn.Module):
    """Both models, with one table each of tokens, positions and segments (section 3.2). The discriminator is what
    training is for."""

    def __init__(self, generator: TextConfig, discriminator: TextConfig):
        super().__init__()
        self.discriminator, self.generator = TextTransformer(discriminator), TextTransformer(generator)
        for name in ("embed", "positions", "segments"):
            setattr(self.generator, name, getattr(self.discriminator, name))


def electra(vocabulary: int, s: EncoderSettings, share: float) -> Electra:
    """A generator of `share` times the width, whose embeddings a linear map narrows; its heads are as wide."""
    heads = max(1, round(share * s.heads))
    small = bert(vocabulary, replace(s, width=heads * (s.width // s.heads), heads=heads))
    large = replace(bert(vocabulary, s), tied=None, transform=False, head_bias=False, detect=True)
    return Electra(replace(small, embed_width=s.width), large)


class Replaced(NamedTuple):
    generator: Float[Tensor, "N V"]  # logits of the tokens to guess
    detector: Float[Tensor, "B T"]  # logit of having been replaced
    replaced: Bool[Tensor, "B T"]


def drawn(logits: Float[Tensor, "N V"], draws: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Tokens sampled from the softmax by its distribution function at `draws`, so that what is drawn depends on the
    item alone, whatever the micro-batch."""
    sums = logits.detach().double().softmax(-1).cumsum(-1)
    found = torch.searchsorted(sums, draws.to(sums)[:, None] * sums[:, -1:], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)


def run(model: Electra, batch: MaskedBatch) -> Replaced:
    states = encode(model.generator, batch, batch.ids)
    logits = model.generator.logits(states[batch.chosen][None])[0]
    ids, replaced = batch.ids.clone(), torch.zeros_like(batch.chosen)
    found = drawn(logits, batch.draws)
    ids[batch.chosen] = found
    replaced[batch.chosen] = found != batch.targets  # a token that was guessed right is none
    return Replaced(logits, model.discriminator.detect(encode(model.discriminator, batch, ids)), replaced)


class ReplacedTokens(Summed):
    """Cross-entropy of the generator a masked token, and `detect` times the discriminator's a token (section 2)."""

    def __init__(self, model: Electra, detect: float = 50.0):
        super().__init__(model)
        self.weights: Mapping[str, float] = {"masked": 1.0, "detect": detect}

    def forward(self, batch: MaskedBatch) -> dict[str, Tensor]:
        found, real = run(self.model, batch), padding(batch.lengths, batch.ids.shape[1])
        return {
            "masked": F.cross_entropy(found.generator.float(), batch.targets, reduction="sum"),
            "detect": detection_loss(found.detector, found.replaced, real, reduction="sum"),
        }

    def counts(self, batch: MaskedBatch) -> dict[str, int | Tensor]:
        return {"masked": len(batch.targets), "detect": batch.lengths.sum()}


@torch.inference_mode()
def detection_figures(model: Electra, batches: Sequence[MaskedBatch]) -> dict[str, float]:
    """The generator's cross-entropy (nats), and of the discriminator F1 of replaced tokens at even odds, the area under
    the ROC curve, and the share of replaced tokens, which is the precision of calling all so."""
    from sklearn.metrics import f1_score, roc_auc_score

    loss, logits, replaced = 0.0, [], []
    for batch in moved(list(batches), next(model.parameters()).device):
        found, real = run(model, batch), padding(batch.lengths, batch.ids.shape[1])
        loss += float(F.cross_entropy(found.generator.float(), batch.targets, reduction="sum"))
        logits.append(found.detector[real].float().cpu())
        replaced.append(found.replaced[real].cpu())
    scores, wanted = torch.cat(logits).numpy(), torch.cat(replaced).numpy()
    auc = float(roc_auc_score(wanted, scores)) if 0 < wanted.sum() < len(wanted) else 0.5
    return {
        "masked": loss / sum(len(b.targets) for b in batches),
        "f1": float(f1_score(wanted, scores > 0, zero_division=0.0)), "auc": auc, "replaced": float(wanted.mean()),
    }  # fmt: skip
