"""Several processes equal one: the contrastive loss, a training run, a shared state. Signals to a run."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from multimodal.data.loader import shuffled
from multimodal.errors import UsageError
from multimodal.train.checkpoint import atomic as states
from tests.helpers import tiny_run
from tests.helpers.paths import ROOT
from tests.helpers.processes import several_cases
from tests.helpers.processes.programs import LIMIT, started
from tests.helpers.processes.several import spawn
from tests.helpers.processes.several_cases import ADAMW
from tests.helpers.spread import spread, thin

EXACT = {"atol": 1e-6, "rtol": 1e-6}


@pytest.mark.ci
@pytest.mark.parametrize(("image_counts", "text_counts"), [([3, 5], [4, 2]), ([3, 4, 1], [2, 0, 5])])
def test_contrastive_loss_across_processes_is_that_of_one(image_counts, text_counts):
    found = spawn(several_cases.contrasts, len(image_counts), image_counts, text_counts)
    for sigmoid in (False, True):
        expected = several_cases.contrast(image_counts, text_counts, sigmoid)
        loss, images, captions, scale, bias = zip(*(each[sigmoid] for each in found), strict=True)
        together = [[sum(each[0] for each in x)] for x in (loss, scale, bias)]  # of a process: its share
        features = [[value for each in x for value in each] for x in (images, captions)]
        for mine, theirs in zip((together[0], *features, *together[1:]), expected, strict=True):
            assert_close(torch.tensor(mine), torch.tensor(theirs), **EXACT)


def run(world: int, *args, **options) -> dict:
    """Train in `world` processes; the first one's report."""
    if world == 1:
        return spawn(several_cases.train, 1, *args, options)[0]
    first, *others = spawn(several_cases.train, world, *args, options)
    assert [each["end"] for each in others] == ["SystemExit: 0"] * (world - 1), others
    return first


def same(mine: dict, theirs: dict, since: int = 0) -> None:
    assert mine["end"] == theirs["end"] == "done"
    losses = {step: loss for step, loss in theirs["losses"].items() if step > since}
    assert mine["losses"] == pytest.approx(losses, abs=1e-6)
    assert mine["figures"] == pytest.approx({s: x for s, x in theirs["figures"].items() if s > since}, abs=1e-6)
    for name, weights in theirs["weights"].items():
        assert_close(torch.tensor(mine["weights"][name]), torch.tensor(weights), **EXACT)


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "micro"), [("softmax", 2), ("sigmoid", 1)])
def test_two_processes_train_a_clip_as_one_does(tmp_path, kind, micro):
    steps = {"steps": 4, "accumulate": micro}
    one, two = (run(world, "clip", tmp_path / str(world), kind, **steps) for world in (1, 2))
    same(two, one)


@pytest.mark.ci
def test_a_run_of_two_processes_goes_on_with_one_and_three(tmp_path):
    options = {"steps": 8, "save_every": 4}
    one, two = (run(world, "images", tmp_path / str(world), **options) for world in (1, 2))
    same(two, one)
    for world in (1, 3):
        there = halfway(tmp_path / "2", tmp_path / f"resumed-{world}")
        same(run(world, "images", there, resume=True, **options), two, since=4)


def halfway(run: Path, to: Path) -> Path:
    """A copy of the run as it was after step 4."""
    shutil.copytree(run / "states" / "state-000000004", to / "states" / "state-000000004")
    return to


@pytest.mark.ci
def test_weights_in_shards_train_as_whole_ones_and_go_on_with_others(tmp_path):
    options = {"steps": 6, "save_every": 4, "evaluate_every": 2}
    one = run(1, "images", tmp_path / "1", **options)
    same(run(2, "images", tmp_path / "2", shard=True, **options), one)
    assert len(list((tmp_path / "2" / "states" / "state-000000004" / "shards").iterdir())) == 2
    for world, shard in ((3, True), (1, False)):
        there = halfway(tmp_path / "2", tmp_path / f"resumed-{world}-{shard}")
        same(run(world, "images", there, resume=True, shard=shard, **options), one, since=4)
    refused = spawn(several_cases.train, 1, "images", halfway(tmp_path / "1", tmp_path / "whole"),
                    options | {"resume": True, "shard": True})  # fmt: skip
    assert refused[0]["end"].endswith("does not fit this run: it was saved without shard")


@pytest.mark.ci
def test_two_machines_of_two_processes_train_as_one_and_go_on_as_others(tmp_path):
    options = {"steps": 4, "save_every": 2, "evaluate_every": 2}
    one = run(1, "images", tmp_path / "1", **options)
    same(run(4, "images", tmp_path / "4", shard=True, hybrid=True, inside=2, **options), one)
    there = tmp_path / "4" / "states"
    shutil.rmtree(there / "state-000000004")
    same(run(2, "images", tmp_path / "4", shard=True, resume=True, **options), one, since=2)
    refused = spawn(several_cases.train, 3, "images", tmp_path / "3", {"shard": True, "hybrid": True, "inside": 2})
    assert refused[0] == "UsageError: hybrid needs as many processes on each machine (got 3 in all, 2 here)"


@pytest.mark.parametrize("reduce", spread(["bfloat16", "float32"], 2, pytest.mark.slow, pytest.mark.ci))
def test_weights_and_gradients_that_travel_in_bfloat16_train_nearly_the_same(tmp_path, reduce):
    whole = run(2, "half", tmp_path / "1", steps=5)
    shards = run(2, "half", tmp_path / "2", steps=5, shard=True, reduce=reduce)
    assert shards["losses"] == pytest.approx(whole["losses"], rel=0.02)
    assert shards["losses"] != whole["losses"]


