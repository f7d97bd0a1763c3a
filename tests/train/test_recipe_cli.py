"""Recipe start and end: flags, one-line errors, exit codes."""

import io
import logging
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from multimodal.errors import DataError
from multimodal.system.options import Natural, Positive, PositiveShare, Rate, Temperature
from multimodal.train.recipe_cli import start
from multimodal.train.settings import LoopSettings
from multimodal.train.signals import Stopped
from tests.helpers.spread import thin


@dataclass
class Sizes:
    layers: Natural = 1
    drop_path: Rate | None = None
    temperature: Temperature = 0.0


@dataclass
class Settings:
    loop: LoopSettings
    data: list[Path]
    sizes: Sizes = field(default_factory=Sizes)
    size: Positive = 96  # pixels of a side
    crop: PositiveShare = 0.5


def main(settings: Settings) -> Settings:
    return settings


BASE = ["--run", "out", "--steps", "5", "--data", "a", "b"]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """`start` sets the program's logs up."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    levels = {name: logging.getLogger(name).level for name in ("multimodal", __name__)}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_flags_are_flat_and_take_both_spellings():
    found = start(main, [*BASE, "--save-every", "7", "--weight_decay", "0.3", "--resume", "--layers", "0"])
    assert (found.sizes, found.crop) == (Sizes(0), 0.5)
    assert found.data == [Path("a"), Path("b")]
    assert (found.loop.steps, found.loop.save_every, found.loop.optim.weight_decay) == (5, 7, 0.3)
    assert found.loop.resume


def test_help_says_what_the_recipe_is_and_its_defaults(capsys):
    with pytest.raises(SystemExit) as end:
        start(main, ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert __doc__ in text
    assert "pixels of a side (default: 96)" in " ".join(text.split())
    assert "peak learning rate (default: 0.001)" in " ".join(text.split())


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([*BASE, "--size", "big"], "Error parsing --size: invalid literal for int() with base 10: 'big'"),
        ([*BASE, "--optimizer", "sgd"], "invalid choice 'sgd' for argument '--optimizer'. Expected one of"),
        ([*BASE, "--sizes", "3"], "unknown flag --sizes, did you mean --size?"),
        (["--save-evry=3"], "unknown flag --save-evry, did you mean --save_every?"),
        ([*BASE, "--far-away"], "unknown flag --far-away"),
        ([*BASE, "--size", "5", "stray"], "Unrecognized options: stray"),
        ([*BASE, "--size"], "Missing value for argument '--size'"),
        (
            BASE[2:],
            "Missing from test_recipe_cli.py: --run PATH folder for checkpoints, metrics and the report (required)",
        ),
        ([*BASE, "--rate", "-1"], "--rate must be a number above 0 (got -1.0)"),
        ([*BASE, "--steps", "-3"], "--steps must be an integer of at least 1 (got -3)"),
        ([*BASE, "--size", "0"], "--size must be an integer of at least 1 (got 0)"),
        ([*BASE, "--layers", "-1"], "--layers must be an integer of at least 0 (got -1)"),
        ([*BASE, "--drop_path", "1"], "--drop_path must be a number in [0, 1) (got 1.0)"),
        ([*BASE, "--drop_path", "nan"], "--drop_path must be a number in [0, 1) (got nan)"),
        ([*BASE, "--temperature", "inf", "--rate", "inf"], "--rate must be a finite number above 0 (got inf)"),
        ([*BASE, "--crop", "0"], "--crop must be a number in (0, 1] (got 0.0)"),
        ([*BASE, "--device", "gpu" * 100], f"--device {'gpu' * 100}: no such device"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(capsys, flags, line):
    with pytest.raises(SystemExit) as end:
        start(main, flags)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"test_recipe_cli.py: error: {line}")
    assert error.endswith("(see test_recipe_cli.py --help)\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("a.tar:\n broken\x1b"), 1, "error: a.tar: broken?"),
        (FileNotFoundError(2, "No such file or directory", "words.txt"), 1,
         "error: words.txt: No such file or directory"),
        (Stopped("SIGTERM"), 75, "stopped by SIGTERM; the state is saved, continue with --resume"),
    ],
)  # fmt: skip
def test_how_a_run_ends(capsys, monkeypatch, error, code, line):
    def failing(settings: Settings):
        raise error

    with pytest.raises(SystemExit) as end:
        start(failing, BASE)
    assert end.value.code == code
    assert capsys.readouterr().err == f"test_recipe_cli.py: {line}\n"
    monkeypatch.setattr("sys.stderr", broken := io.StringIO())  # a terminal that was closed
    monkeypatch.setattr(broken, "write", lambda text: os.write(-1, b""))
    with pytest.raises(SystemExit, match=str(code)):
        start(failing, BASE)


@pytest.mark.ci
def test_a_mistake_of_the_program_keeps_its_traceback():
    def failing(settings: Settings):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(failing, BASE)


def test_warnings_are_one_line(caplog):
    def warning(settings: Settings):
        warnings.simplefilter("always")
        warnings.warn("two\nlines", stacklevel=1)

    with warnings.catch_warnings():
        start(warning, BASE)
    assert caplog.messages == ["two lines"]


@dataclass
class WithOut(Settings):
    out: Path = Path("made")


def never(settings: WithOut):
    raise AssertionError


@pytest.mark.parametrize(
    ("out", "line"),
    [
        ("runs/one", "expected a folder for the checkpoint alone, got one that holds the run runs/one"),
        ("runs", "expected a folder for the checkpoint alone, got one that holds the run runs/one"),
        ("file/deep/out", "cannot be written, since {here}/file is not a folder that may be written"),
        (os.fsdecode(b"a\xff"), "expected a path in UTF-8, since safetensors reads no other"),
    ],
)
def test_an_output_that_cannot_be_saved_is_refused_at_the_start(tmp_path, monkeypatch, capsys, out, line):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(SystemExit) as end:
        start(never, ["--run", "runs/one", "--steps", "5", "--data", "a", "--out", out])
    assert end.value.code == 1
    expected = f"{out}: {line.format(here=tmp_path.resolve())}".replace("\udcff", "?")
    assert capsys.readouterr().err == f"test_recipe_cli.py: error: --out {expected}\n"
