"""Precisions, compiled and recomputed blocks, and settings that this machine cannot run."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from multimodal.errors import UsageError
from multimodal.models.conformer import ConformerEncoder
from multimodal.train.device import deterministic, recompute_blocks
from multimodal.train.flops import count_flops, elements
from multimodal.train.losses import forward_only, vocabulary_loss
from multimodal.train.settings import LoopSettings
from tests.helpers import tiny, tiny_run
from tests.helpers.paths import ROOT
from tests.helpers.processes import several_cases


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Without TensorBoard files, which would take longer than the training, and threads, which so small matrices do
    not pay for."""
    monkeypatch.setattr("multimodal.train.loop.TrainingLog", tiny_run.Quiet)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_bfloat16_weights_have_an_average_in_float32(tmp_path):
    loop = tiny_run.loop(tmp_path, precision="bfloat16", steps=3)
    model = loop.fit()
    assert {p.dtype for p in loop.objective.model.parameters()} == {torch.bfloat16}
    assert {t.dtype for t in loop.state.average.weights.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    again = tiny_run.loop(tmp_path, precision="bfloat16", steps=3, resume=True)
    again.fit()
    tiny_run.assert_same(tiny_run.learned(again), tiny_run.learned(loop))


def test_autocast_is_near_float32(tmp_path):
    losses = []
    for precision in ("float32", "autocast", "bfloat16"):
        loop = tiny_run.loop(tmp_path / precision, precision=precision)
        losses.append(loop.step(next(loop.loader.start(0)).batches)["loss"])
        kinds = {p.dtype for p in loop.objective.model.parameters()}
        assert kinds == {torch.bfloat16 if precision == "bfloat16" else torch.float32}
    assert losses[0] not in losses[1:]
    assert_close(losses, [losses[0]] * 3, atol=0.05, rtol=0)


def test_checkpointing_by_flag_gives_the_same_weights(tmp_path):
    loops = []
    for checkpointing in (False, True):
        loops.append(tiny_run.loop(tmp_path / str(checkpointing), checkpointing=checkpointing, steps=2))
        loops[-1].fit()
    assert loops[1].objective.model.stack.checkpointing
    tiny_run.assert_same(*map(tiny_run.learned, loops))


def test_checkpointing_a_conformer_gives_the_same_gradients():
    gradients, recomputed = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        encoder = ConformerEncoder(tiny.conformer(conv_norm="layer", dropout=0.2)).train()
        if checkpointing:
            recompute_blocks(encoder)
        calls = []
        encoder.blocks[0].feed_after.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(1)
        encoder(torch.randn(2, 24, 8), torch.tensor([24, 16]))[0].square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
        recomputed.append(len(calls))
    assert_close(gradients[0], gradients[1], atol=0, rtol=0)
    assert recomputed == [1, 2]


def test_checkpointing_refuses_batch_norms_and_other_models():
    with pytest.raises(UsageError, match="checkpointing is not possible with batch norm"):
        recompute_blocks(ConformerEncoder(tiny.conformer(conv_norm="batch")))
    with pytest.raises(UsageError, match="checkpointing needs a model with blocks"):
        recompute_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"steps": -5}, "steps must be an integer of at least 1"),
        ({"accumulate": 0}, "accumulate must be an integer of at least 1"),
        ({"workers": -1}, "workers must be an integer of at least 0"),
        ({"threads": 2000}, "threads must be an integer in [0, 1024]"),
        ({"save_every": 0}, "save_every must be an integer of at least 1"),
        ({"keep": 1}, "keep must be an integer of at least 2"),
        ({"device": "gpu"}, "device gpu: no such device"),
        ({"precision": "float16"}, "precision float16: needs a GPU"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(changes, line):
    with pytest.raises(UsageError) as caught:
        LoopSettings(Path("run"), **{"steps": 1} | changes)
    assert str(caught.value).startswith(line)


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match=r"compile needs a C\+\+ compiler on a CPU"):
        LoopSettings(Path("run"), 1, compile=True)


COMPILED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.helpers import tiny_run
from pathlib import Path
torch.set_num_threads(1)
losses = []
for compile in (False, True):
    loop = tiny_run.loop(Path(sys.argv[2]), net=tiny_run.model(drop=0.0), compile=compile)
    steps = loop.loader.start(0)
    losses.append([loop.step(next(steps).batches)["loss"] for _ in range(3)])
compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
assert compiled > 0, "nothing was compiled"
torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-4)
assert list(loop.objective.model.state_dict()) == list(tiny_run.model().state_dict())
assert loop.trained()(torch.zeros(1, 3, 8, 12)).shape == (1, 5)
print("compiled", compiled)
"""

LENGTHS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.helpers import tiny
from multimodal.models.conformer import ConformerCTC
from multimodal.train.device import compile_blocks
torch.set_num_threads(1)
torch.manual_seed(0)
encoder = ConformerCTC(tiny.JOINT).encoder.eval()  # without dropout
found = []
for compiled in (False, True):
    if compiled:
        compile_blocks(encoder)
    for frames in (104, 44, 60, 200, 48):
        torch.manual_seed(frames)
        features = torch.randn(2 + frames % 5, frames, tiny.JOINT.encoder.bands)
        lengths = torch.tensor([frames - 9] + [frames] * (len(features) - 1))
        encoder.zero_grad()
        encoder(features, lengths)[0].square().mean().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in encoder.parameters()]))
for plain, made in zip(found[:5], found[5:], strict=True):
    torch.testing.assert_close(made, plain, atol=1e-5, rtol=1e-3)
print("compiled", torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [COMPILED, LENGTHS], ids=["images", "speech of several lengths"])
def test_compiled_blocks_train_alike(program, tmp_path):
    """In a process without the checker of shapes, under which tracing fails."""
    command = [sys.executable, "-c", program, ROOT, tmp_path]
    run = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1200
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("compiled ")


def test_flops_are_counted_forward_and_backward():
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(5, 8, requires_grad=True)
    loss, flops = count_flops(lambda: layer(x).sum())
    assert flops == 2 * 5 * 8 * 4
    _, flops = count_flops(lambda: layer(x).sum().backward())
    assert flops == 3 * 2 * 5 * 8 * 4  # gradients of the input and of the weights
    assert loss.ndim == 0


@pytest.mark.ci
def test_model_flops_are_three_forwards_per_element(tmp_path, monkeypatch):
    """Neither recomputed forwards nor the length of the first batch count."""
    monkeypatch.setattr("multimodal.train.flops.peak_flops", lambda: 1e12)
    plain, recomputed, small = (
        tiny_run.loop(tmp_path / name, steps=2, net=tiny_run.model(drop=0.0), **changes)
        for name, changes in {"a": {}, "b": {"checkpointing": True}, "c": {"accumulate": 8}}.items()
    )
    ends = [tiny_run.learned(loop) for loop in (plain, recomputed, small) if loop.fit()]
    tiny_run.assert_same(ends[0]["model"], ends[1]["model"])
    weights = sum(p.numel() for p in plain.objective.model.parameters() if p.ndim == 2)
    assert plain.flops.step.model > 6 * weights / (3 * 8 * 12)
    assert recomputed.flops.step.model == plain.flops.step.model == pytest.approx(small.flops.step.model)
    assert recomputed.flops.step.hardware > 1.1 * plain.flops.step.hardware
    assert 0.7 < plain.flops.step.hardware / plain.flops.step.model < 1  # the images need no gradient


@pytest.mark.ci
def test_model_flops_of_accumulated_contrast_are_those_of_one_batch(monkeypatch):
    monkeypatch.setattr("multimodal.train.flops.peak_flops", lambda: 1e12)
    found = []
    for accumulate in (1, 2):
        loop = several_cases.clip_loop(Path("unused"), "softmax", accumulate=accumulate)
        loop.step(next(loop.loader.start(0)).batches)
        found.append(loop.flops.step)
    assert found[0].model == pytest.approx(found[1].model)
    assert found[1].hardware > 1.2 * found[0].hardware  # features first, then again with a graph


def test_the_loss_over_a_vocabulary_counts_as_one_forward():
    states, weight = torch.randn(6, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    run = lambda: vocabulary_loss(states, weight, None, torch.arange(6))
    assert count_flops(run)[1] == 3 * 2 * 6 * 4 * 10  # with its gradients
    with forward_only():
        assert count_flops(run)[1] == 2 * 6 * 4 * 10
    with torch.no_grad():
        assert count_flops(run)[1] == 2 * 6 * 4 * 10


def test_elements_are_those_of_the_largest_tensor():
    batch = tiny_run.Batch(torch.zeros(2, 3, 4, 5), torch.zeros(2))
    assert elements(batch) == 120
    assert elements([{"ids": torch.zeros(4, 7)}, batch]) == 120
    assert elements([]) == 0


def test_deterministic_kernels_are_used_in_the_run_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seen = []

    def evaluate(model, step):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return {}

    loop = tiny_run.loop(tmp_path, steps=1, deterministic=True, evaluate=evaluate)
    loop.fit()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    line = r"deterministic is not possible: put_ has no deterministic kernel"
    with pytest.raises(UsageError, match=line), deterministic():
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    with pytest.raises(RuntimeError, match="other"), deterministic():
        raise RuntimeError("other")


def test_a_run_on_a_cpu_keeps_the_memory_that_its_steps_free(tmp_path, monkeypatch):
    inside, seen = [], []

    @contextmanager
    def keeping():
        inside.append(True)
        yield
        inside.pop()

    def evaluate(model, step):
        seen.extend(inside)
        return {}

    monkeypatch.setattr("multimodal.train.loop.keeping_memory", keeping)
    tiny_run.loop(tmp_path, steps=1, evaluate=evaluate).fit()
    assert seen == [True]
    assert not inside
