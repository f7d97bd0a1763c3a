"""open_clip and transformers' pipeline from image files and labels to scores."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.vision import clip_jpegs

TEMPLATE = "a photo of a {}."
BATCH = 32  # images


def inputs(folder: Path) -> tuple[list[str], list[str]]:
    """Files and labels of `random_clip`."""
    files = [str(path) for path in clip_jpegs.files(folder / "images")]
    return files, json.loads((folder / "labels.json").read_text())


def in_order(results: Sequence[Sequence[dict[str, Any]]], labels: Sequence[str]) -> np.ndarray:
    """Scores [images, labels] of lists of {"label", "score"}."""
    rows = [{one["label"]: one["score"] for one in scores} for scores in results]
    return np.array([[row[label] for label in labels] for row in rows])


def open_clip(folder: Path, device: str, **_: Any) -> Callable[[], Any]:
    import open_clip
    import torch
    from PIL import Image

    source, (files, labels) = f"local-dir:{folder / 'open_clip'}", inputs(folder)
    model, _, transform = open_clip.create_model_and_transforms(source, device=device)
    model.eval()
    tokenizer = open_clip.get_tokenizer(source)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        texts = open_clip.build_zero_shot_classifier(model, tokenizer, labels, [TEMPLATE.format], device=device)
        rows = []
        for start in range(0, len(files), BATCH):
            batch = torch.stack([transform(Image.open(file)) for file in files[start : start + BATCH]]).to(device)
            vectors = model.encode_image(batch, normalize=True)
            rows.append((model.logit_scale.exp() * vectors @ texts).softmax(-1))
        return torch.cat(rows)

    return run


def transformers(folder: Path, device: str, **_: Any) -> Callable[[], np.ndarray]:
    """The pipeline as documented, one image at a time: it encodes the texts for each image, and uses a batch's first
    image for all."""
    from transformers import pipeline

    files, labels = inputs(folder)
    pipe = pipeline("zero-shot-image-classification", str(folder / "hub"), device=device)
    return lambda: in_order(pipe(files, candidate_labels=labels, hypothesis_template=TEMPLATE), labels)
