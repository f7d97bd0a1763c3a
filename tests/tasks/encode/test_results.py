"""Results files: interruption at any byte, resuming, and refusals."""

import csv
import json
import os
import re
from pathlib import Path
from time import process_time

import pytest

from multimodal.errors import UsageError
from multimodal.tasks.encode.results import Results
from tests.helpers.folders import files_of_at_most

COLUMNS = ["file", "label", "score"]
NAMES = ["a.jpg", 'odd, "name"\nof two lines.jpg', "b\r.jpg", "caf\udce9.jpg", "é.jpg"]


def rows(name: str) -> list[list]:
    return [[name, "dog, brown", 0.75], [name, "cat", 0.25]]


def fill(path: Path, names: list[str], style: str = "csv", **options) -> set[str]:
    """Append missing names; return those already present."""
    with Results(path, style, COLUMNS, {"model": "m"}, **options) as results:
        before = set(results.done)
        for name in names:
            if not results.has(name):
                results.append(name, rows(name), {"file": name, "scores": [1, 2]})
    return before


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_names_of_every_kind_come_back_and_are_skipped(tmp_path, style):
    path = tmp_path / f"out.{style}"
    assert fill(path, NAMES, style) == set()
    content = path.read_bytes()
    assert fill(path, NAMES, style) == set(NAMES)
    assert path.read_bytes() == content
    if style == "csv":
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            assert list(csv.reader(file)) == [COLUMNS] + [list(map(str, row)) for n in NAMES for row in rows(n)]
    else:
        assert [json.loads(line)["file"] for line in path.read_bytes().splitlines()] == NAMES


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_a_kill_at_any_byte_leaves_a_file_that_ends_as_an_unbroken_one(tmp_path, style):
    """The settings mark the file as not closed, as after kill -9."""
    path, names = tmp_path / f"out.{style}", NAMES[:4]
    fill(path, names, style)
    whole, record = path.read_bytes(), path.with_name(path.name + ".settings.json")
    settings = json.loads(record.read_text()) | {"rows": 0}
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        record.write_text(json.dumps(settings))
        fill(path, names, style)
        assert path.read_bytes() == whole, end


def test_what_a_power_cut_leaves_as_zeros_is_cut_off(tmp_path):
    fill(tmp_path / "o.csv", NAMES)
    whole = (tmp_path / "o.csv").read_bytes()
    (tmp_path / "o.csv").write_bytes(whole + b"\0" * 4096)
    fill(tmp_path / "o.csv", NAMES)
    assert (tmp_path / "o.csv").read_bytes() == whole


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_damage_in_the_middle_is_refused_and_the_file_left(tmp_path, style):
    path = tmp_path / f"o.{style}"
    fill(path, [f"{i}.jpg" for i in range(200)], style)
    for damage in (b"x\n", b'"'):
        lines = path.read_bytes().splitlines(keepends=True)
        lines.insert(5, damage)
        path.write_bytes(b"".join(lines))
        with pytest.raises(UsageError, match="line 6 is damaged"):
            fill(path, ["n.jpg"], style)
        assert path.read_bytes() == b"".join(lines)
        del lines[5]
        path.write_bytes(b"".join(lines))


def test_a_quote_that_swallows_the_rest_of_a_file_is_damage_and_no_torn_end(tmp_path):
    path = tmp_path / "o.csv"
    with Results(path, "csv", COLUMNS, {"model": "m"}) as results:
        for number in range(200):
            results.append(f"{number}.jpg", [[f"{number}.jpg", "dog", 0.5]], {})
    damaged = path.read_bytes().replace(b"50.jpg", b'"0.jpg', 1)
    path.write_bytes(damaged)
    with pytest.raises(UsageError, match="line 52 is damaged"):
        fill(path, ["n.jpg"])
    assert path.read_bytes() == damaged


def test_other_settings_a_foreign_file_and_a_missing_record_are_refused(tmp_path):
    path = tmp_path / "o.csv"
    fill(path, ["a.jpg"])
    content = path.read_bytes()
    with pytest.raises(UsageError, match="was written with other labels, model; overwrite=True"):
        Results(path, "csv", COLUMNS, {"model": "n", "labels": ["x"]})
    with pytest.raises(UsageError, match="other columns"):
        Results(path, "csv", COLUMNS[:2], {"model": "m"})
    (tmp_path / "o.csv.settings.json").unlink()
    with pytest.raises(UsageError, match="its settings cannot be read"):
        fill(path, ["b.jpg"])
    assert path.read_bytes() == content
    assert fill(path, ["b.jpg"], overwrite=True) == set()
    assert b"a.jpg" not in path.read_bytes()
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(UsageError, match="not a results file"):
        fill(tmp_path / "photo.jpg", ["a.jpg"], overwrite=True)
    assert (tmp_path / "photo.jpg").read_bytes() == b"\xff\xd8\xff"


