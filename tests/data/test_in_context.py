"""Made data for learning in context: each task's outputs by its definition, and least squares by the textbook."""

import random
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from multimodal.data.datasets.in_context import (
    ARROW,
    STOP,
    TASKS,
    MadeBatches,
    episode,
    episodes,
    least_squares,
    points,
)
from multimodal.data.datasets.text import IGNORED
from multimodal.data.loader import Loader, generator


def examples(ids: list[int]) -> list[tuple[list[int], list[int]]]:
    ends = [-1, *(at for at, token in enumerate(ids) if token == STOP)]
    parts = [ids[first + 1 : last] for first, last in pairwise(ends)]
    return [(part[: part.index(ARROW)], part[part.index(ARROW) + 1 :]) for part in parts]


@pytest.mark.parametrize("seed", range(8))
def test_outputs_follow_the_task(seed):
    for task in TASKS:
        ids, outputs = episode(task, 9, random.Random(seed))
        found = examples(ids)
        assert len(found) == 10
        assert [[i for i, n in zip(ids, outputs, strict=True) if n == k] for k in range(10)] == [o for _, o in found]
        for given, answer in found:
            if task == "copy":
                assert answer == given
            elif task == "sum":
                assert 10 * answer[0] + answer[1] == sum(given)
            elif task == "antonym":
                assert {given[0] // 2, answer[0] // 2} == {given[0] // 2}
                assert given != answer


def test_only_outputs_are_predicted_after_as_many_examples():
    batch, before = episodes(["sum"], 3, 4, generator(0))
    assert batch.ids.shape == before.shape == (3, 32)  # 5 · 6 - 1, padded
    assert ((batch.targets != IGNORED) == (before >= 0)).all()
    assert before[0][before[0] >= 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (batch.targets[:, 2:4] == batch.ids[:, 3:5])[:, 0].all()


def test_points_have_the_functions_of_their_kind():
    for kind in ("linear", "sparse"):
        x, y = points(kind, 2000, 9, 4, generator(kind))
        assert y.var() == pytest.approx(1, abs=0.1)
        weights = torch.linalg.lstsq(x, y[..., None]).solution[..., 0]
        assert_close((x @ weights[..., None])[..., 0], y, atol=1e-3, rtol=0)
        assert ((weights.abs() > 1e-3).sum(1) == (1 if kind == "sparse" else 4)).float().mean() > 0.99
        assert least_squares(x[:50], y[:50])[:, 4:].sub(y[:50, 4:]).square().mean() < 1e-4
        assert (least_squares(x[:50], y[:50])[:, 0] == 0).all()


def test_made_batches_are_a_function_of_the_step():
    source = MadeBatches(3, lambda own: torch.rand(2, generator=own))
    load = lambda first: Loader(source, source.plan, source.prepare, source.collate, seed=5).start(first)
    steps = load(0)
    rows = [next(steps).batches[0] for _ in range(3)]
    assert_close(next(load(2)).batches[0], rows[2])
    assert len({tuple(row.tolist()) for row in rows}) == 3
