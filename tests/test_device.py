"""Precisions, compiled and recomputed blocks, and settings that this machine cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_run
import torch
from torch import nn
from torch.testing import assert_close

from multimodal.errors import UsageError
from multimodal.models.speech import ConformerEncoder
from multimodal.train.device import counted, recompute_blocks
from multimodal.train.settings import LoopSettings


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Without TensorBoard files, which would take longer than the training, and threads, which so small matrices do
    not pay for."""
    monkeypatch.setattr("multimodal.train.loop.Watch", tiny_run.Quiet)
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
    with pytest.raises(UsageError, match="--checkpointing: batch norms"):
        recompute_blocks(ConformerEncoder(tiny.conformer(conv_norm="batch")))
    with pytest.raises(UsageError, match="--checkpointing: the model has no blocks"):
        recompute_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"steps": 0}, "--steps 0: must be 1 or more"),
        ({"steps": -5}, "--steps -5: must be 1 or more"),
        ({"accumulate": 0}, "--accumulate 0: must be 1 or more"),
        ({"workers": -1}, "--workers -1: must be 0 or more"),
        ({"threads": 2000}, "--threads 2000: must be 1024 or fewer"),
        ({"save_every": 0}, "--save_every 0: must be 1 or more"),
        ({"keep": 1}, "--keep 1: must be 2 or more"),
        ({"device": "gpu"}, "--device gpu: no such device"),
        ({"precision": "float16"}, "--precision float16: needs a GPU, not --device cpu"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(changes, line):
    with pytest.raises(UsageError) as caught:
        LoopSettings(Path("run"), **{"steps": 1} | changes)
    assert str(caught.value).startswith(line)


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match=r"--compile: needs a C\+\+ compiler on a CPU"):
        LoopSettings(Path("run"), 1, compile=True)


COMPILED = """
import sys
sys.path.insert(0, sys.argv[1])
import tiny_run, torch
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


@pytest.mark.slow
def test_compiled_blocks_train_alike(tmp_path):
    """In a process without the checker of shapes, under which tracing fails."""
    command = [sys.executable, "-c", COMPILED, Path(__file__).parent, tmp_path]
    run = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("compiled ")


def test_arithmetic_is_counted_forward_and_backward():
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(5, 8, requires_grad=True)
    loss, flops = counted(lambda: layer(x).sum())
    assert flops == 2 * 5 * 8 * 4
    _, flops = counted(lambda: layer(x).sum().backward())
    assert flops == 3 * 2 * 5 * 8 * 4  # gradients of the input and of the weights
    assert loss.ndim == 0


def test_the_first_step_is_counted_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("multimodal.train.loop.peak_flops", lambda: 1e12)
    loop = tiny_run.loop(tmp_path, steps=2)
    loop.fit()
    weights = sum(p.numel() for p in loop.objective.model.parameters() if p.ndim == 2)
    assert loop.flops > 4 * weights
