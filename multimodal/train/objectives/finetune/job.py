"""Shared parts of the fine-tuning tasks: their data and the loop's arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from multimodal.data.loader import Plan
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns
from multimodal.system.options import Positive
from multimodal.train.objective import Objective
from multimodal.train.objectives.augment_images import ImageAugmentSettings
from multimodal.weights.folder import Checkpoint

# runs are short and the model is pretrained
LIGHT = ImageAugmentSettings("rand-m5-n1-mstd0.5-inc1", 0.5, erase=0.0, mixup=0.0, cutmix=0.0, mix=0.0)


@dataclass(frozen=True)
class FinetuningData:
    data: tuple[str, ...]  # folders, tars or lists of images with classes or captions; or manifests of recordings
    val: str | None = None  # held-out data of the same form, to measure on
    count: Positive | None = 500  # items of it while training runs, about; all of them at the end
    batch: Positive = 64  # images per batch
    frames: Positive = 4000  # frames (10 ms) of recordings per batch, at most
    language: str = "en"  # of recordings whose manifest names none (Whisper's format)
    head: Literal["names", "zeros"] = "names"  # a CLIP's new head for `classify`: the class names' vectors, or zeros
    classes: tuple[Path, ...] = ()  # JSONL files of class names by id, besides one beside the data
    augment: ImageAugmentSettings = LIGHT
    columns: ListColumns = ListColumns()
    trust: Trust = Trust()


class FinetuningJob(NamedTuple):
    """`tuned`: the part to freeze or adapt; `fresh`: its new parts. `measure(model, count)` returns figures on the
    held-out data, `finish(model)` the checkpoint to save."""

    objective: Objective
    tuned: nn.Module
    fresh: tuple[str, ...]
    source: Any
    plan: Plan
    prepare: Callable
    collate: Callable
    measure: Callable[[nn.Module, int | None], dict[str, float | None]] | None
    finish: Callable[[nn.Module], Checkpoint]
