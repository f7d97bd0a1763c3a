"""Pictures as the picture tasks take them: paths, bytes or PIL images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.tokens.image import Preprocessing, preprocess, read_image


def pixels_of(images: Sequence[Any], record: Preprocessing) -> Float[Tensor, "B 3 H W"]:
    """All pictures read and preprocessed. Raises ImageError."""
    pictures = [image if isinstance(image, Image.Image) else read_image(image) for image in images]
    return torch.stack([preprocess(picture, record) for picture in pictures])


def name_of(image: Any) -> str:
    """The path as it was given, else what kind of object it was."""
    if isinstance(image, str | Path):
        return str(image)
    return getattr(image, "filename", "") or f"<{type(image).__name__}>"
