"""A run that another call would break: fewer steps than its state, other batches, a folder in use."""

import subprocess
import sys

import pytest

from multimodal.errors import UsageError
from tests.helpers import tiny_run


def test_fewer_steps_than_the_state_has_are_refused(tmp_path):
    tiny_run.loop(tmp_path, steps=4).fit()
    with pytest.raises(UsageError, match="steps must be that of state-000000004 or more"):
        tiny_run.loop(tmp_path, steps=2, resume=True).fit()


def test_a_resumed_run_with_other_batches_says_so(tmp_path, caplog, monkeypatch):
    tiny_run.loop(tmp_path, steps=1).fit()
    tiny_run.loop(tmp_path, steps=2, resume=True).fit()
    assert "an epoch had" not in caplog.text
    monkeypatch.setattr(tiny_run, "BATCH", 4)
    tiny_run.loop(tmp_path, steps=3, resume=True).fit()
    assert "an epoch had 28 items in 3 batches before, now 28 items in 7 batches" in caplog.text


def test_a_run_in_use_is_refused_and_a_killed_one_is_not(tmp_path):
    """By another process, as the system's locks are."""
    code = "import sys, time, filelock\nwith filelock.FileLock(sys.argv[1]): print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "run.lock"], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(UsageError, match=f"run {tmp_path}: in use by another process"):
            tiny_run.loop(tmp_path, steps=1).fit()
        other.kill()
    assert (tmp_path / "run.lock").exists()
    tiny_run.loop(tmp_path, steps=1).fit()
    assert not (tmp_path / "run.lock").exists()
