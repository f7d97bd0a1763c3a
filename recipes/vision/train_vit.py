r"""Trains a vision transformer to classify images, from random weights or from any ViT or CLIP that `load` accepts.

    data=../shared/data/vision/tiny-imagenet
    python recipes/vision/train_vit.py --data "$data/train-*.tar" --val $data/val-0000.tar \
        --run vit-run --out vit-tiny --threads 1

`--data` and `--val` are folders with a folder a class, WebDataset tars with `.cls`, or lists with a label column. Also
`--init assets/clip-vit-16` (a new head on its image tower), `--resume`, and several processes through torchrun.

Cost and result of a short run with `--patch 16 --steps 1200 --randaugment rand-m5-n1-mstd0.5-inc1 --smallest_crop 0.5
--erase 0 --mix 0.3 --drop_path 0`, from random weights on 30,300 images of 64x64: 17 minutes of about half a core
(AMD EPYC with AVX-512 bf16), 1.0 GB of memory; Tiny ImageNet val (5,050 images, 202 classes) top-1 12.5 %, top-5
32.2 %. The learning rate was at its end, the accuracy still rising. The defaults (patch 8, strong augmentation) want a
GPU.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from multimodal.blocks.stack import transformer
from multimodal.data.datasets.class_names import class_labels, names_of
from multimodal.data.loader import Loader, shuffled
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns, open_source
from multimodal.errors import demand
from multimodal.models.vit import ViT, ViTConfig
from multimodal.tasks.evaluate.classification import ImageAccuracy
from multimodal.tokens.image.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from multimodal.train.loop import Loop
from multimodal.train.objectives.classify import (
    ImageAugment,
    ImageAugmentSettings,
    MixImages,
    SoftTargets,
    classifier,
)
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ViTModelSettings:
    """Architecture of a new model; with `--init` only `drop_path` applies."""

    image: int = 64
    """pixels of a side"""
    patch: int = 8
    width: int = 192
    layers: int = 6
    heads: int = 3
    drop_path: float = 0.05
    """largest chance to leave out a block (Huang et al. 2016)"""

    def __post_init__(self):
        for name in ("image", "patch", "width", "layers", "heads"):
            demand(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        demand("image", self.image, self.image % self.patch == 0, f"a multiple of --patch {self.patch}")
        demand("width", self.width, self.width % self.heads == 0, f"a multiple of --heads {self.heads}")
        demand("drop_path", self.drop_path, 0 <= self.drop_path < 1, "0 to under 1")


def _loop() -> LoopSettings:
    optim = OptimSettings(rate=3e-3, optimizer="muon", warmup=100, weight_decay=0.1, average=0.998)
    return LoopSettings(Path("vit-run"), 2000, optim)


@dataclass(frozen=True)
class ViTRun:
    data: tuple[str, ...]
    """labelled images to train on"""
    out: Path
    """folder of the trained checkpoint"""
    val: str | None = None
    """labelled images to measure the accuracy on"""
    count: int | None = 1000
    """about so many of them while it runs; all at the end"""
    classes: tuple[Path, ...] = (Path(__file__).parents[1] / "data" / "classes.jsonl",)
    """JSONL of class names by id; one beside the data is read too"""
    init: str | None = None
    """checkpoint to begin with, instead of random weights"""
    batch: int = 128
    model: ViTModelSettings = field(default_factory=ViTModelSettings)
    augment: ImageAugmentSettings = field(default_factory=ImageAugmentSettings)
    columns: ListColumns = field(default_factory=ListColumns)
    trust: Trust = field(default_factory=Trust)
    loop: LoopSettings = field(default_factory=_loop)

    def __post_init__(self):
        demand("batch", self.batch, self.batch >= 1, "1 or more")


def begin(s: ViTRun, labels: tuple[str, ...]) -> Checkpoint:
    """The model that training begins with, and the preprocessing it will be used with."""
    torch.manual_seed(s.loop.seed)
    if s.init is not None:
        known = load(s.init)
        return Checkpoint(classifier(known, labels, s.model.drop_path), preprocessing=known.preprocessing)
    m = s.model
    stack = transformer(m.width, m.layers, m.heads, 4 * m.width, drop_path=m.drop_path)
    config = ViTConfig((m.image, m.image), m.patch, stack, pool="mean", class_token=False, classes=len(labels))
    record = Preprocessing(config.image, "shortest", "bilinear", IMAGENET_MEAN, IMAGENET_STD, 0, 1.0)
    return Checkpoint(ViT(config), preprocessing=record)


def main(s: ViTRun) -> dict[str, float]:
    source = open_source(s.data, columns=s.columns, trust=s.trust)
    labels = class_labels(source, " ".join(s.data))
    names = names_of(labels, s.classes, s.data)
    begun = begin(s, labels)
    loader = Loader(
        source, shuffled(len(source), s.batch, s.loop.seed), ImageAugment(labels, begun.preprocessing, s.augment),
        MixImages(len(labels), s.augment), seed=s.loop.seed, workers=s.loop.workers, micro=s.loop.accumulate,
    )  # fmt: skip
    log.info("%d images of %d classes", len(source), len(labels))
    val = open_source(s.val, columns=s.columns, trust=s.trust) if s.val else None
    watch = ImageAccuracy(val, labels, begun.preprocessing, s.val, s.count) if val else None
    trained = Loop(s.loop, SoftTargets(begun.model), loader, watch).fit()
    whole = ImageAccuracy(val, labels, begun.preprocessing, s.val) if val else None
    figures = whole(trained.to(s.loop.device)) if whole else {}
    card = {"labels": labels, "names": names, "figures": {s.val: figures | {"images": len(val)}} if val else {}}
    save_folder(dataclasses.replace(begun, model=trained.cpu(), card=card), s.out, torch.float16)
    log.info("%s: %s", s.out, figures)
    write_report(s.loop.run, s, [*s.data, *([s.val] if s.val else [])], whole.examples if whole else ())
    return figures


if __name__ == "__main__":
    start(main)
