"""`multimodal transcribe --stream`: lines and figures, and Ctrl-C."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from multimodal.cli.speech import stream
from tests.helpers.commands import one_line
from tests.helpers.processes.programs import LIMIT


@pytest.fixture
def shown(monkeypatch):
    """Set once the stream has printed a line."""
    event, show = threading.Event(), stream._json

    def told(line):
        show(line)
        event.set()

    monkeypatch.setattr(stream, "_json", told)
    return event


@contextmanager
def microphone(monkeypatch, play: Callable[[int], None]) -> Iterator[None]:
    """`play(descriptor)` writes to stdin in a thread, until nobody reads there."""
    out_end, in_end = os.pipe()

    def played() -> None:
        with suppress(BrokenPipeError):
            play(in_end)

    player = threading.Thread(target=played)
    with os.fdopen(out_end, "rb") as stdin:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stdin))
        player.start()
        yield
    player.join(LIMIT)
    os.close(in_end)
    assert not player.is_alive()


def test_ctrl_c_ends_a_stream_whose_writer_is_silent(say, monkeypatch, tone, shown):
    def play(stdin):
        os.write(stdin, tone.read_bytes()[44:32044])
        assert shown.wait(LIMIT)
        os.kill(os.getpid(), signal.SIGINT)

    with microphone(monkeypatch, play):
        code, out, _ = say("--stream", "-f", "json", "--vad_threshold", "0")
    assert code == 130
    assert json.loads(out.splitlines()[-1])["kind"] == "summary"


@pytest.mark.ci
@pytest.mark.filterwarnings("default:--lm_bonus")
def test_a_stream_prints_lines_and_figures(say, piped, monkeypatch, tone):
    piped(tone.read_bytes()[44:] * 3)
    code, out, err = say("--stream", "-f", "json", "--vad_threshold", "0", "--vad_min_silence_duration_ms", "300")
    assert code == 0
    events = [json.loads(line) for line in out.splitlines()]
    assert {event["kind"] for event in events} >= {"final", "summary"}
    assert events[-1]["figures"]["seconds"] == pytest.approx(3.0)
    assert "3.00 s of audio" in err
    assert err.count("\n") == 1
    piped(tone.read_bytes()[44:])
    code, out, _ = say("--stream", "-", "--vad_threshold", "0", "--rate", "8000")
    assert code == 0
    assert re.search(r"^final   \[00:0\d\.\d{3} --> 00:0\d\.\d{3}\] \(\d+\.\d\d s\)  ", out, re.M)
    piped(tone.read_bytes()[44:])
    code, out, err = say("--stream", "--task", "translate")
    assert (code, out, "task 'translate': " in one_line(err)) == (1, "", True)
    piped(tone.read_bytes()[44:])
    told = "multimodal: warning: --lm_bonus: has no effect without --lm\n"
    assert say("--stream", "--vad_threshold", "0", "--lm_bonus", "1")[2].startswith(told)
    piped(b"")
    assert "no samples" in one_line(say("--stream")[2])
    piped(bytes(3200))
    assert "argument --rate: must be an integer in [1000, 3072000] (got 1)" in say("--stream", "--rate", "1")[2]
    for flag, limits, value in (
        ("min_silence_duration_ms", "[100, 10000]", 50),
        ("max_speech_duration_s", "[2, 30]", 31),
    ):
        error = f"--vad_{flag} with --stream must be a number in {limits} (got {value}.0)"
        assert error in one_line(say("--stream", f"--vad_{flag}", str(value))[2])


@pytest.mark.ci
def test_ctrl_c_ends_a_stream_with_what_was_said(say, monkeypatch, tone, shown):
    """Input from a microphone that stays open; Ctrl-C comes after the first line."""

    def play(stdin):
        sound, asked = tone.read_bytes()[44:3244], False
        for _ in range(100_000):
            os.write(stdin, sound)  # as fast as it is taken
            if shown.is_set() and not asked:
                asked = True
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with microphone(monkeypatch, play):
        code, out, err = say("--stream", "-f", "json", "--vad_threshold", "0")
    assert code == 130
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["kind"] for event in events][-2:] == ["final", "summary"]
    assert events[0]["kind"] == "partial"
    assert events[-1]["figures"]["seconds"] >= 0.5
    assert "s of audio" in err
    assert signal.getsignal(signal.SIGINT) is before
