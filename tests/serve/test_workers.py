"""Processes of a server: their start, end and counts."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from multimodal.errors import UsageError
from multimodal.serve.models import Models
from multimodal.serve.options import ServeOptions
from multimodal.serve.run import ServerProcess, Supervisor, configuration, listening
from multimodal.weights.folder import save_folder
from tests.helpers.byte_models import byte_model
from tests.helpers.commands import run
from tests.helpers.spread import thin
from tests.serve.test_faults import children, ready

COMMAND = [sys.executable, "-m", "multimodal", "serve", "--port", "0"]
WORKERS = [*COMMAND, "--workers", "2", "--models", "gpt-mini"]


def test_settings_that_a_server_does_not_follow_are_named(tmp_path):
    asked = {"num_beams": 4, "guidance_scale": 2.0, "repetition_penalty": 1.3}
    checkpoint = byte_model()
    save_folder(replace(checkpoint, card=checkpoint.card | {"generation": asked}), tmp_path / "tiny")
    models = Models(ServeOptions(models=(str(tmp_path / "tiny"),), device="cpu"))
    with pytest.warns(UserWarning, match=r"asks for num_beams 4, guidance_scale 2\.0, which is not followed"):
        models.load_all()
    models.stop()


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_signal_while_a_worker_starts_ends_it(monkeypatch, at):
    """The third one takes the place of the second."""
    plain, starts = SpawnProcess.start, []

    def start(self: SpawnProcess) -> None:
        plain(self)
        starts.append(self)
        if len(starts) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(starts) == 2:
            self.kill()

    monkeypatch.setattr(SpawnProcess, "start", start)
    options, began = ServeOptions(port=0, workers=2, models="gpt-mini"), time.monotonic()
    with listening(options) as bound:
        assert Supervisor(options, bound).run() == 0
    assert (len(starts), time.monotonic() - began < 20) == (at, True)
    assert not any(one.is_alive() for one in starts)


def test_an_address_is_one_server_s():
    with listening(ServeOptions(port=0)) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}: cannot be used"):
            listening(ServeOptions(port=port))


def test_workers_that_fail_before_they_serve_end_the_server(monkeypatch):
    monkeypatch.setattr("multimodal.serve.run._work", len)  # a TypeError
    options, starts = ServeOptions(port=0, workers=2, models="gpt-mini"), []
    plain = SpawnProcess.start
    monkeypatch.setattr(SpawnProcess, "start", lambda self: (starts.append(self), plain(self)))
    with listening(options) as bound:
        assert Supervisor(options, bound).run() == 1
    assert len(starts) == 2


def test_a_server_without_its_models_ends_with_1(capfd, caplog):
    code, _, err = run(capfd, *COMMAND[3:], "--models", "nothing")
    told = err + caplog.text
    assert (code, "Traceback" in told) == (1, False), told
    assert "'nothing': neither a path nor a known model" in told


@pytest.mark.slow
def test_workers_without_their_models_end_with_1():
    command = [*COMMAND, "--models", "nothing", "--workers", "2"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (made.returncode, "Traceback" in made.stderr) == (1, False), made.stderr
    assert "'nothing': neither a path nor a known model" in made.stderr


def test_any_failure_of_a_load_ends_the_server(monkeypatch):
    monkeypatch.setattr("multimodal.serve.models.load", lambda name: 1 / 0)
    options = ServeOptions(port=0, models="gpt-mini")
    config = configuration(options)
    config.load()
    with listening(options) as bound:
        assert not ServerProcess(config).served(bound)


@pytest.mark.slow
def test_ctrl_c_at_the_start_leaves_no_traceback():
    with subprocess.Popen(WORKERS, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        process.stderr.readline()
        time.sleep(2)  # the workers import
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.ci
def test_workers_count_together(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(WORKERS, stderr=subprocess.PIPE, text=True, env=environment) as process:
        url = process.stderr.readline().split()[-1]
        ready(url)
        while len(list(tmp_path.glob("multimodal-serve-*/counter_*.db"))) < 2:  # both have answered
            httpx.get(f"{url}/health")

        def counted() -> int:
            text = httpx.get(f"{url}/metrics").raise_for_status().text
            return int(float(re.search(r'requests_total\{path="/v1/classify",status="405"\} (\S+)', text)[1]))

        for _ in range(20):
            httpx.get(f"{url}/v1/classify")
        assert {counted() for _ in range(8)} == {20}
        os.kill(children(process.pid)[0], signal.SIGKILL)
        time.sleep(0.5)
        assert counted() == 20
        process.terminate()  # before the worker's successor starts
        assert process.wait(30) == 0
    assert list(tmp_path.glob("multimodal-serve-*")) == []


def test_a_second_signal_drops_what_runs(monkeypatch):
    server, codes = ServerProcess(uvicorn.Config("none")), []
    server.config.loaded_app = SimpleNamespace(draining=False, active=2)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", False)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(server, "run", lambda sockets: [server.handle_exit(15, None) for _ in range(2)])
    with socket.socket() as bound:
        assert not server.served(bound)
    assert (server.dropped, server.force_exit, codes) == (2, True, [1])
