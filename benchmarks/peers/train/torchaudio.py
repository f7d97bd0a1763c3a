"""torchaudio's Conformer with a linear CTC head and PyTorch's CTC loss."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peers.train.step import BETAS, EPS, RATE, Run, autocast, runs, tensors, weight_decay_groups

SIZES = {"conformer_m": (256, 16, 4, 31)}  # width, layers, heads, kernel; Gulati et al. 2020, table 1
VOCABULARY = 1024  # tokens; the blank is one past them


class TorchaudioConformer(nn.Module):
    def __init__(self, name: str, layers: int = 0, tiny: bool = False):
        super().__init__()
        from torchaudio.models import Conformer

        width, all_layers, heads, kernel = SIZES[name]
        self.encoder = Conformer(width, heads, 4 * width, 2 if tiny else layers or all_layers, kernel)
        self.head = nn.Linear(width, VOCABULARY + 1)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        frames, lengths = self.encoder(features, lengths)
        return self.head(frames), lengths


def prepare(folder: Path, device: str, name: str, batch: int, frames: int, layers: int = 0, tiny: bool = False) -> None:
    """`weights.safetensors` as PyTorch initializes them, `batch.safetensors`: features [B F D] of noise in place of the
    stem's output, of equal length since torchaudio's convolutions see padding; ids [B F/8]."""
    torch.manual_seed(0)
    save_file(TorchaudioConformer(name, layers, tiny).state_dict(), folder / "weights.safetensors")
    save_file({
        "features": torch.randn(batch, frames, SIZES[name][0]), "lengths": torch.full((batch,), frames),
        "ids": torch.randint(VOCABULARY, (batch, frames // 8)), "id_lengths": torch.full((batch,), frames // 8),
    }, folder / "batch.safetensors")  # fmt: skip


def step(
    folder: Path, device: str, name: str, layers: int = 0, precision: str = "float32", compile: bool = False,
    steps: int = 1, tiny: bool = False, **_: Any,
) -> Run:  # fmt: skip
    """The loss is per token, as ours."""
    model = TorchaudioConformer(name, layers, tiny)
    model.load_state_dict(tensors(folder, "weights"))
    model.to(device).train()
    adam = torch.optim.AdamW(weight_decay_groups(model), lr=RATE, betas=BETAS, eps=EPS)
    called, batch = torch.compile(model) if compile else model, tensors(folder, "batch", device)
    count = int(batch["id_lengths"].sum())

    def once() -> Tensor:
        adam.zero_grad()
        with autocast(device, precision):
            logits, lengths = called(batch["features"], batch["lengths"])
            scores = logits.float().log_softmax(-1).transpose(0, 1)
            loss = F.ctc_loss(scores, batch["ids"], lengths, batch["id_lengths"], VOCABULARY, reduction="sum") / count
        loss.backward()
        adam.step()
        return loss.detach()

    return runs(once, steps)
