"""Objectives: states and logits to losses."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def clip_loss(logits: Float[Tensor, "B B"]) -> Float[Tensor, ""]:
    """Symmetric cross-entropy with the pairs on the diagonal (Radford et al. 2021, figure 3)."""
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def matching_loss(logits: Float[Tensor, "B C"], same: Bool[Tensor, "B C"]) -> Float[Tensor, ""]:
    """`clip_loss` where several texts of the batch fit a picture: the target is spread over all of them
    (UniCL, Yang et al. 2022). Each row and each column of `same` holds at least one True."""
    weights = same.to(logits.dtype)
    rows = -(weights / weights.sum(1, keepdim=True) * logits.log_softmax(1)).sum(1).mean()
    columns = -(weights / weights.sum(0, keepdim=True) * logits.log_softmax(0)).sum(0).mean()
    return (rows + columns) / 2


def sigmoid_loss(logits: Float[Tensor, "B B"], same: Bool[Tensor, "B B"] | None = None) -> Float[Tensor, ""]:
    """Each pair is a yes or no question (Zhai et al. 2023, equation 1); the mean is over pictures."""
    same = torch.eye(len(logits), dtype=torch.bool, device=logits.device) if same is None else same
    return -F.logsigmoid(torch.where(same, logits, -logits)).sum() / len(logits)


def ctc_loss(
    logits: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], targets: Int[Tensor, "B L"],
    target_lengths: Int[Tensor, "B"], blank: int,
) -> Float[Tensor, ""]:  # fmt: skip
    """Negative log-likelihood a target token (Graves et al. 2006). A row whose target does not fit counts 0."""
    losses = F.ctc_loss(
        logits.float().log_softmax(-1).transpose(0, 1), targets, lengths, target_lengths, blank,
        reduction="none", zero_infinity=True,
    )  # fmt: skip
    return losses.sum() / target_lengths.sum().clamp(min=1)


def token_loss(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"], smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Cross-entropy over the valid tokens, each weighing the same."""
    return F.cross_entropy(logits[valid].float(), targets[valid], label_smoothing=smoothing)