@pytest.mark.slow
def test_a_clip_in_shards_trains_as_a_whole_one(tmp_path):
    one, two = (run(n, "clip", tmp_path / str(n), "sigmoid", steps=3, shard=n > 1) for n in (1, 2))
    same(two, one)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The report of one process with these parts frozen."""
    return functools.cache(lambda frozen: run(1, "chats", tmp_path_factory.mktemp("one") / "run", frozen, steps=4))


@thin(3, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize(
    ("frozen", "shard"), [(("image", "audio"), False), (("image", "audio"), True), (("audio",), False)]
)
def test_images_that_some_processes_lack_train_as_in_one(tmp_path, alone, frozen, shard):
    same(run(2, "chats", tmp_path, frozen, steps=4, shard=shard), alone(frozen))


@pytest.mark.ci
def test_shards_need_frozen_encoders(tmp_path):
    ends = spawn(several_cases.train, 2, "chats", tmp_path, ("audio",), {"shard": True})
    assert ends == ["UsageError: shard needs frozen encoders, since not every batch runs them"] * 2


@pytest.mark.ci
def test_a_full_disk_in_one_process_leaves_no_damaged_state(tmp_path):
    found = spawn(several_cases.full_disk, 2, tmp_path)
    assert all("No space left on device" in each["end"] for each in found), found
    assert list((tmp_path / "states").iterdir()) == []


def test_what_shards_cannot_do_is_refused(tmp_path):
    for changes, cause in (
        ({}, "optimizer must be adamw"),
        ({"optim": ADAMW, "precision": "float16"}, "bfloat16 with"),
    ):
        with pytest.raises(UsageError, match=cause):
            tiny_run.settings(tmp_path, shard=True, **changes)


@pytest.mark.ci
def test_parameters_without_a_gradient_are_named(tmp_path):
    ends = spawn(several_cases.lonely, 2, tmp_path)
    assert set(ends) == {"TrainingError: 1 parameters get no gradient, freeze them: model.spare"}


def test_a_signal_to_one_process_stops_all_with_the_state_saved(tmp_path):
    found = spawn(several_cases.trouble, 2, tmp_path, "signal")
    assert [(each["end"], each["done"]) for each in found] == [("Stopped: SIGTERM", 3)] * 2
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["state-000000003"]


@pytest.mark.ci
def test_an_error_in_one_process_ends_all(tmp_path):
    first, second = spawn(several_cases.trouble, 2, tmp_path, "error")
    assert (first["end"], first["done"]) == ("TrainingError: process 1 ended: image-7.png: broken", 3)
    assert (second["end"], second["done"]) == ("DataError: image-7.png: broken", 3)


@pytest.mark.ci
def test_a_killed_process_ends_the_others(tmp_path):
    first, second = spawn(several_cases.trouble, 2, tmp_path, "kill")
    assert second == "died"
    assert first["end"].startswith("TrainingError: process 0: another process has ended"), first["end"]


@pytest.mark.ci
def test_what_is_not_finite_in_one_process_changes_nothing_in_any(tmp_path):
    item = shuffled(28, 8, 0)(0)[1][1]  # the second of the second batch is read by the second process
    found = spawn(several_cases.train, 2, "images", tmp_path, {"steps": 3, "nan": (item,)})
    assert [each["not_finite"] for each in found] == [1, 1]
    assert torch.tensor(found[0]["weights"]["head.weight"]).isfinite().all()


PROGRAM = """
import sys
import torch
from tests.helpers import tiny_run
import multimodal.train.checkpoint.atomic as state
from pathlib import Path
from dataclasses import dataclass
from multimodal.train.loop import LoopSettings
from multimodal.train.recipe_cli import start

torch.set_num_threads(1)

@dataclass
class Settings:
    loop: LoopSettings

def main(settings: Settings):
    loop = tiny_run.loop(settings.loop.run, steps=100_000, workers=settings.loop.workers, save_every=100_000)
    step, save = loop.step, torch.save
    def told(batches):
        metrics = step(batches)
        if loop.done == 2:
            print("training", flush=True)
        return metrics
    def slow(*values):
        print("saving", flush=True)
        sys.stdin.read()  # until the second signal is sent
        save(*values)
    loop.step, torch.save = told, slow
    loop.fit()

start(main)
"""


@pytest.mark.parametrize(
    ("number", "workers", "group"),
    [
        pytest.param(signal.SIGTERM, 2, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 0, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, True, marks=pytest.mark.ci),
    ],
    ids=["SIGTERM", "SIGUSR1", "SIGINT"],
)
def test_a_signal_saves_and_ends_with_75(tmp_path, number, workers, group):
    """Once while it trains, and again while it saves; to the process, or to its workers too."""
    flags = ["--run", tmp_path / "run", "--steps", "100000", "--workers", str(workers)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with started([sys.executable, "-c", PROGRAM, *flags], cwd=ROOT, text=True, **pipes) as run:
        send = (lambda: os.killpg(run.pid, number)) if group else (lambda: run.send_signal(number))
        assert run.stdout.readline() == "training\n", run.stderr.read()
        send()
        assert run.stdout.readline() == "saving\n"
        send()
        out, err = run.communicate(timeout=LIMIT)
    assert run.returncode == 75, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"-c: stopped by {number.name}; the state is saved, continue with --resume"
    assert out == ""
    assert states.newest_state(tmp_path / "run" / "states")[1]["done"] >= 2
