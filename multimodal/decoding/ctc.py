"""Greedy decoding of CTC outputs (Graves et al. 2006, section 3.2: best path)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.masks import padding


def ctc_greedy(logits: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], blank: int) -> list[list[int]]:
    """Token ids of each row's best path: the winner of every frame, repeats merged and blanks removed.

    Ignores frames from `lengths` on. Scores may be logits or log-probabilities."""
    winners = logits.argmax(-1)
    kept = padding(lengths, winners.shape[1]) & (winners != blank)
    kept[:, 1:] &= winners[:, 1:] != winners[:, :-1]
    winners = torch.where(kept, winners, -1).cpu()  # the only wait for a GPU
    kept = winners >= 0
    return [row.tolist() for row in winners[kept].split(kept.sum(1).tolist())]
