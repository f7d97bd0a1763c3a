r"""Train a vision transformer to classify images, from random weights or from any ViT or CLIP that `load` accepts.

    data=data/vision/tiny-imagenet
    python recipes/vision/train_vit.py --data "$data/train-*.tar" --val $data/val-0000.tar \
        --run vit-run --out vit-tiny --threads 1

`--data` and `--val` are folders with a folder per class, WebDataset tars with `.cls`, or lists with a label column.
`--init assets/clip-vit-16` puts a new head on its image tower; `--resume` and torchrun work as in every recipe.

Cost and result of a short run with `--patch 16 --steps 1200 --randaugment rand-m5-n1-mstd0.5-inc1 --smallest_crop 0.5
--erase 0 --mix 0.3 --drop_path 0`, from random weights on 30,300 images of 64x64: 17 minutes of about half a core
(AMD EPYC with AVX-512 bf16), 1.0 GB of memory; Tiny ImageNet val (5,050 images, 202 classes) top-1 12.5 %, top-5
32.2 %, still rising when the learning rate ended. The defaults (patch 8, strong augmentation) need a GPU.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from multimodal.blocks.stack import transformer
from multimodal.data.datasets.class_names import class_labels, names_of
from multimodal.data.loader import shuffled
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns, open_source
from multimodal.errors import multiple_of
from multimodal.models.vit import ViT, ViTConfig
from multimodal.system.options import Positive, Rate
from multimodal.tasks.evaluate.classification import ImageAccuracy
from multimodal.tokens.image.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.lora import keep_sizes
from multimodal.train.objectives.augment_images import ImageAugment, ImageAugmentSettings
from multimodal.train.objectives.classify import MixImages, SoftTargets, classifier
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class ViTModelSettings:
    """Architecture of a new model; a model from `--init` has its own."""

    image: Positive = 64  # pixels per side
    patch: Positive = 8
    width: Positive = 192
    layers: Positive = 6
    heads: Positive = 3
    # largest probability of skipping a block (Huang et al. 2016): by default 0.05, with --init as it has it
    drop_path: Rate | None = None

    def __post_init__(self):
        multiple_of("patch", self, "image")
        multiple_of("heads", self, "width")


@dataclass(frozen=True)
class ViTRun:
    data: tuple[str, ...]  # labelled training images
    out: Path  # folder for the trained checkpoint
    val: str | None = None  # labelled images to measure the accuracy on
    count: Positive | None = 1000  # validation images while training runs, at most; all of them at the end
    classes: tuple[Path, ...] = (DATA / "classes.jsonl",)  # JSONL of class names by id, besides one beside the data
    init: str | None = None  # checkpoint to start from, instead of random weights
    batch: Positive = 128
    model: ViTModelSettings = ViTModelSettings()
    augment: ImageAugmentSettings = ImageAugmentSettings()
    columns: ListColumns = ListColumns()
    trust: Trust = Trust()
    loop: LoopSettings = LoopSettings(
        Path("vit-run"), 2000, OptimSettings(3e-3, "muon", warmup=100, weight_decay=0.1, average=0.998)
    )


def begin(s: ViTRun, labels: tuple[str, ...]) -> Checkpoint:
    """Return the model to train and its preprocessing."""
    torch.manual_seed(s.loop.seed)
    if s.init is not None:
        known = load(s.init)
        made = classifier(known, labels, s.model.drop_path)
        stack = made.config.stack
        own = {"image": max(made.config.image), "patch": made.config.patch, "layers": stack.layers}
        own |= {"width": stack.block.attention.width, "heads": stack.block.attention.heads}
        keep_sizes(s.init, own, s.model, ViTRun.model)
        return Checkpoint(made, preprocessing=known.preprocessing)
    m = s.model
    drop_path = 0.05 if m.drop_path is None else m.drop_path
    stack = transformer(m.width, m.layers, m.heads, 4 * m.width, drop_path=drop_path)
    config = ViTConfig((m.image, m.image), m.patch, stack, pool="mean", class_token=False, classes=len(labels))
    record = Preprocessing(config.image, "shortest", "bilinear", IMAGENET_MEAN, IMAGENET_STD, 0, 1.0)
    return Checkpoint(ViT(config), preprocessing=record)


def main(s: ViTRun) -> dict[str, float]:
    source = open_source(s.data, columns=s.columns, trust=s.trust)
    labels = class_labels(source, " ".join(s.data))
    names = names_of(labels, s.classes, s.data)
    initial = replace(begin(s, labels), card={"labels": labels, "names": names})
    loader = s.loop.loader(
        source, shuffled(len(source), s.batch, s.loop.seed), ImageAugment(labels, initial.preprocessing, s.augment),
        MixImages(len(labels), initial.preprocessing, s.augment),
    )  # fmt: skip
    log.info("%d images of %d classes", len(source), len(labels))
    val = open_source(s.val, columns=s.columns, trust=s.trust) if s.val else None
    watch = ImageAccuracy(val, labels, initial.preprocessing, s.val, s.count) if val else None
    trained = Loop(s.loop, SoftTargets(initial.model), loader, watch, initial).fit()
    whole = ImageAccuracy(val, labels, initial.preprocessing, s.val) if val else None
    figures = whole(trained.to(s.loop.device)) if whole else {}
    card = initial.card | {"figures": {s.val: figures | {"images": len(val)}} if val else {}}
    checkpoint = replace(initial, model=trained.cpu(), card=card)
    finish(s, checkpoint, [*s.data, s.val], whole.examples if whole else (), figures=figures, store="float16")
    return figures


if __name__ == "__main__":
    start(main)
