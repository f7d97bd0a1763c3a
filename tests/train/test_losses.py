"""Losses of sequences equal their definitions; the contrastive one is in test_contrastive.py."""

import pytest
import torch
from torch.testing import assert_close

from multimodal.train.losses import ctc_loss, token_loss


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paths(length: int, width: int):
    return torch.cartesian_prod(*[torch.arange(width)] * length)


def test_ctc_loss_is_the_sum_over_paths_a_token():
    blank, logits = 2, noise(2, 4, 3) * 2
    lengths, targets, sizes = [4, 3], torch.tensor([[0, 1], [1, 0]]), [2, 1]
    total = 0.0
    for row in range(2):
        probabilities, wanted = logits[row].softmax(-1), targets[row, : sizes[row]].tolist()
        likelihood = 0.0
        for path in paths(lengths[row], 3).tolist():
            collapsed = [c for i, c in enumerate(path) if c != blank and (i == 0 or path[i - 1] != c)]
            if collapsed == wanted:
                likelihood += torch.stack([probabilities[t, c] for t, c in enumerate(path)]).prod()
        total -= likelihood.log()
    assert_close(ctc_loss(logits, lengths, targets, sizes, blank).sum(), total, atol=1e-5, rtol=0)


def test_ctc_row_that_cannot_fit_counts_nothing():
    logits = noise(2, 3, 4).requires_grad_()
    targets = torch.tensor([[0, 1, 0], [1, 1, 1]])
    loss = ctc_loss(logits, [3, 3], targets, [1, 3], 3).sum()
    loss.backward()
    assert loss.isfinite()
    assert logits.grad[0].abs().sum() > 0
    assert (logits.grad[1] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_token_loss_ignores_padding_and_weighs_tokens_alike(smoothing):
    logits, targets = noise(2, 4, 5), torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    valid = torch.tensor([[True] * 4, [True, False, False, False]])
    junk = torch.where(valid[..., None], logits, torch.nan)
    rows = torch.cat([logits[0], logits[1, :1]]).log_softmax(-1)
    picked = rows[torch.arange(5), torch.tensor([1, 2, 3, 4, 0])]
    expected = -((1 - smoothing) * picked + smoothing * rows.mean(-1)).sum()
    assert_close(token_loss(junk, targets, valid, smoothing), expected, atol=5e-6, rtol=0)
