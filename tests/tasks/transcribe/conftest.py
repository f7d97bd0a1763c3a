"""Standard input of the transcribe command."""

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
