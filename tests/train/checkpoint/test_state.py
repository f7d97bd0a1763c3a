"""Training states: complete or absent after a kill, a full disk or damage."""

import json
import re
import subprocess

import pytest
import torch

from multimodal.errors import CheckpointError, TrainingError
from multimodal.train.checkpoint.atomic import newest_state, partial_folder, save_state, saved_states, saving
from tests.helpers.folders import files_of_at_most


class KilledError(BaseException):
    """Stands for a SIGKILL: nothing after it runs, neither does a clean-up."""


def content(step: int, size: int = 1000) -> dict:
    return {"done": step, "weights": torch.full((size,), float(step)), "random": (3, (1, 2), None), "rate": [0.1]}


@pytest.fixture
def states(tmp_path):
    for step in (1, 2):
        save_state(tmp_path, step, content(step))
    return tmp_path


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_states_are_kept(states):
    save_state(states, 1000, content(1000))
    assert names(states) == ["state-000000002", "state-000001000"]
    save_state(states, 2000, content(2000), keep=3)
    assert names(states) == ["state-000000002", "state-000001000", "state-000002000"]
    place, found = newest_state(states)
    assert place.name == "state-000002000"
    assert found["done"] == 2000
    assert found["weights"].tolist() == [2000.0] * 1000
    assert found["random"] == (3, (1, 2), None)


def test_no_state_is_none(tmp_path):
    assert newest_state(tmp_path / "nothing") is None


def cut(file):
    file.write_bytes(file.read_bytes()[:-7])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


DAMAGE = {
    "cut": lambda path: cut(path / "state.pt"),
    "one bit": lambda path: flip(path / "state.pt"),
    "no file": lambda path: (path / "state.pt").unlink(),
    "no marker": lambda path: (path / "complete.json").unlink(),
    "cut marker": lambda path: cut(path / "complete.json"),
    "empty marker": lambda path: (path / "complete.json").write_text("{}"),
    "another format": lambda path: (path / "complete.json").write_text(json.dumps({"format": 99, "files": {}})),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_state_gives_the_one_before(states, caplog, kind):
    newest = saved_states(states)[-1]
    DAMAGE[kind](newest)
    assert newest_state(states)[1]["done"] == 1
    (line,) = caplog.messages
    assert line.startswith(f"{newest}: damaged, trying the one before: ")
    assert "\n" not in line
    DAMAGE[kind](saved_states(states)[0])
    with pytest.raises(CheckpointError, match="none of 2 saved states can be read"):
        newest_state(states)


def test_a_damaged_state_does_not_push_out_whole_ones(states):
    """The run goes on from step 1: its states are older by number than the damaged one of step 2."""
    save_state(states, 50, content(50))
    flip(states / "state-000000050" / "state.pt")
    assert newest_state(states)[1]["done"] == 2
    save_state(states, 3, content(3))
    assert names(states) == ["state-000000002", "state-000000003"]


def test_a_damaged_state_of_the_same_step_is_replaced(states):
    flip(states / "state-000000002" / "state.pt")
    save_state(states, 2, content(2))
    assert newest_state(states)[1]["done"] == 2
    assert names(states) == ["state-000000001", "state-000000002"]


def test_what_a_killed_save_left_is_removed_by_the_next(states):
    left = partial_folder(states, 3)
    left.mkdir()
    (left / "state.pt").write_bytes(b"half")
    assert newest_state(states)[1]["done"] == 2
    save_state(states, 4, content(4))
    assert names(states) == ["state-000000002", "state-000000004"]


def test_an_old_state_behind_a_link_stays_and_the_run_goes_on(states, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("disk") / "moved"
    (states / "state-000000001").rename(elsewhere)
    (states / "state-000000001").symlink_to(elsewhere)
    save_state(states, 3, content(3))
    assert names(states) == ["state-000000002", "state-000000003"]
    assert (elsewhere / "state.pt").exists()


def test_a_stop_while_saving_leaves_those_before(states):
    def killed_save() -> None:
        with saving(states, 3) as part:
            (part / "state.pt").write_bytes(b"half")
            raise KilledError

    with pytest.raises(KilledError):
        killed_save()
    assert names(states) == ["state-000000001", "state-000000002"]


def test_a_state_may_have_files_in_folders(tmp_path):
    with saving(tmp_path, 5) as part:
        (part / "shards").mkdir()
        (part / "shards" / "0.bin").write_bytes(b"abc")
    place = tmp_path / "state-000000005"
    assert list(json.loads((place / "complete.json").read_text())["files"]) == ["shards/0.bin"]


def test_a_state_never_runs_code(tmp_path):
    save_state(tmp_path, 1, content(1))
    save_state(tmp_path, 2, {"done": 2, "evil": subprocess.Popen})  # a reference that weights_only refuses
    assert newest_state(tmp_path)[1]["done"] == 1


def test_a_full_disk_leaves_the_states_before(states):
    with files_of_at_most(200_000):
        for step, size in ((3, 1_000_000), (4, 49_900)):  # far too large, by the last bytes
            line = f"{states}/state-00000000{step}: the state cannot be saved: File too large"
            with pytest.raises(TrainingError, match=re.escape(line)):
                save_state(states, step, content(step, size))
        save_state(states, 5, content(5))
    assert names(states) == ["state-000000002", "state-000000005"]
    assert newest_state(states)[1]["done"] == 5


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="the state cannot be saved: Not a directory"):
        save_state(tmp_path / "file" / "states", 1, content(1))
