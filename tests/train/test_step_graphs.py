"""Steps as CUDA graphs, on a CPU: a capture there only remembers the step, and a replay runs it."""

from types import SimpleNamespace

import pytest
import torch

from multimodal.data.batching import PaddedText
from multimodal.errors import UsageError
from multimodal.train import step_graphs
from multimodal.train.objectives.contrastive import Contrastive, Pairs
from multimodal.train.optim import OptimSettings
from multimodal.train.settings import LoopSettings
from multimodal.train.step_graphs import StepGraphs, shapes
from tests.helpers import tiny_run


@pytest.fixture
def captured(monkeypatch):
    """Counts replays. As in a graph, the inputs are those of the capture, into which each step's are copied."""
    count = SimpleNamespace(captures=0, replays=0)

    def capture(self, step):
        metrics = {}

        def replay():
            count.replays += 1
            metrics.update(step())

        count.captures += 1
        return replay, metrics

    monkeypatch.setattr(StepGraphs, "capture", capture)
    monkeypatch.setattr(LoopSettings, "__post_init__", lambda self: None)
    return count


@pytest.mark.ci
@pytest.mark.parametrize(("optimizer", "near"), [("adamw", 1e-6), ("muon", 1e-3)])  # Muon may round to bfloat16
def test_replayed_steps_are_the_usual_ones(tmp_path, captured, optimizer, near):
    """With dropout, a rate that changes, an average, and each third batch smaller."""
    optim = OptimSettings(rate=2**-7, optimizer=optimizer, schedule="wsd", warmup=4, average=0.9)  # exact in float32
    ends, losses = [], []
    for graphs in (False, True):
        loop = tiny_run.loop(tmp_path / str(graphs), steps=20, optim=optim, graphs=graphs)
        losses.append([])
        steps = loop.loader.start(0)
        for step in range(20):
            small = slice(3 if step % 3 == 2 else None)
            batches = [tiny_run.Batch(*(tensor[small] for tensor in batch)) for batch in next(steps).batches]
            losses[-1].append(loop.step(batches)["loss"])
        ends.append(loop)
    assert captured.captures == 2
    assert captured.replays == 20 - 2 * step_graphs.USUAL
    assert losses[1] == pytest.approx(losses[0], rel=near)
    assert int(ends[1].state.average.updates) == ends[0].state.average.updates == 20
    models = [tiny_run.learned(loop)["model"] for loop in ends]
    for name in [name for name in models[0] if not name.endswith("key.bias")]:  # whose gradient is rounding alone
        torch.testing.assert_close(models[1][name], models[0][name], rtol=near, atol=near)


def test_a_share_of_patches_that_ends_is_another_graph(tmp_path, captured):
    """The number of the step counts in `at_step` alone, before the shapes are compared."""
    model = torch.nn.Identity()
    model.logit_scale = torch.nn.Parameter(torch.zeros(()))
    objective = Contrastive(model, keep=lambda step: 0.5 if step < 5 else 1.0)
    batch = Pairs(torch.zeros(2, 3, 8, 8), torch.zeros(2, 4), order=torch.zeros(2, 8))
    keys = [shapes(objective.at_step(batch, step)) for step in range(10)]
    assert len(set(keys[:5])) == len(set(keys[5:])) == 1
    assert keys[0] != keys[5]


def test_numbers_on_the_host_make_another_graph():
    text = lambda ids: PaddedText(torch.zeros(2, ids, dtype=torch.int64), torch.tensor([1, 2]))
    assert shapes([text(4), [3, "a"]]) == shapes([text(4), [3, "a"]])
    for other in ([text(5), [3, "a"]], [text(4), [2, "a"]], [text(4), [3.0, "a"]], [text(4), (3, "a")]):
        assert shapes([text(4), [3, "a"]]) != shapes(other)
    assert shapes(SimpleNamespace()) != shapes(SimpleNamespace())


def test_a_step_that_draws_on_the_host_is_refused(tmp_path, captured, monkeypatch):
    def capture(self, step):
        torch.rand(())
        return step, {}

    loop = tiny_run.loop(tmp_path, graphs=True)
    monkeypatch.setattr(StepGraphs, "capture", capture)
    batches = next(loop.loader.start(0)).batches
    for _ in range(step_graphs.USUAL):
        loop.step(batches)
    with pytest.raises(UsageError, match="graphs is not possible: the step draws random numbers on the host"):
        loop.step(batches)


@pytest.mark.parametrize("changes", [{}, {"device": "cpu", "shard": True}])
def test_graphs_need_a_gpu(tmp_path, changes):
    with pytest.raises(UsageError, match=r"device .*a GPU with graphs"):
        tiny_run.settings(tmp_path, graphs=True, optim=OptimSettings(), **changes)
