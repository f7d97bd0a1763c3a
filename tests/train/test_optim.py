"""Settings of the optimizers, schedules, groups, and the average of the weights."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from multimodal.errors import UsageError
from multimodal.train import optim, settings
from multimodal.train.optim import Average, OptimSettings, optimizers, parameter_groups, share_of_peak
from tests.helpers import tiny, tiny_run

COSINE = OptimSettings(schedule="cosine", warmup=10, floor=0.1)
WSD = OptimSettings(schedule="wsd", warmup=10, floor=0.1, decay=0.25)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rate": 0.0}, "rate must be a number above 0"),
        ({"rate": math.nan}, "rate must be a number above 0"),
        ({"rate": math.inf}, "rate must be a finite number above 0"),
        ({"warmup": -1}, "warmup must be an integer of at least 0"),
        ({"floor": 1.5}, "floor must be a number in [0, 1]"),
        ({"decay": 0.0}, "decay must be a number in (0, 1]"),
        ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to under 1"),
        ({"clip": math.nan}, "clip must be a number of at least 0"),
        ({"average": 1.0}, "average must be a number in [0, 1)"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(change, line):
    with pytest.raises(UsageError) as caught:
        OptimSettings(**change)
    assert str(caught.value) == f"{line} (got {next(iter(change.values()))})"


@pytest.mark.parametrize("s", [COSINE, WSD])
def test_the_rate_rises_stays_and_comes_down(s):
    shares = [share_of_peak(s, step, 100) for step in range(100)]
    assert shares[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert all(a >= b for a, b in itertools.pairwise(shares[9:]))
    assert max(shares) == 1
    assert 0.1 <= shares[-1] < 0.12


def test_wsd_is_flat_until_it_decays():
    assert [share_of_peak(WSD, step, 100) for step in (10, 50, 75)] == [1, 1, 1]
    assert share_of_peak(WSD, 90, 100) == pytest.approx(10 / 25)


@pytest.mark.parametrize("s", [COSINE, WSD])
def test_after_the_horizon_the_rate_never_climbs_back(s):
    assert {share_of_peak(s, step, 100) for step in (100, 101, 150, 200, 1000)} == {0.1}


def test_a_run_shorter_than_its_warmup_comes_down_too():
    assert share_of_peak(replace(WSD, warmup=1000), 99, 100) <= 0.1


def test_only_matrices_decay():
    model = nn.ModuleDict({"linear": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "frozen": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)
    decayed, free = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert len(free["params"]) == 3
    assert free["weight_decay"] == 0
    vit = tiny.made("vit-registers")
    decayed, free = (group["params"] for group in parameter_groups(vit, 0.1))
    assert {id(vit.class_token), id(vit.registers)} < {id(p) for p in free}
    assert len(decayed) + len(free) == len(list(vit.parameters()))


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    net = tiny_run.model()
    muon, adamw = optimizers(net, OptimSettings(optimizer="muon"))
    inner = {id(p) for p in net.stack.blocks.parameters() if p.ndim == 2}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == inner
    others = [p for group in adamw.param_groups for p in group["params"]]
    assert {id(p) for p in net.parameters()} == inner | {id(p) for p in others}
    assert len(others) + len(inner) == len(list(net.parameters()))


def test_nothing_to_train_is_said():
    with pytest.raises(UsageError, match="the model has no parameters to train"):
        optimizers(nn.Linear(2, 2).requires_grad_(False), OptimSettings())
    with pytest.raises(UsageError, match="optimizer muon: the model has no trained matrices"):
        optimizers(nn.Linear(2, 2), OptimSettings(optimizer="muon"))


def test_parameters_that_are_views_are_trained_in_place():
    """GPT-2's table gives thirds of a transposed tensor; fused AdamW reads no strides."""
    whole = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    ends = []
    for part in (whole.T.chunk(3)[1], whole.T.chunk(3)[1].clone(memory_format=torch.contiguous_format)):
        net = nn.Linear(4, 4, bias=False)
        net.load_state_dict({"weight": part}, assign=True)
        (adam,) = optimizers(net, OptimSettings(rate=0.1))
        for _ in range(2):
            net(torch.eye(4)).square().sum().backward()
            adam.step()
        ends.append(net.weight.detach())
    assert_close(*ends)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_gradients_are_clipped(tmp_path, optimizer):
    loop = tiny_run.loop(tmp_path, optim=OptimSettings(clip=1e-3, optimizer=optimizer))
    metrics = loop.step(next(loop.loader.start(0)).batches)
    assert metrics["norm"] > 0.01
    total = torch.stack([p.grad.norm() for p in loop.objective.model.parameters()]).norm()
    assert total.item() == pytest.approx(1e-3, rel=1e-3)
    loop = tiny_run.loop(tmp_path, optim=OptimSettings(clip=0.0))
    again = loop.step(next(loop.loader.start(0)).batches)["norm"]
    total = torch.stack([p.grad.norm() for p in loop.objective.model.parameters()]).norm()
    assert total.item() == pytest.approx(again, rel=1e-4) == metrics["norm"]


