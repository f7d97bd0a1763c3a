"""The loop: exact resume, what is not finite, signals, full disks, precisions, compiled and recomputed blocks."""

import errno
import math
import multiprocessing.queues
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from multimodal.errors import CheckpointError, TrainingError, UsageError
from multimodal.train.checkpoint import atomic as states
from multimodal.train.device import moved
from multimodal.train.optim import OptimSettings
from multimodal.train.signals import Stopped
from tests.helpers import tiny_run
from tests.helpers.spread import spread

STEPS = 8  # two epochs of three batches, and two batches


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """Without TensorBoard files, which would take longer than the training, and threads, which so small matrices do
    not pay for. For the whole module: sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multimodal.train.loop.TrainingLog", tiny_run.Quiet)
        yield
    torch.set_num_threads(threads)


def stop_at(loop, *steps: int):
    """The loop is asked to stop during these steps."""
    step = loop.step

    def stopping(batches):
        if loop.done + 1 in steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(batches)

    loop.step = stopping
    return loop


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    loop = tiny_run.loop(tmp_path_factory.mktemp("unbroken"), steps=STEPS)
    loop.fit()
    return loop


# at the first step, within an epoch, at its end (3, 6), twice in one epoch, at the last step but one
POINTS = [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (1, 2), (4, 5), (2, 4, 6)]
RUNS = [*((points, 0) for points in POINTS), ((4, 5), 2), ((2,), 2), ((3,), 2)]


@pytest.mark.parametrize(("points", "workers"), spread(RUNS, 2, pytest.mark.slow, pytest.mark.ci), ids=str)
def test_a_resumed_run_is_the_unbroken_one(tmp_path, unbroken, points, workers):
    for number, point in enumerate(points):
        loop = stop_at(tiny_run.loop(tmp_path, steps=STEPS, workers=workers, resume=number > 0), point)
        with pytest.raises(Stopped, match="SIGTERM"):
            loop.fit()
        assert loop.done == point
        torch.manual_seed(12345)  # the next process has other random states
    loop = tiny_run.loop(tmp_path, steps=STEPS, workers=workers, resume=True)
    loop.fit()
    assert loop.done == STEPS
    tiny_run.assert_same(tiny_run.learned(loop), tiny_run.learned(unbroken))


@pytest.mark.ci
def test_the_run_depends_on_dropout_augmentation_and_order(tmp_path, unbroken):
    """Else the test above would show nothing."""
    final = unbroken.objective.model.state_dict()
    for name, options in {"seed": {"seed": 1}, "dropout": {"net": tiny_run.model(drop=0.0)}}.items():
        loop = tiny_run.loop(tmp_path / name, steps=STEPS, **options)
        loop.fit()
        assert not torch.equal(loop.objective.model.state_dict()["head.weight"], final["head.weight"])


def test_accumulated_micro_batches_are_the_whole_batch(tmp_path):
    """Without random augmentation per micro-batch."""
    loops = []
    for accumulate in (1, 2, 4):
        net = tiny_run.model(drop=0.0).double()
        loop = tiny_run.loop(tmp_path / str(accumulate), accumulate=accumulate, net=net)
        batches = next(loop.loader.start(0)).batches
        loop.objective.backward(loop, [moved(batch, "cpu", torch.float64) for batch in batches])
        loops.append([p.grad for p in net.parameters()])
    assert_close(loops[0], loops[1], atol=1e-6, rtol=1e-6)
    assert_close(loops[0], loops[2], atol=1e-6, rtol=1e-6)


def test_resume_without_a_state_begins(tmp_path, unbroken, caplog):
    caplog.set_level("INFO")
    loop = tiny_run.loop(tmp_path, steps=STEPS, resume=True)
    loop.fit()
    assert f"--resume: no state in {tmp_path / 'states'}, starting a new run" in caplog.messages
    tiny_run.assert_same(tiny_run.learned(loop), tiny_run.learned(unbroken))


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    tiny_run.loop(tmp_path, steps=1).fit()
    line = r"run .*: already holds state-000000001; continue it with --resume or name a new folder"
    with pytest.raises(UsageError, match=line):
        tiny_run.loop(tmp_path, steps=2).fit()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_ends_before_its_peak_rate_says_so(tmp_path, caplog, steps):
    tiny_run.loop(tmp_path, steps=steps).fit()
    line = "warmup 2: 1 steps end before the peak learning rate"
    assert caplog.messages.count(line) == (steps == 1)


def test_a_finished_run_goes_on_with_more_steps(tmp_path, caplog):
    caplog.set_level("INFO")
    tiny_run.loop(tmp_path, steps=2).fit()
    loop = tiny_run.loop(tmp_path, steps=2, resume=True)
    loop.fit()
    assert loop.done == 2
    optim = OptimSettings(rate=1e-3, optimizer="muon", warmup=2, average=0.9, weight_decay=0.3)
    loop = tiny_run.loop(tmp_path, steps=5, resume=True, optim=optim)
    loop.fit()
    assert loop.done == 5
    changes = "--rate 0.001 (was 0.01), --weight_decay 0.3 (was 0.05), --steps 5 (was 2)"
    assert caplog.messages[-1] == f"resumed after step 2, now with {changes}"
    assert loop.state.optimizers[0].param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(("changes", "cause"), [
    ({"width": 24}, "size mismatch for "),
    ({"optim": OptimSettings()}, "expected a state of AdamW, got one of Muon"),
])  # fmt: skip
def test_a_state_that_does_not_fit_is_said_in_one_line(tmp_path, changes, cause):
    tiny_run.loop(tmp_path, steps=1).fit()
    with pytest.raises(CheckpointError) as caught:
        tiny_run.loop(tmp_path, steps=2, resume=True, **changes).fit()
    assert str(caught.value).startswith(f"{tmp_path / 'states' / 'state-000000001'}: does not fit this run: ")
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


# what is not finite


def poisoned(loop, steps: list[int], kind: str):
    """In these steps the gradient (and the loss) is not finite."""
    backward = loop.objective.backward

    def poisoning(engine, batches):
        metrics = backward(engine, batches)
        if loop.done + 1 in steps:
            loop.objective.model.head.weight.grad[0, 0] = math.inf if kind == "inf gradient" else math.nan
            return metrics | ({"loss": math.nan} if kind == "nan loss" else {})
        return metrics

    loop.objective.backward = poisoning
    return loop


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])  # the host looks first; the device leaves the step out
@pytest.mark.parametrize("kind", ["nan loss", "nan gradient", "inf gradient"])
def test_what_is_not_finite_changes_nothing(tmp_path, caplog, kind, optimizer):
    optim = OptimSettings(rate=1e-2, optimizer=optimizer, schedule="wsd", warmup=0, average=0.9)
    loop = poisoned(tiny_run.loop(tmp_path, steps=3, optim=optim), [2, 3], kind)
    batches = loop.loader.start(0)
    loop.step(next(batches).batches)
    before = tiny_run.learned(loop)
    loop.step(next(batches).batches)
    after = tiny_run.learned(loop)
    for name in ("model", "optimizers", "average"):
        tiny_run.assert_same(before[name], after[name])
    assert (loop.not_finite, loop.in_row, loop.done) == (1, 1, 2)
    assert caplog.messages[0].startswith("step 2 skipped: loss ")


@pytest.mark.ci
def test_figures_that_are_read_a_step_later_are_the_same(tmp_path):
    """As on a GPU. What is logged and saved has waited for its own step."""
    rows, ends = [], []
    for delay in (0, 1):
        optim, run = OptimSettings(rate=1e-2, average=0.9), tmp_path / str(delay)
        loop = poisoned(tiny_run.loop(run, steps=7, optim=optim, log_every=3, save_every=2), [2, 4], "nan gradient")
        loop.pending.delay = delay
        loop.fit()
        # not how long it took
        rows.append([(n, found, {**more, "wait": 0}) for n, found, more in loop.log.rows])
        ends.append(tiny_run.learned(loop))
    assert [n for n, _, _ in rows[0]] == [1, 2, 3, 4, 5, 6, 7]
    assert repr(rows[0]) == repr(rows[1])
    tiny_run.assert_same(*ends)


def test_a_run_ends_after_many_in_a_row(tmp_path):
    loop = poisoned(tiny_run.loop(tmp_path, steps=20, save_every=1, most_not_finite=3), [2, 4, 5, 6, 7], "nan loss")
    line = r"step 6: 3 steps in a row were not finite \(most_not_finite\); the newest state is of step 5"
    with pytest.raises(TrainingError, match=line):
        loop.fit()
    assert loop.not_finite == 4
    _, found = states.newest_state(tmp_path / "states")
    assert all(tensor.isfinite().all() for tensor in found["model"].values())
    assert found["counters"]["in_row"] == 2  # a resumed run keeps its count


def test_real_items_that_are_not_finite(tmp_path):
    """A NaN in the data, all the way through the model."""
    loop = tiny_run.loop(tmp_path, tiny_run.Images(nan=(0,)), steps=9)
    model = loop.fit()
    assert loop.not_finite >= 2
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_batch_norms_forget_what_was_not_finite(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(240, 5))
    loop = tiny_run.loop(tmp_path, tiny_run.Images(nan=(0, 1)), net=net, optim=OptimSettings(average=0.9))
    loop.fit()
    assert loop.not_finite
    assert net[1].running_mean.isfinite().all()
    assert net[1].num_batches_tracked == 2 * (7 - loop.not_finite)


def test_broken_items_are_counted_and_a_step_without_items_changes_nothing(tmp_path):
    loop = tiny_run.loop(tmp_path, tiny_run.Images(broken=(3, 9)), steps=6)
    loop.fit()
    assert 2 <= loop.loader.broken <= 4  # two epochs, of which each leaves out four items
    before = tiny_run.learned(loop)
    assert math.isnan(loop.step([])["loss"])
    tiny_run.assert_same(before["model"], tiny_run.learned(loop)["model"])
    assert loop.not_finite == 0


def test_overflows_of_the_loss_scale_are_no_faults(tmp_path):
    loop = tiny_run.loop(tmp_path, steps=4)
    loop.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)  # overflows in float32
    before = tiny_run.learned(loop)["model"]
    batches = loop.loader.start(0)
    loop.step(next(batches).batches)
    assert (loop.state.scaler.get_scale(), loop.not_finite) == (2.0**126, 0)
    tiny_run.assert_same(before, tiny_run.learned(loop)["model"])
    loop.state.scaler.update(2.0**10)
    metrics = loop.step(next(batches).batches)
    assert loop.state.scaler.get_scale() == 2.0**10
    assert 0 < metrics["norm"] < 100  # of the gradient itself, not of the scaled one
    assert not torch.equal(before["head.weight"], loop.objective.model.head.weight)
    loop.state.scaler.update(1.0)
    poisoned(loop, [3], "nan gradient")
    loop.step(next(batches).batches)
    assert loop.not_finite == 1  # at a scale of 1 there is no overflow


# saving


def test_a_full_disk_stops_the_run_at_its_end_only(tmp_path, monkeypatch, caplog):
    loop = tiny_run.loop(tmp_path, steps=6, save_every=2)
    save = torch.save

    def full(state, file):
        if state["done"] >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match="state-000000006: the state cannot be saved: No space left on device"):
        loop.fit()
    assert loop.done == 6
    assert sum("training continues" in message for message in caplog.messages) == 2
    assert [path.name for path in states.saved_states(tmp_path / "states")] == ["state-000000002"]
    monkeypatch.setattr(torch, "save", save)
    assert tiny_run.loop(tmp_path, steps=6, save_every=2, resume=True).fit()


def test_a_save_that_fails_once_is_made_good_by_the_next(tmp_path, monkeypatch):
    save = torch.save

    def full(state, file):
        if state["done"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    tiny_run.loop(tmp_path, steps=4, save_every=2).fit()


def test_metrics_that_cannot_be_written_do_not_end_the_run(tmp_path, caplog):
    quiet = tiny_run.Quiet()
    quiet.path = tmp_path  # a folder
    quiet.log({"step": 3, "loss": 1.0})
    assert caplog.messages == [f"{tmp_path}: step 3 is not logged: Is a directory"]


# evaluation


def test_the_average_is_evaluated_at_its_steps_and_after_the_last(tmp_path):
    seen = []

    def evaluate(model, step):
        assert not model.training
        seen.append((step, model.state_dict()["head.weight"].clone()))
        return {"figure": 1.0}

    loop = tiny_run.loop(tmp_path, steps=5, evaluate=evaluate, evaluate_every=2)
    model = loop.fit()
    assert [step for step, _ in seen] == [2, 4, 5]
    assert torch.equal(seen[-1][1], loop.state.average.weights["head.weight"])
    assert torch.equal(seen[-1][1], model.head.weight)
    assert not torch.equal(loop.objective.model.head.weight, model.head.weight)


def test_evaluation_and_saving_are_announced(tmp_path, capsys):
    loop = tiny_run.loop(tmp_path, steps=2, evaluate=lambda model, step: {}, evaluate_every=1, save_every=2)
    loop.fit()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["step 1/2: evaluating", "step 2/2: evaluating", "step 2/2: saving"]


def test_a_signal_ends_an_evaluation_at_its_next_batch_and_resume_makes_it_good(tmp_path):
    seen = []

    def evaluate(model, step):
        seen.append(step)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            model(torch.zeros(1, 3, 8, 12))
            pytest.fail("the evaluation goes on")
        return {}

    with pytest.raises(Stopped, match="SIGUSR1"):
        tiny_run.loop(tmp_path, steps=3, evaluate=evaluate, evaluate_every=2).fit()
    resumed = tiny_run.loop(tmp_path, steps=3, evaluate=evaluate, evaluate_every=2, resume=True)
    resumed.fit()
    assert (seen, resumed.log.given[-1]) == ([2, 2, 3], False)  # step 2 was not evaluated


@pytest.mark.ci
def test_a_signal_within_a_queue_does_not_hang_the_run(tmp_path, monkeypatch):
    """An exception out of the handler would leave the queue's lock taken, and the end waits for it."""
    enter = threading.Condition.__enter__
    entered = []

    def signalled(condition):
        result = enter(condition)
        if condition in notempty and threading.get_ident() == threading.main_thread().ident:
            entered.append(os.kill(os.getpid(), signal.SIGTERM))
        return result

    notempty = []
    put = multiprocessing.queues.Queue.put

    def puts(queue, *order):
        notempty[:] = [queue._notempty] if run.done == 2 else []
        put(queue, *order)
        notempty.clear()

    monkeypatch.setattr(threading.Condition, "__enter__", signalled)
    monkeypatch.setattr(multiprocessing.queues.Queue, "put", puts)
    run = tiny_run.loop(tmp_path, steps=1000, workers=2)
    with pytest.raises(Stopped, match="SIGTERM"):
        run.fit()
    assert entered
    assert states.newest_state(tmp_path / "states")[1]["done"] >= 2
    assert not multiprocessing.active_children()


@pytest.mark.ci
def test_a_signal_ends_the_wait_for_slow_data(tmp_path):
    class Slow(tiny_run.Images):
        def read(self, key):
            if not multiprocessing.parent_process():
                pytest.fail("read in the run's own process")
            threading.Event().wait(3600)

    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Stopped, match="SIGTERM"):
        tiny_run.loop(tmp_path, Slow(), steps=3, workers=2).fit()
    assert states.newest_state(tmp_path / "states")[1]["done"] == 0
    assert not multiprocessing.active_children()


def test_a_signal_after_the_last_step_is_not_lost(tmp_path):
    def save():
        done(loop)
        os.kill(os.getpid(), signal.SIGTERM)

    loop = tiny_run.loop(tmp_path, steps=2, save_every=2)
    done = type(loop).save
    loop.save = save
    with pytest.raises(Stopped, match="SIGTERM"):
        loop.fit()
    assert states.newest_state(tmp_path / "states")[1]["done"] == 2