def test_places_that_cannot_be_written_are_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    cases = [(tmp_path, "not a regular file"), (tmp_path / "pipe", "not a regular"), (tmp_path / "no/o", "No such")]
    for path, cause in cases:
        with pytest.raises(UsageError, match=cause):
            Results(path, "csv", COLUMNS, {})
    with pytest.raises(UsageError, match=r"csv or jsonl for results \(got 'json'\)"):
        Results(tmp_path / "o", "json", COLUMNS, {})


def test_a_second_process_is_refused_while_the_first_writes(tmp_path):
    with Results(tmp_path / "o.csv", "csv", COLUMNS, {}):
        with pytest.raises(UsageError, match="another process is writing it"):
            Results(tmp_path / "o.csv", "csv", COLUMNS, {}, overwrite=True)
    Results(tmp_path / "o.csv", "csv", COLUMNS, {}).close()


def test_relative_names_stay_those_of_the_first_folder(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "o.csv", ["in/a.jpg"])
    assert fill(tmp_path / "o.csv", ["./in/a.jpg", str(tmp_path / "in" / "a.jpg")]) == {"in/a.jpg"}
    monkeypatch.chdir(tmp_path / "in")
    content = (tmp_path / "o.csv").read_bytes()
    fill(tmp_path / "o.csv", ["a.jpg", "../in/a.jpg"])
    assert (tmp_path / "o.csv").read_bytes() == content
    with pytest.raises(UsageError, match="relative names belong to"):
        fill(tmp_path / "o.csv", ["in/a.jpg"])


def test_a_full_disk_leaves_whole_images_and_says_how_many(tmp_path):
    line = re.escape("cannot be written (File too large); 10 images are saved")
    with files_of_at_most(1000), Results(tmp_path / "o.csv", "csv", ["file", "score"], {}) as results:
        names = [f"{i:03}.jpg" for i in range(11)]
        for name in names[:10]:
            results.append(name, [[name, "x" * 40]] * 2, {})
        with pytest.raises(UsageError, match=line):
            results.append(names[10], [[names[10], "x" * 40]] * 2, {})
    lines = (tmp_path / "o.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 10
    with Results(tmp_path / "o.csv", "csv", ["file", "score"], {}) as results:
        assert len(results.done) == 10


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_thousands_of_images_are_quick(tmp_path, style):
    names = [f"folder/image {i}.jpg" for i in range(20_000)]
    start = process_time()
    fill(tmp_path / "o", names, style)
    assert len(fill(tmp_path / "o", names, style)) == 20_000
    assert process_time() - start < 10  # about 0.6 s; reading the file again for each would take minutes


def rewritten(path: Path, change) -> None:
    """Edit the lines of a file."""
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


CHANGES = {
    "edited": (lambda rows: [*rows[:2], rows[2].replace(b"a", b"b", 1), *rows[3:]], 3),
    "removed": (lambda rows: [*rows[:2], *rows[3:]], 3), "added": (lambda rows: [*rows[:2], rows[2], *rows[2:]], 4),
    "moved": (lambda rows: [*rows[:2], rows[3], rows[2], *rows[4:]], 3),
    "added at the end": (lambda rows: [*rows, rows[-1]], None), "removed at the end": (lambda rows: rows[:-1], None),
}  # fmt: skip


@pytest.mark.parametrize("style", ["csv", "jsonl"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_row_that_was_changed_by_hand_is_named_by_its_line(tmp_path, style, kind):
    path, names = tmp_path / f"out.{style}", [f"a{i}.jpg" for i in range(6)]
    fill(path, names, style)
    lines = len(path.read_bytes().splitlines())
    change, line = CHANGES[kind]
    rewritten(path, change)
    before = path.read_bytes()
    line = line or (lines + 1 if "added" in kind else lines - 1)
    with pytest.raises(UsageError, match=rf"line {line} (was edited|was added|are missing).*overwrite=True"):
        fill(path, names, style)
    assert path.read_bytes() == before
    fill(path, names, style, overwrite=True)
    assert fill(path, names, style) == set(names)


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_a_changed_row_is_named_after_a_kill_too(tmp_path, style):
    """Not closed, and the last row torn."""
    path, names = tmp_path / f"out.{style}", [f"a{i}.jpg" for i in range(6)]
    results = Results(path, style, COLUMNS, {"model": "m"})
    for name in names:
        results.append(name, rows(name), {"file": name, "scores": [1, 2]})
    results._close()  # as a kill leaves it
    path.write_bytes(path.read_bytes()[:-3].replace(b"a1", b"b1", 1))
    with pytest.raises(UsageError, match=f"line {4 if style == 'csv' else 2} was edited"):
        fill(path, names, style)


def test_sums_that_are_missing_are_said(tmp_path):
    fill(tmp_path / "o.csv", NAMES[:2])
    (tmp_path / "o.csv.sums").unlink()
    with pytest.raises(UsageError, match=r"o.csv.sums: truncated or missing"):
        fill(tmp_path / "o.csv", NAMES[:2])


@pytest.mark.parametrize("name", ["o.csv.settings.json", "o.csv.sums"])
def test_files_of_others_beside_new_results_stay(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{name}: exists"):
        fill(tmp_path / "o.csv", NAMES[:2])
    assert (tmp_path / name).read_text() == "mine"
