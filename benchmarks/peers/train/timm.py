"""timm's training step: its model, its `ClassificationTask`, its loss for mixed targets and its optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peers.train.step import BETAS, EPS, RATE, WEIGHT_DECAY, Run, autocast, runs, tensors

CLASSES = 1000


def made(name: str, image: int, tiny: bool = False) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=CLASSES, img_size=image, **({"depth": 2} if tiny else {}))


def loaded(folder: Path, name: str, image: int, tiny: bool = False, **_: Any) -> nn.Module:
    model = made(name, image, tiny)
    model.load_state_dict(tensors(folder, "weights"))
    return model


def encoder(folder: Path, device: str, kind: str, **sizes: Any) -> Callable[[], Tensor]:
    """The same model without training."""
    dtype, pixels = getattr(torch, kind), tensors(folder, "batch", device)["pixels"]
    model = loaded(folder, **sizes).eval().requires_grad_(False).to(device, dtype)
    return torch.inference_mode()(lambda: model(pixels.to(dtype)))


def prepare(folder: Path, device: str, name: str, batch: int, image: int, tiny: bool = False) -> None:
    """`weights.safetensors` as timm initializes them, `batch.safetensors`: pixels [B 3 S S] of noise,
    targets [B 1000] of smoothed labels after mixup."""
    torch.manual_seed(0)
    save_file(made(name, image, tiny).state_dict(), folder / "weights.safetensors")
    first, second = (torch.randint(CLASSES, (batch,)) for _ in range(2))
    share, rest = torch.rand(batch, 1), 0.1 / CLASSES
    rows = [torch.full((batch, CLASSES), rest).scatter_(1, at[:, None], 0.9 + rest) for at in (first, second)]
    save_file({"pixels": torch.randn(batch, 3, image, image), "targets": share * rows[0] + (1 - share) * rows[1]},
              folder / "batch.safetensors")  # fmt: skip


def step(
    folder: Path, device: str, precision: str = "float32", compile: bool = False, steps: int = 1, **sizes: Any
) -> Run:
    """A step in the order of timm's train.py."""
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask

    model = loaded(folder, **sizes).to(device)
    adam = create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=WEIGHT_DECAY, betas=BETAS, eps=EPS)
    task = ClassificationTask(model, SoftTargetCrossEntropy(), device=torch.device(device), verbose=False)
    if compile:
        task.compile()
    task.train()
    batch = tensors(folder, "batch", device)

    def once() -> Tensor:
        with autocast(device, precision):
            loss = task(batch["pixels"], batch["targets"])["loss"]
        loss.backward()
        adam.step()
        adam.zero_grad()
        task.update_ema()
        return loss.detach()

    return runs(once, steps)
