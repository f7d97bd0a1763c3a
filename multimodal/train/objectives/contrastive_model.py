"""Contrastive training of a small CLIP: its configuration, and batches of images and captions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from multimodal.blocks.stack import transformer
from multimodal.data.batching import stacked_batch
from multimodal.data.datasets.class_names import CaptionSampler
from multimodal.data.datasets.images import DRAWS, augment, softened
from multimodal.data.loader import Deferred
from multimodal.errors import demand
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.system.options import Natural, Positive, Rate
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.objectives.contrastive import Pairs

TEMPLATES = [
    "a photo of a {}.", "a picture of a {}.", "{}", "a {}", "a photo of the {}.", "a small photo of a {}.",
    "a blurry photo of a {}.", "a close-up of a {}.", "this is a {}.", "a photo of one {}.", "a good photo of a {}.",
]  # fmt: skip
ZERO_SHOT = ["a photo of a {}.", "a picture of a {}.", "{}", "a photo of the {}.", "a small photo of a {}."]
HEADS = {"width": 64, "text_width": 32}  # width of a head in the tower of that width


@dataclass(frozen=True)
class ContrastiveModelSettings:
    """Architecture of a new CLIP; with `--init` only `drop_path` applies."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    image: Positive = 96  # pixels per side
    patch: Positive = 16
    width: int = 192
    layers: Natural = 6
    drop_path: Rate | None = None  # of the image tower (Huang et al. 2016): by default 0, with --init as it has it
    text_width: int = 128
    text_layers: Natural = 3
    context: Positive = 32  # tokens of a caption
    vocabulary: Positive = 2048  # tokens, learned from the captions

    def __post_init__(self):
        for name, head in HEADS.items():
            value = getattr(self, name)
            demand(name, value, value > 0 and value % head == 0, f"a multiple of {head}, the width of its heads")


def build(s: ContrastiveModelSettings, tokenizer: Tokenizer) -> CLIP:
    image = transformer(s.width, s.layers, s.width // HEADS["width"], s.width * 4, drop_path=s.drop_path or 0.0)
    text = transformer(s.text_width, s.text_layers, s.text_width // HEADS["text_width"], s.text_width * 4)
    return CLIP(
        CLIPConfig(
            ViTConfig((s.image, s.image), s.patch, image, pool="mean", class_token=False),
            TextConfig(tokenizer.vocab_size, s.context, text, causal=True),
            embed=s.width, loss=s.loss, text_pool="eos", eos_id=tokenizer.eos_id,
        )
    )  # fmt: skip


class DrawnImage(NamedTuple):
    """A stored image with the random draws of its caption and augmentation."""

    pixels: Tensor  # uint8 [3 S S]
    concept: int
    term: int
    caption: str
    draws: Tensor  # [DRAWS]
    order: Tensor  # [N], the patches
    wrong: str | None = None  # a caption of no image


@torch.no_grad()
def with_image_size(model: CLIP, side: int) -> CLIP:
    """The same model for images of `side` by `side` pixels, with positions interpolated from its own."""
    image = replace(model.config.image, image=(side, side))
    made, weights = CLIP(replace(model.config, image=image)), model.state_dict()
    if "image.positions" in weights:
        weights["image.positions"] = model.image.grid_positions(image.grid)
    made.load_state_dict(weights)
    return made.train(model.training)


class PrepareContrastive:
    """Draws a caption and augmentation for (square, concept number) from the item's generator alone, and with `unseen`
    words a caption with one of them, which matches no image."""

    def __init__(self, captions: CaptionSampler, patches: int, unseen: Sequence[str] = ()):
        self.captions, self.patches, self.unseen = captions, patches, unseen

    def __call__(self, item: tuple[Tensor, int], random: torch.Generator) -> DrawnImage:
        pixels, concept = item
        term, caption = self.captions.draw(concept, random)
        draws, order = torch.rand(DRAWS, generator=random), torch.randperm(self.patches, generator=random)
        pick = lambda options: options[int(torch.randint(len(options), (), generator=random))]
        wrong = pick(self.captions.templates).format(pick(self.unseen)) if self.unseen else None
        return DrawnImage(pixels, concept, term, caption, draws, order, wrong)


class CollateContrastive:
    """Collates drawn images; the device augments those of each stored size as one batch."""

    def __init__(
        self, tokenizer: Tokenizer, context: int, record: Preprocessing, smallest: float, strength: float,
        coarse: float = 0.08,
    ):  # fmt: skip
        self.tokenizer, self.context, self.record = tokenizer, context, record
        self.smallest, self.strength, self.coarse = smallest, strength, coarse

    def __call__(self, items: Sequence[DrawnImage]) -> Deferred:
        items = sorted(items, key=lambda item: item.pixels.shape[-1])
        sides = sorted({item.pixels.shape[-1] for item in items})
        alike = [[item for item in items if item.pixels.shape[-1] == side] for side in sides]
        images = [stacked_batch([item.pixels for item in group]) for group in alike]
        draws = [torch.stack([item.draws for item in group]) for group in alike]
        soft = [softened(own, self.coarse) for own in draws]
        wrong = [item.wrong for item in items if item.wrong is not None]
        texts = self.tokenizer.batch([*(item.caption for item in items), *wrong], self.context, warn=False)
        concepts = torch.tensor([item.concept for item in items])
        terms = torch.tensor([*(item.term for item in items), *[-1] * len(wrong)])
        order = torch.stack([item.order for item in items])
        finish = partial(_augmented, record=self.record, smallest=self.smallest, strength=self.strength)
        return Deferred(finish, (images, draws, soft, (texts.ids, texts.mask, concepts, terms, order)))


def _augmented(
    images: list[Tensor], draws: list[Tensor], soft: list[Tensor], others: tuple[Tensor, ...], record: Preprocessing,
    smallest: float, strength: float,
) -> Pairs:  # fmt: skip
    groups = zip(images, draws, soft, strict=True)
    return Pairs(torch.cat([augment(*group, record, smallest, strength) for group in groups]), *others)
