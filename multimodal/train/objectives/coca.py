"""CoCa training (Yu et al. 2022): batches, objective, and a CoCa built from a CLIP."""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.data.batching import pad_text
from multimodal.data.datasets.captions import CaptionAugmentSettings, CaptionExample, augmented, stacked_images
from multimodal.data.loader import Deferred
from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa, CoCaConfig
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.train.lora import keep_sizes, with_rates
from multimodal.train.losses import selected
from multimodal.train.objective import Engine
from multimodal.train.objectives.captioning import DecoderSettings
from multimodal.train.objectives.contrastive import Contrastive, Pairs, wide
from multimodal.weights.folder import Checkpoint


@dataclasses.dataclass(frozen=True)
class CollateCoCa:
    """Collates images with captions from bos to eos. Images with the same caption match each other's."""

    pad_id: int
    record: Preprocessing
    settings: CaptionAugmentSettings

    def __call__(self, examples: list[CaptionExample]) -> Deferred:
        text = pad_text([example.ids for example in examples], self.pad_id, multiple=1)
        texts = torch.tensor([zlib.crc32(repr(example.ids).encode()) for example in examples])  # equal in all processes
        images, draws = stacked_images([example.image for example in examples]), [example.draws for example in examples]
        return Deferred(partial(_paired, self), (*images, torch.stack(draws), text.ids, text.valid, texts))


def _paired(
    c: CollateCoCa, images: Tensor, sizes: Tensor, draws: Tensor, ids: Tensor, valid: Tensor, texts: Tensor
) -> Pairs:
    return Pairs(augmented(images, sizes, draws, c.record, c.settings), ids, valid, texts, texts)


class ContrastiveCaptioning(Contrastive):
    """`contrast` times the contrastive loss over all pairs of a step plus `captions` times the mean next-token
    cross-entropy over all its caption tokens (equation 4; 1 and 2 in section 4.1 and open_clip). `smoothing`: label
    smoothing of the latter. Accumulation is exact."""

    def __init__(self, model: CoCa, smoothing: float = 0.0, contrast: float = 1.0, captions: float = 2.0):
        super().__init__(model)
        self.smoothing, self.weights = smoothing, (contrast, captions)

    def forward(self, batch: Pairs) -> tuple[Tensor, ...]:
        """Return the outputs of `Contrastive.forward` with the summed token loss [1] after the features."""
        images, texts, logits = self.model.outputs(batch.images, batch.ids)
        real = batch.valid[:, 1:]
        wanted, chosen = selected(real, batch.ids[:, 1:], logits[:, :-1])
        losses = F.cross_entropy(wide(chosen), wanted, reduction="sum", label_smoothing=self.smoothing)
        return self._with_scalars(images, texts, losses[None])

    def backward(self, engine: Engine, batches: Sequence[Any]) -> dict[str, Tensor]:
        own = torch.stack([batch.valid[:, 1:].sum() for batch in batches]).sum()
        self.tokens = engine.total(own.float()).clamp(min=1)
        metrics = super().backward(engine, batches)
        return metrics | dict(zip(("contrast", "captions"), engine.total(self.terms), strict=True))

    def _loss(self, engine: Engine, batches: list[Pairs], images, texts, captions, scale, bias=None) -> Tensor:
        terms = super()._loss(engine, batches, images, texts, scale, bias), captions.sum() / self.tokens
        self.terms = torch.stack(terms).detach()
        return sum(weight * term for weight, term in zip(self.weights, terms, strict=True))


def coca(start: CLIP, pad_id: int, s: DecoderSettings) -> CoCa:
    """Build a CoCa from a copy of the towers of `start`. Final norms are copied too: the image tower's becomes the
    pooler's input norm. The pooler, the texts' class token and the decoder, as wide as the text tower, are new. Raises
    CheckpointError for a text tower that is not causal."""
    config = start.config
    if not config.text.causal:
        raise CheckpointError("expected a causal text tower")
    block = dataclasses.replace(config.text.stack.block, dropout=s.new_dropout)
    text = dataclasses.replace(config.text.stack, block=block, final_norm=False)
    cross = dataclasses.replace(block.attention, source_width=config.embed)
    decoder = dataclasses.replace(block, cross=cross, cross_block=True)
    image = dataclasses.replace(config.image.stack, final_norm=False, drop_path=s.drop_path or 0.0)
    known = vars(config) | {
        "image": dataclasses.replace(config.image, stack=image, pool="token", norm_after_pool=False),
        "text": dataclasses.replace(config.text, stack=text), "text_pool": "class", "text_valid": False,
    }  # fmt: skip
    stack = dataclasses.replace(text, block=decoder, layers=s.layers, final_norm=True)
    heads = math.gcd(config.embed, 8)
    model = CoCa(CoCaConfig(**known, decoder=stack, pad_id=pad_id, queries=s.queries, pool_heads=heads))
    _copy(start, model)
    return model


MOVED = {"image.stack.norm.": "image_pool.source_norm.", "image.norm.": "image_pool.source_norm.",
         "text.stack.norm.": "text_norm."}  # fmt: skip


def _copy(start: CLIP, model: CoCa) -> None:
    """Copy all weights of matching names and shapes: no pooler of the CLIP's, no projection from another width."""
    places = model.state_dict()
    for name, weights in start.state_dict().items():
        prefix = next((prefix for prefix in MOVED if name.startswith(prefix)), "")
        name = MOVED.get(prefix, "") + name.removeprefix(prefix)
        if name in places and places[name].shape == weights.shape:
            places[name].copy_(weights)


def begin(known: Checkpoint, s: DecoderSettings) -> Checkpoint:
    """Return the checkpoint to train: a CoCa as it is, or `coca` of a CLIP with its tokenizer.

    Raises CheckpointError for another model, or one without tokenizer or preprocessing."""
    if known.preprocessing is None or known.tokenizer is None:
        what = "preprocessing" if known.preprocessing is None else "tokenizer"
        raise CheckpointError(f"{known.source}: checkpoint has no {what}")
    if not isinstance(known.model, CLIP):
        raise CheckpointError(f"{known.source}: expected a CLIP model, got {known.kind}")
    if isinstance(known.model, CoCa):
        config = known.model.config
        keep_sizes(known.source, {"layers": config.decoder.layers, "queries": config.queries}, s, DecoderSettings)
        rates = {"text.stack.block.dropout": s.dropout, "decoder.block.dropout": s.dropout}
        return dataclasses.replace(known, model=with_rates(known.model, rates | {"image.stack.drop_path": s.drop_path}))
    if known.tokenizer.bos_id is None or known.tokenizer.eos_id is None:
        raise CheckpointError(f"{known.source}: its tokenizer has no bos or eos token")
    try:
        model = coca(known.model, known.tokenizer.pad_id, s)
    except CheckpointError as error:
        raise CheckpointError(f"{known.source}: {error}") from None
    return dataclasses.replace(known, model=model)
