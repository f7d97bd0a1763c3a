"""CLIPScore: how well captions fit their images by the vectors of a CLIP, with or without references.

Hessel et al. 2021, "CLIPScore: A Reference-free Evaluation Metric for Image Captioning", section 3."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.weights.encode import text_features
from multimodal.weights.folder import Checkpoint

PREFIX = "A photo depicts "
WEIGHT = 2.5


def clip_scores(
    checkpoint: Checkpoint, images: Float[Tensor, "N D"], captions: Sequence[str],
    references: Sequence[Sequence[str]],
) -> tuple[list[float], list[float]]:  # fmt: skip
    """CLIPScore and RefCLIPScore of each caption. Their level depends on the CLIP (0.6 to 0.8 with the paper's
    ViT-B/32): scores of different CLIP models are not comparable.

    `images`: unit vectors of the same checkpoint. CLIPScore is 2.5 · max(cos, 0) of image and caption, before which
    the prefix "A photo depicts " is put; RefCLIPScore its harmonic mean with the largest max(cos, 0) of the caption and
    a reference. An empty caption has the vector of the prefix alone."""
    own = _vectors(checkpoint, captions)
    fits = WEIGHT * (images * own).sum(1).clamp(min=0)
    owners = torch.tensor([number for number, texts in enumerate(references) for _ in texts])
    alike = (own[owners] * _vectors(checkpoint, [text for texts in references for text in texts])).sum(1)
    nearest = torch.zeros(len(own)).scatter_reduce(0, owners, alike, "amax")  # which begins with 0
    both = 2 * fits * nearest / (fits + nearest)
    return fits.tolist(), both.nan_to_num(0.0).tolist()  # 0 / 0 is a caption that fits nothing


def _vectors(checkpoint: Checkpoint, texts: Sequence[str]) -> Float[Tensor, "N D"]:
    return text_features(checkpoint.model, checkpoint.tokenizer, [PREFIX + text for text in texts]).float().cpu()
