"""Type checks, the `--parity` table and the fixtures that many folders share.

Imports of torch and the package stand inside functions: xdist's first process runs no tests and starts without them.
"""

import functools
import gc
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers import parity, typed
from tests.helpers.paths import RECIPES, SHARED_DATA

MOST_WORKERS = 8  # each holds 1.5 GB of reference libraries
MARKS = {"slow", "ci", "gpu", "network", "browser"}  # each is a run of its own

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each process would compile the package and the tests again
sys.dont_write_bytecode = False
typed.install("multimodal")
for name in [name for name in os.environ if name.startswith("MULTIMODAL_")]:  # the default models of whoever runs them
    del os.environ[name]
os.environ["MULTIMODAL_TUNE"] = "0"  # the same bits in every run, and no file in whoever's home
os.environ["MULTIMODAL_NATIVE"] = "0"  # tests of compiled steps ask for them
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: workers would fight over the cores
os.fsync = lambda file: None  # thousands of waits for the disk; kills need none, only a loss of power does
# a shell that starts the tests with & has them ignore Ctrl-C, and the programs that they start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", action="store_true", help="print the largest difference from each reference library")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, which takes half of the time and frees nothing, now or later. Then let it
    run seldom: it looks through the reference libraries each time, a tenth of all time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    return result


@functools.cache
def names(path: Path, mark: str) -> bool:
    """Return True if a test file, or a conftest.py of its folders, has the text of a mark."""
    folders = [folder for folder in path.parents if folder.is_relative_to(Path(__file__).parent)]
    files = [path, *(folder / "conftest.py" for folder in folders)]
    return any(re.search(rf"\bmark\.{mark}\b", file.read_text(encoding="utf-8")) for file in files if file.exists())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m` and one of MARKS, import only the files that have it: to import all takes half a minute."""
    mark = config.getoption("markexpr")
    return True if mark in MARKS and collection_path.suffix == ".py" and not names(collection_path, mark) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in MARKS.intersection(one.name for one in item.iter_markers()):
            if not names(item.path, mark):
                raise pytest.UsageError(f"{item.nodeid}: `-m {mark}` misses it; its file must name mark.{mark}")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker for each core in a run of the whole suite; a part of it starts faster in one process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    return min(cores, MOST_WORKERS) if whole and cores > 1 else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["parity"] = [(*key, difference) for key, difference in parity.TABLE.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for row in getattr(node, "workeroutput", {}).get("parity", []):
        parity.record(*row)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--parity"):
        terminalreporter.section("largest difference from the reference library (float32, CPU)")
        terminalreporter.write_line("| family | output | difference |\n|---|---|---:|")
        for (family, output), difference in sorted(parity.TABLE.items()):
            terminalreporter.write_line(f"| {family} | {output} | {difference:.1e} |")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Data that is not part of the repository; the test is skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside the repository")
    return SHARED_DATA


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random `clip` and `asr`."""
    from tests.helpers.folders import clip_and_asr

    return clip_and_asr(tmp_path_factory.mktemp("models"))


@pytest.fixture
def load_recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import the recipe `NAME.py`, with nothing of its folder importable beside it."""

    def load(name: str) -> ModuleType:
        (path,) = RECIPES.rglob(f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save one pixel for each figure, and lay out no curves of a run: drawing takes two thirds of a tiny one."""
    from types import SimpleNamespace
    from unittest.mock import MagicMock

    from matplotlib.figure import Figure
    from PIL import Image

    def save(_: Any, file: Any, **__: Any) -> None:
        Image.new("RGB", (1, 1)).save(file, "PNG")

    blank = SimpleNamespace(add_subplot=MagicMock(), savefig=lambda file, **_: save(None, file))
    monkeypatch.setattr(Figure, "savefig", save)
    monkeypatch.setattr("multimodal.train.metrics.report.new_figure", lambda *_, **__: blank)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    from PIL import Image

    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (50, 40), "red").save(folder / "red.png")
    Image.new("RGB", (40, 50), "blue").save(folder / "blue.jpg")
    return folder


@pytest.fixture
def tone(tmp_path: Path) -> Path:
    from tests.helpers.folders import write_tone

    return write_tone(tmp_path / "tone.wav")


@pytest.fixture
def say(capsys, models):
    """Run `transcribe` with the tiny model."""
    from tests.helpers.commands import run

    return lambda *arguments: run(capsys, "transcribe", "-m", models / "asr", *arguments)
