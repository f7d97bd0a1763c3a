"""A run that is killed at random moments goes on as if it had not been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    program = Path(__file__).with_name("kill_run.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(program.parent.parent)}
    command = [sys.executable, program, tmp_path, "50", "0"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout)
    assert result["kills"] == 50
    assert (result["damaged"], result["backwards"], result["lost"]) == (0, 0, 0)
    assert result["in a save"] >= 5  # else the kills would show little
    assert 0 < result["steps"] < 90  # the run was not at its end before
    assert result["equal"]
