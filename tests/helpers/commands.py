"""Run a command in this process, and check its one line of error."""

import json

import pytest

from multimodal.cli.main import main


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def one_line(err: str) -> str:
    assert err.startswith("multimodal: error: "), err
    assert err.count("\n") == 1, err
    return err


def evaluated(capsys, *arguments: object) -> dict:
    """The record that `evaluate` prints without an error."""
    code, out, err = run(capsys, "evaluate", *arguments, "--output", "json")
    assert (code, err) == (0, "")
    return json.loads(out)
