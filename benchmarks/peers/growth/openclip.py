"""open_clip from image files and labels to scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.growth.images import TEMPLATE, files, labels

BATCH = 32


def scores(folder: Path, device: str, **_: Any) -> Callable[[], Tensor]:
    import open_clip
    from PIL import Image

    source, names, pictures = f"local-dir:{folder / 'open_clip'}", labels(folder), files(folder)
    model, _, transform = open_clip.create_model_and_transforms(source, device=device)
    model.eval()
    tokenizer = open_clip.get_tokenizer(source)

    @torch.inference_mode()
    def run() -> Tensor:
        """[images, labels]"""
        texts = open_clip.build_zero_shot_classifier(model, tokenizer, names, [TEMPLATE.format], device=device)
        rows = []
        for start in range(0, len(pictures), BATCH):
            batch = torch.stack([transform(Image.open(file)) for file in pictures[start : start + BATCH]]).to(device)
            vectors = model.encode_image(batch, normalize=True)
            rows.append((model.logit_scale.exp() * vectors @ texts).softmax(-1))
        return torch.cat(rows)

    return run
