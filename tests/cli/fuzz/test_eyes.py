"""The fuzz detects each breach: children that do what no command may do."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.spread import thin

from . import child
from .child import Case, Place, problems

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # this process may have threads


def crash() -> None:
    faulthandler.disable()  # which would print a page of it
    os.kill(os.getpid(), signal.SIGSEGV)


def escape() -> None:
    Path("../outside/new.txt").write_text("x")
    Path("../outside/secret.txt").write_text("x")


def hang() -> None:
    while True:
        pass


def start() -> None:
    subprocess.run(["true"], check=True, timeout=300)


def leave() -> None:
    if os.fork() == 0:
        time.sleep(60)


def chatter() -> None:
    os.write(2, b"[aac @ 0x1] noise\n")


BREACHES = {
    crash: "dies: SIGSEGV", escape: "file appeared: outside/new.txt", hang: "hangs", start: "reaches out",
    leave: "left a process", chatter: "line of another hand", (lambda: 1 / 0): "ZeroDivisionError",
    (lambda: os._exit(3)): "exit code 3", (lambda: sys.exit(1)): "fails without a word",
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    monkeypatch.chdir(tmp_path)
    made = Place(tmp_path / "root")
    made.clear()
    return made


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_seen(place, breach, monkeypatch):
    monkeypatch.setattr(child, "CPU", 1)
    found, _ = problems(Case(breach), place)
    assert any(BREACHES[breach] in problem for problem in found), found


@pytest.mark.ci
def test_a_quiet_command_and_a_plain_error_are_none(place):
    assert problems(Case(["models"]), place)[0] == []
    assert problems(Case(["info", "absent"]), place)[0] == []
    assert problems(Case(["info", "absent"], good=lambda out: "missing"), place)[0] == ["good neighbour: missing"]
