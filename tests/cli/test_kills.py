"""Runs and commands that are stopped or killed at random moments go on as if they had not been."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.processes.programs import forked


def result(program: str, folder: Path, count: int, seed: int = 0) -> dict:
    command = [sys.executable, "-m", f"tests.helpers.processes.{program}", folder, str(count), str(seed)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20 * count + 200)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    found = result("kill_run", tmp_path, 50)
    assert found["kills"] == 50
    assert (found["damaged"], found["backwards"], found["lost"]) == (0, 0, 0)
    assert found["in a save"] >= 5  # else the kills would show little
    assert 0 < found["steps"] < 90  # the run was not at its end before
    assert found["equal"]


@pytest.mark.slow
@pytest.mark.timeout(20_000)
def test_signals_at_random_moments(tmp_path):
    found = result("signal_run", tmp_path, 1000)
    assert found["stopped"] == 1000
    assert found["codes"].keys() <= {"0", "75"}  # 0: at its end before the signal
    assert (found["hung"], found["lost"], found["left behind"], found["differ"]) == (0, 0, 0, 0)


COMMANDS = """
import json, pathlib, sys
from tests.helpers.processes.kill_commands import many
print(json.dumps(many(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 0)))
"""


@pytest.mark.parametrize("count", [pytest.param(4, marks=pytest.mark.ci), pytest.param(160, marks=pytest.mark.slow)])
def test_kills_of_commands_at_random_moments(tmp_path, count):
    with forked(COMMANDS, tmp_path, count, limit=20 * count + 200) as program:
        out, err = program.communicate(timeout=20 * count + 200)
    assert program.returncode == 0, err[-3000:]
    found = json.loads(out)
    assert found["kills"] == count
    assert (found["lost"], found["differ"]) == (0, 0)
