"""Contrastive image-text model: CLIP (softmax, Radford et al. 2021) and SigLIP (sigmoid, Zhai et al. 2023)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vision.convnext import ConvNeXt, ConvNeXtConfig
from multimodal.models.vision.fastvit import FastViT, FastViTConfig
from multimodal.models.vision.resnet import ModifiedResNet, ResNetConfig
from multimodal.models.vit import ViT, ViTConfig

TOWERS: dict[type, type[nn.Module]] = {
    ViTConfig: ViT, ResNetConfig: ModifiedResNet, ConvNeXtConfig: ConvNeXt, FastViTConfig: FastViT,
}  # fmt: skip


@dataclass(frozen=True)
class CLIPConfig:
    """`embed`: width of the shared space. `loss`: `softmax` or `sigmoid` (with a logit bias).

    `text_pool`: `eos` (the first `eos_id` of a row), `first` (Chinese-CLIP) or `last` position (SigLIP),
    `class` (CoCa's class token).
    `text_valid`: mask padding in the text tower (SigLIP and CLIP do not). `image_project`, `text_project`: a linear map
    after pooling (SigLIP's image tower has none). `text_bias`, `image_bias`: the map has a bias (SigLIP's text,
    MobileCLIP's image). `image_hidden`: width of a layer with GELU before the image's map; 0: none."""

    image: ViTConfig | ResNetConfig | ConvNeXtConfig | FastViTConfig
    text: TextConfig
    embed: int
    loss: str
    text_pool: str
    eos_id: int = -1
    text_valid: bool = False
    image_project: bool = True
    text_bias: bool = False
    text_project: bool = True
    image_hidden: int = 0
    image_bias: bool = False

    def __post_init__(self) -> None:
        if self.text_pool == "last" and self.text_valid:
            raise ValueError("text_pool 'last' pools padding, which text_valid masks")
        unprojected = (
            ("image", self.image_project, self.image.pooled_width),
            ("text", self.text_project, self.text.width),
        )
        for part, projected, width in unprojected:
            if not projected and width != self.embed:
                raise ValueError(f"embed {self.embed}, where the {part} tower without a projection has {width}")


class CLIP(nn.Module):
    """Image and text towers with a shared embedding space."""

    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.config = config
        self.image, self.text = TOWERS[type(config.image)](config.image), TextTransformer(config.text)
        width, hidden = config.image.pooled_width, config.image_hidden
        self.image_hidden = nn.Linear(width, hidden) if hidden else None
        self.image_project = (
            nn.Linear(hidden or width, config.embed, bias=config.image_bias) if config.image_project else None
        )
        text_project = nn.Linear(config.text.width, config.embed, bias=config.text_bias)
        self.text_project = text_project if config.text_project else None
        sigmoid = config.loss == "sigmoid"
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0 if sigmoid else 1 / 0.07)))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if sigmoid else None

    def encode_image(
        self, images: Float[Tensor, "B 3 height width"] | Sequence[Float[Tensor, "3 _ _"]], keep: Tensor | None = None
    ) -> Float[Tensor, "B D"]:
        """Unit vectors of a batch of images, or of a sequence of images of different sizes."""
        return self.project_image(self.image(images, keep))

    def project_image(self, pooled: Float[Tensor, "B _"]) -> Float[Tensor, "B D"]:
        """Unit vectors from the image tower's pooled output."""
        pooled = pooled if self.image_hidden is None else F.gelu(self.image_hidden(pooled))
        return F.normalize(pooled if self.image_project is None else self.image_project(pooled), dim=-1)

    def encode_text(self, ids: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B D"]:
        """Unit vectors. With `text_pool` `eos`, a row without the end-of-text id raises ValueError; compiled and in
        training on a GPU, where the check would wait for the device, it becomes NaN."""
        unchecked = torch.compiler.is_compiling() or (ids.device.type != "cpu" and self.training)
        only = torch.full_like(ids[:, 0], 0 if self.config.text_pool == "first" else ids.shape[1] - 1)
        if self.config.text_pool == "eos":
            ends = ids == self.config.eos_id
            if not unchecked and not ends.any(1).all():
                raise ValueError(f"a text has no end-of-text id {self.config.eos_id}")
            only = ends.int().argmax(1)
        x = self.text.states(ids, valid=valid if self.config.text_valid else None, only=only)[:, 0]
        if unchecked and self.config.text_pool == "eos":
            x = x.masked_fill(~ends.any(1, keepdim=True), torch.nan)
        return F.normalize(x if self.text_project is None else self.text_project(x), dim=-1)

    def logits(self, images: Float[Tensor, "B D"], texts: Float[Tensor, "C D"]) -> Float[Tensor, "B C"]:
        """Scaled cosine similarities, plus the sigmoid model's bias."""
        scores = self.logit_scale.exp() * images @ texts.T
        return scores if self.logit_bias is None else scores + self.logit_bias

    def forward(
        self, images: Float[Tensor, "B 3 height width"], ids: Int[Tensor, "C T"],
        valid: Bool[Tensor, "C T"] | None = None,
    ) -> Float[Tensor, "B C"]:  # fmt: skip
        return self.logits(self.encode_image(images), self.encode_text(ids, valid))
