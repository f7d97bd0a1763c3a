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


@pytest.mark.ci
@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_a_kill_at_any_byte_leaves_a_file_that_ends_as_an_unbroken_one(tmp_path, style):
    """The settings mark the file as not closed, as after kill -9."""
    path, names = tmp_path / f"out.{style}", NAMES[1:4]
    fill(path, names, style)
    whole, record = path.read_bytes(), path.with_name(path.name + ".settings.json")
    settings = json.loads(record.read_text()) | {"closed": False}
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


@pytest.mark.ci
@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_thousands_of_images_are_quick(tmp_path, style):
    names = [f"folder/image {i}.jpg" for i in range(5000)]
    start = process_time()
    fill(tmp_path / "o", names, style)
    assert len(fill(tmp_path / "o", names, style)) == 5000
    assert process_time() - start < 5  # about 0.2 s; reading the file again for each would take a minute


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_rows_that_were_edited_stay(tmp_path, style, closed):
    """Not closed, the last image of a CSV is made again."""
    path, names = tmp_path / f"out.{style}", ["b.jpg", "a.jpg", "c.jpg"]
    results = Results(path, style, COLUMNS, {"model": "m"})
    for name in names:
        results.append(name, rows(name), {"file": name, "scores": [1, 2]})
    (results.close if closed else results._close)()  # as a kill leaves it
    lines = path.read_bytes().replace(b"0.75", b"0.7").splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], *sorted(lines[1:])] if style == "csv" else sorted(lines)))
    edited = path.read_bytes()
    assert fill(path, names, style) == set(names if closed or style == "jsonl" else names[:2])
    assert (path.read_bytes() == edited) == (closed or style == "jsonl")
    assert path.read_bytes().startswith(edited[:-40])


def test_a_last_line_without_its_end_costs_its_image_alone(tmp_path):
    fill(tmp_path / "o.csv", NAMES)
    whole = (tmp_path / "o.csv").read_bytes()
    (tmp_path / "o.csv").write_bytes(whole[:-1])  # as some editors save it
    assert fill(tmp_path / "o.csv", NAMES) == set(NAMES[:-1])
    assert (tmp_path / "o.csv").read_bytes() == whole


def test_a_file_of_others_beside_new_results_stays(tmp_path):
    beside = tmp_path / "o.csv.settings.json"
    beside.write_text("mine")
    with pytest.raises(UsageError, match=f"{beside.name}: exists"):
        fill(tmp_path / "o.csv", NAMES[:2])
    assert beside.read_text() == "mine"
