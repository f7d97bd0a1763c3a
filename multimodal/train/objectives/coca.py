"""Training CoCa (Yu et al. 2022): its batches, its objective, and a CoCa made of a CLIP."""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.data.datasets.captions import Example
from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa, CoCaConfig
from multimodal.train.objective import Engine
from multimodal.train.objectives.captioning import DecoderSettings
from multimodal.train.objectives.contrastive import Contrastive, Pairs, wide
from multimodal.weights.folder import Checkpoint


@dataclasses.dataclass(frozen=True)
class Collate:
    """Pictures and their captions, bos .. eos. Pictures whose captions are the same text fit each other's."""

    pad_id: int

    def __call__(self, examples: list[Example]) -> Pairs:
        ids = [torch.tensor(example.ids) for example in examples]
        texts = torch.tensor([zlib.crc32(repr(example.ids).encode()) for example in examples])  # the same everywhere
        return Pairs(
            torch.stack([example.pixels for example in examples]),
            nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad_id),
            nn.utils.rnn.pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in ids], batch_first=True),
            texts, texts,
        )  # fmt: skip


class ContrastiveCaptioning(Contrastive):
    """`contrast` times the contrastive loss over all pictures and texts of a step, plus `captions` times the mean
    cross-entropy of a caption's next token over all tokens of the step (equation 4; section 4.1 has 1 and 2, as
    open_clip). `smoothing`: of the labels of the latter. Both are functions of the step's pairs alone, so accumulation
    is exact."""

    def __init__(self, model: CoCa, smoothing: float = 0.0, contrast: float = 1.0, captions: float = 2.0):
        super().__init__(model)
        self.smoothing, self.weights = smoothing, (contrast, captions)

    def forward(self, batch: Pairs) -> tuple[Tensor, ...]:
        """As `Contrastive.forward`, with the sum of the losses of all tokens [1] behind the features."""
        images, texts, logits = self.model.outputs(batch.images, batch.ids)
        real = batch.valid[:, 1:]
        chosen, wanted = wide(logits[:, :-1][real]), batch.ids[:, 1:][real]
        losses = F.cross_entropy(chosen, wanted, reduction="sum", label_smoothing=self.smoothing)
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
    """A CoCa with the towers of `start`, whose weights are copied, final norms too: the pooler's norm of its tokens is
    the image tower's. The pooler, the class token of texts and the decoder, which is as wide as the text tower, are
    new. Raises CheckpointError for a text tower that sees what comes."""
    config = start.config
    if not config.text.causal:
        raise CheckpointError("the text tower is not causal, so that it cannot write captions")
    block = dataclasses.replace(config.text.stack.block, dropout=s.dropout)
    text = dataclasses.replace(config.text.stack, block=block, final_norm=False)
    cross = dataclasses.replace(block.attention, source_width=config.embed)
    decoder = dataclasses.replace(block, cross=cross, cross_block=True)
    image = dataclasses.replace(config.image.stack, final_norm=False, drop_path=s.drop_path)
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
    """All weights that have a place: not a pooler of the CLIP's own, nor a projection from another width."""
    places = model.state_dict()
    for name, weights in start.state_dict().items():
        prefix = next((prefix for prefix in MOVED if name.startswith(prefix)), "")
        name = MOVED.get(prefix, "") + name.removeprefix(prefix)
        if name in places and places[name].shape == weights.shape:
            places[name].copy_(weights)


def begin(known: Checkpoint, s: DecoderSettings) -> Checkpoint:
    """What training begins with: a CoCa as it is, or `coca` with the vocabulary of a CLIP.

    Raises CheckpointError for another model, or where tokenizer or preprocessing are not known."""
    if known.preprocessing is None or known.tokenizer is None:
        what = "preprocessing" if known.preprocessing is None else "tokenizer"
        raise CheckpointError(f"{known.source}: its {what} is not known")
    if not isinstance(known.model, CLIP):
        raise CheckpointError(f"{known.source}: is a {known.kind}; a CoCa is made of a clip")
    if isinstance(known.model, CoCa):
        return known
    if known.tokenizer.bos_id is None or known.tokenizer.eos_id is None:
        raise CheckpointError(f"{known.source}: its vocabulary has no token for begin or end of a text")
    try:
        model = coca(known.model, known.tokenizer.pad_id, s)
    except CheckpointError as error:
        raise CheckpointError(f"{known.source}: {error}") from None
    return dataclasses.replace(known, model=model)
