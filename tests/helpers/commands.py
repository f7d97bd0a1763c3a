"""Run a command in this process, and check its one line of error."""

import json

import pytest

from multimodal.cli.main import main


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr without the line on a demonstration model."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    err = "".join(line for line in captured.err.splitlines(keepends=True) if ": demonstration model, " not in line)
    return stop.value.code or 0, captured.out, err


def one_line(err: str) -> str:
    assert err.startswith("multimodal: error: "), err
    assert err.count("\n") == 1, err
    return err


def evaluated(capsys, *arguments: object) -> dict:
    """The record that `evaluate` prints without an error."""
    code, out, err = run(capsys, "evaluate", *arguments, "--output", "json")
    assert (code, err) == (0, "")
    return json.loads(out)
