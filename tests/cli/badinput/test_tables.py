"""Run each row of each table module of this folder."""

import importlib
from pathlib import Path

import pytest

from tests.helpers.folders import every_kind, write_image, write_tone
from tests.helpers.spread import thin

from .rows import Row, arguments, check, execute, listing

HERE = Path(__file__).parent
TABLES = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("__init__", "rows", "test_tables"))
ROWS = {
    f"{table}: {row.name}": row for table in TABLES
    for row in importlib.import_module(f"{__package__}.{table}").ROWS
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    return every_kind(tmp_path_factory.mktemp("badinput"))


@pytest.fixture(scope="session")
def untouched(models) -> dict[str, tuple]:
    """The models' folder, which no row changes."""
    return listing(models)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Working folder with valid files, and another's file beside it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("not yours")
    (tmp_path / "work" / "out").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    write_image(Path("red.png"))
    write_tone(Path("tone.wav"))
    return tmp_path


@thin(5, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@pytest.mark.parametrize("name", ROWS)
def test_row(name, place, models, untouched, capfd):
    row: Row = ROWS[name]
    words = arguments(row, models)
    if row.make:
        row.make()
    allowed = ["work/out", *(f"work/{glob}" for glob in row.writes)]
    before = listing(place, allowed)
    capfd.readouterr()
    check(row, execute(words, capfd.readouterr))
    assert listing(place, allowed) == before
    assert listing(models) == untouched


def test_no_row_hides_another():
    tables = [importlib.import_module(f"{__package__}.{table}").ROWS for table in TABLES]
    assert sum(map(len, tables)) == len(ROWS)
