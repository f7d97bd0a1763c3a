"""open_clip's own training step: `train_one_epoch` of open_clip_train, with its loss; parameter groups as its main."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peers.train.step import BETAS, CHECKED, EPS, RATE, Run, tensors, weight_decay_groups

CONTEXT, VOCABULARY = 77, 49408
LONGEST = 24  # tokens of a caption, begin and end included
PRECISIONS = {"float32": "fp32", "autocast": "amp_bf16"}


def config(name: str, image: int, tiny: bool = False) -> dict[str, Any]:
    """The named architecture on images of `image` pixels."""
    import open_clip

    found = open_clip.get_model_config(name)
    layers = {"layers": 2} if tiny else {}
    return found | {"vision_cfg": found["vision_cfg"] | {"image_size": image} | layers,
                    "text_cfg": found["text_cfg"] | layers}  # fmt: skip


def made(name: str, image: int, tiny: bool = False) -> nn.Module:
    logging.disable(logging.WARNING)  # it warns about missing pretrained weights
    import open_clip

    return open_clip.create_model(name, output_dict=True, **config(name, image, tiny))


def prepare(folder: Path, device: str, name: str, batch: int, image: int, tiny: bool = False) -> None:
    """`weights.safetensors` as open_clip makes them before training, `batch.safetensors`: images [B 3 S S] of noise,
    ids [B 77] of captions of 8 to 24 tokens."""
    torch.manual_seed(0)
    save_file({key: value.contiguous() for key, value in made(name, image, tiny).state_dict().items()},
              folder / "weights.safetensors")  # fmt: skip
    ids, lengths = torch.zeros(batch, CONTEXT, dtype=torch.long), torch.randint(8, LONGEST + 1, (batch,))
    lengths[0] = LONGEST
    for row, length in zip(ids, lengths.tolist(), strict=True):
        row[:length] = torch.randint(1, VOCABULARY - 2, (length,))
        row[0], row[length - 1] = VOCABULARY - 2, VOCABULARY - 1
    save_file({"images": torch.randn(batch, 3, image, image), "ids": ids}, folder / "batch.safetensors")


class OpenClipData:
    """Data of `train_one_epoch`: an epoch is `steps` times the same batch."""

    def __init__(self, images: Tensor, ids: Tensor):
        self.pair, self.dataloader, self.steps = (images, ids), self, 1
        self.num_samples = len(images)

    @property
    def num_batches(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self):
        return iter([self.pair] * self.steps)


class Losses:
    """Replaces its TensorBoard writer."""

    def __init__(self):
        self.seen: list[float] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if name == "train/loss":
            self.seen.append(value)


def step(
    folder: Path, device: str, name: str, batch: int, image: int, precision: str = "float32", compile: bool = False,
    steps: int = 1, tiny: bool = False,
) -> Run:  # fmt: skip
    """Each run is an epoch of `steps` steps that reads the loss at the first and the last."""
    model = made(name, image, tiny)
    model.load_state_dict(tensors(folder, "weights"))
    model.to(device)
    from open_clip import create_loss
    from open_clip_train.train import train_one_epoch

    args = Namespace(
        device=device, precision=PRECISIONS[precision], accum_freq=1, skip_scheduler=True, distill=False, model=name,
        siglip=False, local_loss=False, gather_with_grad=False, horovod=False, rank=0, world_size=1,
        grad_clip_norm=None, log_every_n_steps=100, batch_size=batch, wandb=False,
    )  # fmt: skip
    adam = torch.optim.AdamW(weight_decay_groups(model), lr=RATE, betas=BETAS, eps=EPS)
    loss, losses, data = create_loss(args), Losses(), OpenClipData(**tensors(folder, "batch"))
    called = torch.compile(model) if compile else model  # as its --torchcompile
    fresh = True

    def run() -> np.ndarray | None:
        nonlocal fresh
        data.steps = CHECKED if fresh else steps
        args.log_every_n_steps = 1 if fresh else 100
        train_one_epoch(called, {"train": data}, loss, 0, adam, None, None, None, args, losses)
        found, fresh = np.array([losses.seen[0], losses.seen[-1]]) if fresh else None, False
        return found

    return run
