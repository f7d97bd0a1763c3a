"""Standard input of the transcribe command, and openai-whisper's word times."""

import io
import sys
import tempfile
from contextlib import ExitStack

import pytest


@pytest.fixture
def piped(monkeypatch):
    """Makes bytes the standard input."""
    with ExitStack() as files:

        def give(data: bytes) -> None:
            file = files.enter_context(tempfile.TemporaryFile())
            file.write(data)
            file.seek(0)
            monkeypatch.setattr(sys, "stdin", files.enter_context(io.TextIOWrapper(file)))

        yield give


@pytest.fixture
def timing(monkeypatch):
    """openai-whisper's module, without numba's compiler (seconds)."""
    import whisper.timing

    for name in ("backtrace", "dtw_cpu"):
        monkeypatch.setattr(whisper.timing, name, getattr(whisper.timing, name).py_func)
    return whisper.timing
