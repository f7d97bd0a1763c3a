"""Commands end at once on a signal and remove partial files."""

import signal
import subprocess
import sys

import pytest

from multimodal.system.signals import handled
from tests.helpers.paths import ROOT
from tests.helpers.processes.programs import LIMIT, alive, forked, started, wait_for
from tests.house.sources import BENCHMARKS, PACKAGE, RECIPES, TESTS, source

PROGRAM = """
import contextlib, os, signal, sys, threading, time
from multimodal.system.signals import at_stop, ending, unbroken

def lock():
    print("ready", flush=True)
    held = threading.Lock()
    held.acquire()
    held.acquire()

def queue():
    import queue
    print("ready", flush=True)
    queue.Queue().get()

def compute():
    print("ready", flush=True)
    while True:
        try:
            sum(range(1000))
        except BaseException:
            print("interrupted", flush=True)

def sleep():
    print("ready", flush=True)
    time.sleep(3600)

def write():
    with unbroken():
        for part in ("ready", "half", "whole"):
            print(part, flush=True)
            time.sleep(0.1)
    time.sleep(3600)

def write_for_ever():
    with unbroken():
        print("ready", flush=True)
        time.sleep(3600)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
with ending(), at_stop(lambda: "first"), at_stop(lambda: 1 / 0), at_stop(lambda: "last"), at_stop(lambda: None):
    with contextlib.suppress(BaseException):
        globals()[sys.argv[1]]()
    print("unwound", flush=True)
"""


@pytest.mark.parametrize(
    ("what", "number", "out"),
    [
        ("lock", signal.SIGINT, ""), ("queue", signal.SIGTERM, ""), ("compute", signal.SIGINT, ""),
        ("sleep", signal.SIGHUP, ""), ("sleep", signal.SIGTERM, ""), ("write", signal.SIGINT, "half\nwhole\n"),
        pytest.param("write_for_ever", signal.SIGINT, "", marks=pytest.mark.ci),
    ],
)  # fmt: skip
def test_a_signal_ends_the_process_without_an_exception(what, number, out):
    call = [sys.executable, "-c", PROGRAM, what]
    with started(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        actual, err = program.stdout.read(), program.stderr.read()
        program.wait(LIMIT)
    assert (program.returncode, actual) == (128 + number, out)
    assert err == "last\nfirst\n"


def test_a_signal_that_is_ignored_stays_ignored():
    """SIGINT as a shell has it for what it starts with &, SIGHUP as nohup has it, in training, too."""
    program = """
import os, signal
from multimodal.system.signals import ending, handled
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
with ending():
    os.kill(os.getpid(), signal.SIGINT)
    with handled([signal.SIGHUP], lambda number, frame: os._exit(1)):
        os.kill(os.getpid(), signal.SIGHUP)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=LIMIT).returncode == 0


def test_handlers_are_given_back():
    before, seen = signal.getsignal(signal.SIGUSR1), []
    with handled([signal.SIGUSR1], lambda number, frame: seen.append("outer")):
        with handled([signal.SIGUSR1], lambda number, frame: seen.append("inner")):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.ci
def test_workers_end_with_a_parent_that_is_killed():
    program = """
import multiprocessing, os, signal, sys, time
from multimodal.data.loader import calm_worker
def work(ready):
    calm_worker()
    ready.send(os.getpid())
    while True:
        time.sleep(0.05)
mine, theirs = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True).start()
print(mine.recv(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with forked(program) as run:
        worker = int(run.stdout.readline())
        wait_for(lambda: not alive(worker))
        assert run.wait(LIMIT) == -signal.SIGKILL


SETS_HANDLERS = {"multimodal/system/signals.py", "multimodal/data/loader.py", "multimodal/data/validate.py"}


def test_programs_are_waited_for_with_a_limit():
    for file in map(source, TESTS + BENCHMARKS):
        for call in file.calls:
            if call.name.endswith(("subprocess.run", ".communicate")):
                assert {"timeout", None} & call.options.keys(), f"{file.name}:{call.line}"


def test_no_other_file_sets_a_handler_or_waits_for_ctrl_c():
    """A handler that raises, Python's own of Ctrl-C among them, leaves locks taken and work half done."""
    for file in map(source, PACKAGE + RECIPES + BENCHMARKS):
        assert file.name in SETS_HANDLERS or not file.names & {"signal.signal", "KeyboardInterrupt"}, file.name
