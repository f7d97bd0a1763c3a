r"""Zero-shot accuracy of a contrastive checkpoint folder on labelled pictures.

    data=../shared/data/vision
    python recipes/evaluate_clip.py --model assets/clip-vit-16 --data $data/tiny-imagenet/val-0000.tar \
        $data/caltech101/val $data/cifar10-test

`--write` puts the figures, and what `clip_card.json` says of the training, into the folder's card.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from multimodal.tokens.image import Preprocessing, preprocess, read_image
from multimodal.train.captions import read_classes
from multimodal.train.pictures import entries
from multimodal.weights.folder import Checkpoint, load_folder, save_folder

HERE = Path(__file__).parent
CLASSES = HERE / "classes.jsonl"


class Labelled(NamedTuple):
    """Pixels [N 3 H W], labels [N] and the class names they index."""

    pixels: Tensor
    labels: Tensor
    names: list[str]


def read_labelled(source: Path, classes: Path, record: Preprocessing, most: int | None = None) -> Labelled:
    """All pictures of a source or about `most` evenly spread ones, but the names of all classes."""
    found = list(entries(source, read_classes(classes)))
    names = list(dict.fromkeys(concept.names[0] for _, _, concept in found))
    picked = found[:: max(1, len(found) // most)] if most else found
    pixels = torch.stack([preprocess(read_image(picture), record) for picture, _, _ in picked])
    return Labelled(pixels, torch.tensor([names.index(concept.names[0]) for _, _, concept in picked]), names)


@torch.inference_mode()
def class_vectors(checkpoint: Checkpoint, names: Sequence[str]) -> Tensor:
    """Unit vectors [C D]: per class the mean over the card's templates of unit text vectors (Radford et al. 2021,
    section 3.1.4)."""
    model, context = checkpoint.model, checkpoint.model.config.text.context
    texts = [[template.format(name) for name in names] for template in checkpoint.card["templates"]]
    vectors = [model.encode_text(checkpoint.tokenizer.batch(row, context).ids) for row in texts]
    return F.normalize(torch.stack(vectors).mean(0), dim=-1)


@torch.inference_mode()
def accuracy(checkpoint: Checkpoint, vectors: Tensor, pictures: Labelled) -> dict[str, float]:
    """Share of pictures whose label is first, and among the first five."""
    scores = torch.cat([checkpoint.model.encode_image(part) @ vectors.T for part in pictures.pixels.split(100)])
    hits = scores.topk(min(5, len(vectors))).indices == pictures.labels[:, None]
    return {"top1": round(hits[:, 0].float().mean().item(), 4), "top5": round(hits.any(1).float().mean().item(), 4)}


def main(model: Path, data: list[Path], classes: Path = CLASSES, write: bool = False) -> None:
    checkpoint = load_folder(model)
    figures = {}
    for source in data:
        pictures = read_labelled(source, classes, checkpoint.preprocessing)
        shares = accuracy(checkpoint, class_vectors(checkpoint, pictures.names), pictures)
        name = "/".join(source.parts[-2:])
        figures[name] = {"pictures": len(pictures.labels), "classes": len(pictures.names), **shares}
        print(name, figures[name], flush=True)
    if write:
        about = json.loads((HERE / "clip_card.json").read_text(encoding="utf-8"))
        card = checkpoint.card | about | {"figures": figures}
        save_folder(dataclasses.replace(checkpoint, card=card), model, torch.float16)


if __name__ == "__main__":
    tyro.cli(main)
