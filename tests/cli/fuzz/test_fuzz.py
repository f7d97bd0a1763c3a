"""A few fuzz inputs of the kinds that need no other library."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

from .mutators import contents


def fuzz(*arguments: object, folder: Path) -> subprocess.CompletedProcess:
    """Run the fuzz in its own process, since this one has threads."""
    return subprocess.run(
        [sys.executable, "-m", "tests.cli.fuzz", *map(str, arguments), "--kept", str(folder / "kept")], cwd=ROOT,
        capture_output=True, text=True, timeout=240, env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip


@pytest.mark.slow
def test_a_few_inputs_of_each_kind_hold(tmp_path):
    done = fuzz("--inputs", 12, "--seed", 0, "--light", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.wav", "a.safetensors"])
def test_changes_follow_the_seed(name):
    data = b'{"a": [1, 2, {"b": "text"}], "c": null}\nx,y\n1,2\n' if name != "a.safetensors" else b"\2\0\0\0\0\0\0\0{}"
    made = [[contents(random.Random(seed), name, data) for seed in range(200)] for _ in range(2)]
    assert made[0] == made[1]
    assert sum(one != data for one in made[0]) > 150
