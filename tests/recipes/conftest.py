"""Endings of a recipe that several tests of recipes check; no figure is drawn."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from multimodal.train.recipe_cli import start


@pytest.fixture
def last_line(capsys: pytest.CaptureFixture) -> Callable[[Callable[[], Any]], str]:
    """Run a recipe that must fail with exit code 1 and no traceback; return the last line of stderr."""

    def check(run: Callable[[], Any]) -> str:
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert not any("Traceback" in line for line in lines)
        return lines[-1]

    return check


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture) -> Callable[[ModuleType], str]:
    """The text that `--help` of a recipe prints."""

    def show(recipe: ModuleType) -> str:
        with pytest.raises(SystemExit) as end:
            start(recipe.main, ["--help"])
        assert end.value.code == 0
        return capsys.readouterr().out

    return show


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> None:
    """A test that asks for `drawn` draws."""
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("blank_figures")


@pytest.fixture
def drawn() -> None:
    """Figures are drawn."""
