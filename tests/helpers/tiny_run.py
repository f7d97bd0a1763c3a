"""A tiny training run with everything that is random in a real one: augmentation, dropout and drop path."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.data.loader import Loader, shuffled
from multimodal.models.vit import ViT
from multimodal.train.checkpoint.atomic import newest_state
from multimodal.train.loop import Loop
from multimodal.train.metrics.progress import TrainingLog
from multimodal.train.objective import Summed
from multimodal.train.optim import OptimSettings
from multimodal.train.settings import LoopSettings
from tests.helpers import tiny

ITEMS, BATCH = 28, 8  # three batches an epoch, with a rest


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor


class Images:
    """Noise; the items `broken` cannot be read, those of `nan` are not finite."""

    def __init__(self, broken: tuple[int, ...] = (), nan: tuple[int, ...] = ()):
        self.broken, self.nan = broken, nan

    def __len__(self) -> int:
        return ITEMS

    def name(self, key: int) -> str:
        return f"image-{key}.png"

    def read(self, key: int) -> tuple[Tensor, int]:
        if key in self.broken:
            raise OSError("truncated")
        image = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(key))
        return image * (float("nan") if key in self.nan else 1.0), key % 5


def prepare(item: tuple[Tensor, int], generator: torch.Generator) -> tuple[Tensor, int]:
    image, label = item
    return image + 0.1 * torch.randn(image.shape, generator=generator), label


def collate(items: list[tuple[Tensor, int]]) -> Batch:
    images, labels = zip(*items, strict=True)
    return Batch(torch.stack(images), torch.tensor(labels))


class Classify(Summed):
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(batch.images).float(), batch.labels, reduction="sum")}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": len(batch.labels)}


def model(width: int = 0, drop: float = 0.1) -> ViT:
    """`width` makes the files of a state larger."""
    torch.manual_seed(0)
    config = replace(tiny.VIT, stack=tiny.stack(dropout=drop, drop_path=drop))
    if width:
        config = replace(config, stack=tiny.transformer(width, 2, 2, 2 * width, dropout=drop))
    return ViT(config)


def settings(run: Path, steps: int = 7, optim: OptimSettings | None = None, **changes) -> LoopSettings:
    optim = optim or OptimSettings(rate=1e-2, optimizer="muon", warmup=2, average=0.9)
    usual = {"accumulate": 2, "precision": "float32", "log_every": 100, "save_every": 100}
    return LoopSettings(run, steps, optim, **usual | changes)


def loop(run: Path, source: Images | None = None, width: int = 0, evaluate=None, net=None, **changes) -> Loop:
    s = settings(run, **changes)
    loader = Loader(
        source or Images(), shuffled(ITEMS, BATCH, s.seed), prepare, collate, seed=s.seed, workers=s.workers,
        micro=s.accumulate, most_broken=0.5,
    )  # fmt: skip
    return Loop(s, Classify(net or model(width)), loader, evaluate)


class Quiet(TrainingLog):
    def __init__(self, *given):
        self.given = given
        self.rows, self.figures, self.flops, self.since = [], [], None, 0.0

    def step(self, number, metrics, **more):
        self.rows.append((number, metrics, more))

    def evaluated(self, number, figures, seconds):
        self.figures.append((number, figures))

    def close(self):
        pass


def assert_same(a, b, where: str = ""):
    """Byte for byte."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for name in a:
            assert_same(a[name], b[name], f"{where}/{name}")
    elif isinstance(a, list | tuple):
        for number, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_same(one, two, f"{where}/{number}")
    else:
        assert a == b, where


def learned(loop) -> dict:
    """Weights, moments, average and counters, as a copy."""
    state = loop.state_dict()
    return _copied({name: state[name] for name in ("model", "optimizers", "average", "counters", "done")})


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def assert_same_states(run: Path, other: Path, done: int) -> None:
    """The newest states of two runs have the same weights and averages, to the bit."""
    whole, part = (newest_state(folder / "states")[1] for folder in (run, other))
    assert whole["done"] == part["done"] == done
    for a, b in ((whole["model"], part["model"]), (whole["average"]["weights"], part["average"]["weights"])):
        assert all(torch.equal(a[name], b[name]) for name in a)