def test_the_average_follows_its_formula():
    model = nn.Linear(1, 1)
    average, expected = Average(model, 0.9), model.weight.item()
    for update in range(1, 40):
        nn.init.constant_(model.weight, update)
        average.update()
        decay = min(0.9, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * update
    assert average.weights["weight"].item() == pytest.approx(expected, rel=1e-5)


def test_the_average_of_bfloat16_weights_keeps_small_steps():
    model = nn.Linear(1, 1).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    average = Average(model, 0.999)
    average.updates = 10**6  # past the early bound
    nn.init.constant_(model.weight, 1.0 + 2**-7)
    for _ in range(10):
        average.update()
    assert average.weights["weight"].dtype == torch.float32
    assert_close(average.weights["weight"].item(), 1 + 2**-7 * (1 - 0.999**10), rtol=1e-5, atol=0)


def test_an_average_of_another_model_is_refused():
    average = Average(nn.Linear(2, 2), 0.9)
    with pytest.raises(ValueError, match="names or shapes differ"):
        average.load(Average(nn.Linear(2, 3), 0.9).weights, 1)


def trained_by(optimizer: type, **settings) -> list[torch.Tensor]:
    """Matrices after three steps of a Muon."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (8, 24), (24, 8), (8, 8), (6, 10)]
    matrices = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    muon = optimizer(matrices, lr=0.1, weight_decay=0.1, **settings)
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=draw)
        muon.step()
    return [matrix.detach() for matrix in matrices]


@pytest.mark.parametrize(("fast", "error"), [(True, 2e-3), (False, 0.02)])
def test_muon_is_torchs_muon(monkeypatch, fast, error):
    """In bfloat16 as torch, or in float32, where torch's own rounding is the difference."""
    monkeypatch.setattr(optim, "prefers_bfloat16", lambda: fast)
    for own, reference in zip(
        trained_by(optim.Muon), trained_by(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"), strict=True
    ):
        assert_close(own, reference, atol=error, rtol=0)


def test_auto_precision_is_autocast_where_bfloat16_is_fast(monkeypatch, tmp_path):
    """Also where --device names a GPU for a recipe whose defaults were made for the CPU."""
    monkeypatch.setattr(settings, "check_device", lambda *_: None)
    for fast, precision in ((True, "autocast"), (False, "float32")):
        monkeypatch.setattr(settings, "prefers_bfloat16", lambda fast=fast: fast)
        auto = settings.LoopSettings(tmp_path, 1)
        assert auto.used_precision == precision
        assert replace(auto, device="cuda").used_precision == "autocast"
        assert settings.LoopSettings(tmp_path, 1, precision="bfloat16").used_precision == "bfloat16"
