"""Run a command in this process, and check its one line of error."""

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
