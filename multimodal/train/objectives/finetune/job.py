"""Shared parts of the fine-tuning tasks: their data and the loop's arguments."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from multimodal.data.loader import Plan
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns
from multimodal.errors import demand
from multimodal.train.objective import Objective
from multimodal.train.objectives.classify import ImageAugmentSettings
from multimodal.weights.folder import Checkpoint


def light() -> ImageAugmentSettings:
    """Weaker augmentation than for random weights, since runs are short and the model is pretrained."""
    return ImageAugmentSettings("rand-m5-n1-mstd0.5-inc1", 0.5, erase=0.0, mixup=0.0, cutmix=0.0, mix=0.0)


@dataclass(frozen=True)
class FinetuningData:
    data: tuple[str, ...]
    """folders, tars or lists of images with classes or captions; or JSONL manifests of recordings"""
    val: str | None = None
    """held-out data of the same form, to measure on"""
    count: int | None = 500
    """about so many items of it while training runs; all at the end"""
    batch: int = 64
    """images of a batch"""
    frames: int = 4000
    """most frames (10 ms) of recordings in a batch"""
    language: str = "en"
    """of recordings whose manifest does not say (Whisper's format)"""
    head: Literal["names", "zeros"] = "names"
    """what a CLIP's new head for `classify` begins with: the text vectors of the class names, or nothing"""
    classes: tuple[Path, ...] = ()
    """JSONL files of class names by id, besides one beside the data"""
    augment: ImageAugmentSettings = field(default_factory=light)
    columns: ListColumns = field(default_factory=ListColumns)
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self):
        for name in ("batch", "frames", "count"):
            demand(name, getattr(self, name), getattr(self, name) is None or getattr(self, name) >= 1, "1 or more")


class FinetuningJob(NamedTuple):
    """`tuned`: the part to freeze or adapt; `fresh`: its new parts. `measure(model, count)`: figures on the held-out
    data. `finish(model)`: the checkpoint to save."""

    objective: Objective
    tuned: nn.Module
    fresh: tuple[str, ...]
    source: Any
    plan: Plan
    prepare: Callable
    collate: Callable
    measure: Callable[[nn.Module, int | None], dict[str, float]] | None
    finish: Callable[[nn.Module], Checkpoint]
