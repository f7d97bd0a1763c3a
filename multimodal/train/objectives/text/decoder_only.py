"""Text to text by a decoder alone (Raffel et al. 2020, section 3.2): the source, then the answer, in one row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.batching import pad_rows
from multimodal.data.datasets.text import IGNORED, TokenBatch
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.tasks.evaluate.perplexity import mask_of
from multimodal.train.objectives.text.denoising import SizeSettings, encoder_decoder
from multimodal.train.objectives.text.translation import Pair


def decoder_only(vocabulary: int, start_id: int, s: SizeSettings) -> TextTransformer:
    """Build T5's decoder without cross-attention, with its initial weights: `decoder_layers` of the size."""
    whole = encoder_decoder(vocabulary, "t5", start_id, s).decoder
    stack = replace(whole.config.stack, block=replace(whole.config.stack.block, cross=None))
    model = TextTransformer(replace(whole.config, stack=stack))
    weights = whole.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def share_parameters(model: EncoderDecoder) -> EncoderDecoder:
    """Give the decoder's blocks the encoder's self-attention and feed-forward (T5's "enc-dec, shared")."""
    for own, other in zip(model.decoder.stack.blocks, model.encoder.stack.blocks, strict=True):
        for part in ("attention", "attention_branch", "feed", "feed_branch"):
            setattr(own, part, getattr(other, part))
    return model


@dataclass(frozen=True)
class JoinPairs:
    """Collate pairs as rows of a decoder. `prefix`: all see the source; `whole`: the source is predicted too."""

    pad_id: int
    prefix: bool = False
    whole: bool = False

    def __call__(self, pairs: Sequence[Pair]) -> TokenBatch:
        rows = [[*pair.source, *pair.answer] for pair in pairs]
        ids, targets = (pad_rows([part(row) for row in rows], fill) for part, fill in (
            (lambda row: row[:-1], self.pad_id), (lambda row: row[1:], IGNORED),
        ))  # fmt: skip
        places = torch.arange(ids.shape[1])
        sizes = torch.tensor([len(pair.source) for pair in pairs])[:, None]
        if not self.whole:
            targets = targets.masked_fill(places < sizes, IGNORED)
        return TokenBatch(ids, targets, given=places < sizes if self.prefix else None)


def joined_logits(model: TextTransformer, batch: TokenBatch) -> tuple[Float[Tensor, "N V"], Int[Tensor, "N"]]:
    """Return the logits and targets of all predicted tokens, row by row."""
    states, wanted = model.states(batch.ids, mask=mask_of(batch)), batch.targets != IGNORED
    return model.logits(states[wanted][None])[0].float(), batch.targets[wanted]
