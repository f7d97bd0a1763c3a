"""Several processes give what one gives: the contrastive loss across them, a training, and a state they share."""

import shutil
from pathlib import Path

import pytest
import several_cases
import tiny_run
import torch
from several import spawn
from several_cases import ADAMW
from torch.testing import assert_close

from multimodal.data.loader import shuffled
from multimodal.errors import UsageError

EXACT = {"atol": 1e-6, "rtol": 1e-6}


@pytest.mark.parametrize(("pictures", "texts"), [([3, 5], [4, 2]), ([3, 4, 1], [2, 0, 5])])
def test_contrastive_loss_across_processes_is_that_of_one(pictures, texts):
    found = spawn(several_cases.contrasts, len(pictures), pictures, texts)
    for sigmoid in (False, True):
        expected = several_cases.contrast(pictures, texts, sigmoid, None)
        for exchange in ("gather", "ring"):
            loss, images, captions, scale, bias = zip(*(each[sigmoid, exchange] for each in found), strict=True)
            together = [[sum(each[0] for each in x)] for x in (loss, scale, bias)]  # of a process: its share
            features = [[value for each in x for value in each] for x in (images, captions)]
            for mine, theirs in zip((together[0], *features, *together[1:]), expected, strict=True):
                assert_close(torch.tensor(mine), torch.tensor(theirs), **EXACT)


def run(world: int, *args, **options) -> dict:
    """What the first of `world` processes has to say of a training."""
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


@pytest.mark.parametrize(("kind", "exchange", "micro"), [("softmax", "gather", 2), ("sigmoid", "ring", 1)])
def test_two_processes_train_a_clip_as_one_does(tmp_path, kind, exchange, micro):
    steps = {"steps": 4, "accumulate": micro}
    one, two = (run(world, "clip", tmp_path / str(world), kind, exchange, **steps) for world in (1, 2))
    same(two, one)


def test_a_run_of_two_processes_goes_on_with_one_and_three(tmp_path):
    options = {"steps": 8, "save_every": 4}
    one, two = (run(world, "pictures", tmp_path / str(world), **options) for world in (1, 2))
    same(two, one)
    for world in (1, 3):
        there = halfway(tmp_path / "2", tmp_path / f"resumed-{world}")
        same(run(world, "pictures", there, resume=True, **options), two, since=4)


def halfway(run: Path, to: Path) -> Path:
    """A copy of the run as it was after step 4."""
    shutil.copytree(run / "states" / "state-000000004", to / "states" / "state-000000004")
    return to


def test_weights_in_shards_train_as_whole_ones_and_go_on_with_others(tmp_path):
    options = {"steps": 6, "save_every": 4, "evaluate_every": 2}
    one = run(1, "pictures", tmp_path / "1", **options)
    same(run(2, "pictures", tmp_path / "2", shard=True, **options), one)
    assert len(list((tmp_path / "2" / "states" / "state-000000004" / "shards").iterdir())) == 2
    for world, shard in ((3, True), (1, False)):
        there = halfway(tmp_path / "2", tmp_path / f"resumed-{world}-{shard}")
        same(run(world, "pictures", there, resume=True, shard=shard, **options), one, since=4)
    refused = spawn(several_cases.train, 1, "pictures", halfway(tmp_path / "1", tmp_path / "whole"),
                    options | {"resume": True, "shard": True})  # fmt: skip
    assert refused[0]["end"].endswith("does not fit this run: it was saved without --shard")


def test_a_clip_in_shards_trains_as_a_whole_one(tmp_path):
    one, two = (run(n, "clip", tmp_path / str(n), "sigmoid", "ring", steps=3, shard=n > 1) for n in (1, 2))
    same(two, one)


def test_a_full_disk_in_one_process_leaves_no_damaged_state(tmp_path):
    found = spawn(several_cases.full_disk, 2, tmp_path)
    assert all("No space left on device" in each["end"] for each in found), found
    assert list((tmp_path / "states").iterdir()) == []


def test_what_shards_cannot_do_is_refused(tmp_path):
    for changes, cause in (
        ({}, "--optimizer muon: must be adamw"),
        ({"optim": ADAMW, "precision": "float16"}, "bfloat16 with"),
    ):
        with pytest.raises(UsageError, match=cause):
            tiny_run.settings(tmp_path, shard=True, **changes)


def test_parameters_without_a_gradient_are_named(tmp_path):
    ends = spawn(several_cases.lonely, 2, tmp_path)
    assert set(ends) == {"TrainingError: 1 parameters get no gradient, freeze them: model.spare"}


def test_a_signal_to_one_process_stops_all_with_the_state_saved(tmp_path):
    found = spawn(several_cases.trouble, 2, tmp_path, "signal")
    assert [(each["end"], each["done"]) for each in found] == [("Stopped: SIGTERM", 3)] * 2
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["state-000000003"]


def test_an_error_in_one_process_ends_all(tmp_path):
    first, second = spawn(several_cases.trouble, 2, tmp_path, "error")
    assert (first["end"], first["done"]) == ("TrainingError: process 1 ended: picture-7.png: broken", 3)
    assert (second["end"], second["done"]) == ("DataError: picture-7.png: broken", 3)


def test_a_killed_process_ends_the_others(tmp_path):
    first, second = spawn(several_cases.trouble, 2, tmp_path, "kill")
    assert second == "died"
    assert first["end"].startswith("TrainingError: process 0: another process has ended"), first["end"]


def test_what_is_not_finite_in_one_process_changes_nothing_in_any(tmp_path):
    item = shuffled(28, 8, 0)(0)[1][1]  # the second of the second batch is read by the second process
    found = spawn(several_cases.train, 2, "pictures", tmp_path, {"steps": 3, "nan": (item,)})
    assert [each["not_finite"] for each in found] == [1, 1]
    assert torch.tensor(found[0]["weights"]["head.weight"]).isfinite().all()
