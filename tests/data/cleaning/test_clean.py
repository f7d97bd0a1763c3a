"""`multimodal clean`: C4's rules line by line against a written-out version, and the same bytes however it runs."""

import gzip
import json
import multiprocessing
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from multimodal.data.cleaning import clean as pipeline
from multimodal.data.cleaning import pages as reading
from multimodal.data.cleaning.clean import clean
from multimodal.data.cleaning.compression import zstd
from multimodal.data.cleaning.options import CleanOptions
from multimodal.data.cleaning.targets import Target
from multimodal.errors import UsageError
from tests.data.cleaning import written_out
from tests.helpers.commands import one_line, run

LEMON = """Menu
Lemon
Introduction
The lemon is a small evergreen tree in the flowering plant family Rutaceae.[1]
The tree's yellow fruit is used for its juice throughout the world. The pulp and rind are used too.[citation needed]
Where the lemon was first grown is unknown.
By using this site you agree to our privacy policy.

Please enable JavaScript to use our site.
Home | Products | Contact
Organic dried lemons come from our farm in California. They are sun-dried for maximum flavor. Good in soups.
The lemon is a small evergreen tree in the flowering plant family Rutaceae. The tree's yellow fruit is used for its \
juice throughout the world. The pulp and rind are used too. Order yours today from our farm.

Lorem ipsum dolor sit amet, consectetur adipiscing elit. Curabitur in tempus quam. In mollis et ante.

function ball(r) {
this.radius = r; }
"""
CLEAN_LEMON = """The lemon is a small evergreen tree in the flowering plant family Rutaceae.
The tree's yellow fruit is used for its juice throughout the world. The pulp and rind are used too.
Where the lemon was first grown is unknown.

Organic dried lemons come from our farm in California. They are sun-dried for maximum flavor. Good in soups.
Order yours today from our farm.
"""


def read(path: Path) -> str:
    opened = {".gz": gzip.open, ".zst": zstd.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="utf-8") as file:
        return file.read()


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in read(path).splitlines()]


def counted(capsys, *arguments: object) -> dict:
    code, out, err = run(capsys, "clean", *arguments, "--format", "json", "--quiet")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_lemon_page_keeps_its_article(capsys, tmp_path):
    page, output, why = tmp_path / "lemon.txt", tmp_path / "clean.txt", tmp_path / "why.jsonl"
    page.write_text(LEMON)
    code, out, _ = run(capsys, "clean", page, "-o", output, "--documents", "blank", "--explain", why)
    assert (code, read(output)) == (0, CLEAN_LEMON)
    assert re.search(r"^punctuation +4 +0$", out, re.M)
    assert re.search(r"^kept +5 +2$", out, re.M)
    rules = {record["place"].rpartition(":")[2]: record for record in records(why)}
    assert {number: rules[number]["rule"] for number in ("1", "7", "9", "14", "16")} == {
        "1": "punctuation", "7": "policy", "9": "javascript", "14": "lorem_ipsum", "16": "curly_brackets",
    }  # fmt: skip
    assert (rules["12"]["first"], rules["12"]["rest"]) == (f"{page}:4", "Order yours today from our farm.")


@pytest.mark.slow
def test_four_thousand_pages_agree_with_the_rules_written_out(capsys, tmp_path):
    pages, bad = written_out.made_pages(4_000), ["swearword", "bad words"]
    file, output, why = tmp_path / "pages.jsonl", tmp_path / "clean.jsonl.zst", tmp_path / "why.jsonl.gz"
    file.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(pages)))
    (tmp_path / "bad").write_text("\n".join([*bad, ""]))
    report = counted(capsys, file, "-o", output, "--explain", why, "--bad_words", tmp_path / "bad")
    expected, reasons = written_out.clean(pages, bad)
    assert [record["text"].split("\n") for record in records(output)] == expected
    found = []
    for record in records(why):
        place, first = ([int(n) for n in record[key].split(":")[-2:]] if key in record else None
                        for key in ("place", "first"))  # fmt: skip
        found.append((*place, record["rule"], tuple(first) if first else None))
    assert sorted(found, key=str) == sorted(reasons, key=str)
    shortened = report.pop("shortened")
    by_rule = Counter(rule for _, _, rule, _ in reasons)
    assert {rule: lines for rule, (lines, _) in report["dropped"].items() if lines} == by_rule - Counter(
        duplicates=shortened
    )
    assert all(by_rule[rule] for rule in ("punctuation", "words", "javascript", "policy", "bad_words", "duplicates"))
    assert report["lines"] == report["lines_kept"] + sum(lines for lines, _ in report["dropped"].values())
    assert report["pages"] == 4_000 == report["pages_kept"] + sum(n for _, n in report["dropped"].values())


class StopError(Exception):
    """The end of a run before its time."""


@pytest.fixture
def files(tmp_path, monkeypatch) -> list[Path]:
    """Three inputs of many small chunks."""
    monkeypatch.setattr(reading, "CHUNK", 3000)
    pages = written_out.made_pages(300, seed=1)
    (tmp_path / "a.txt").write_text("\n\n".join(pages[:100]))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(pages[100:200]).encode()))
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in pages[200:]).encode()
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(lines[:9000]) + zstd.compress(lines[9000:]))
    return [tmp_path / name for name in ("a.txt", "b.txt.gz", "c.jsonl.zst")]


@pytest.mark.ci
@pytest.mark.parametrize("ending", ["txt.zst", "jsonl.gz"])
def test_a_stopped_run_resumes_to_the_same_bytes_in_any_number_of_processes(files, tmp_path, monkeypatch, ending):
    options = CleanOptions(documents="blank", near_duplicates=0.7)
    whole, why = tmp_path / f"whole.{ending}", tmp_path / "whole-why.jsonl.gz"
    report = clean(files, whole, options, why)
    assert report.pages_kept > 50
    assert report.dropped["near_duplicates"][1] > 0
    monkeypatch.setattr(pipeline, "COMMIT", 0)
    calls = []

    def stop(read: int) -> None:
        calls.append(read)
        if len(calls) in (4, 9, 30):
            raise StopError

    output, reasons = tmp_path / f"clean.{ending}", tmp_path / "why.jsonl.gz"
    for workers in (1, 1, 2):
        with pytest.raises(StopError):
            clean(files, output, options, reasons, workers=workers, progress=stop)
        assert not output.exists()
        with (tmp_path / f"clean.{ending}.part").open("ab") as part:
            part.write(b"what a kill left behind")
        with pytest.raises(UsageError, match=r"\.state: of a stopped run with other inputs or options; repeat these"):
            clean(files, output, CleanOptions(documents="blank"), reasons)
    assert clean(files, output, options, reasons, workers=2, memory=1, progress=stop) == report
    assert (output.read_bytes(), reasons.read_bytes()) == (whole.read_bytes(), why.read_bytes())
    assert not [*tmp_path.glob("*.state*"), *tmp_path.glob("*.part")]


def test_no_span_of_three_sentences_stands_twice(files, tmp_path):
    options = CleanOptions(documents="blank", min_sentences=0)
    clean(files, tmp_path / "clean.jsonl", options)
    spans = []
    for record in records(tmp_path / "clean.jsonl"):
        parts = [part.lower().strip() for line in record["text"].split("\n") for part in written_out.split(line)]
        spans += zip(parts, parts[1:], parts[2:], strict=False)
    assert len(spans) == len(set(spans)) > 300


def test_each_switch_turns_its_rule_off(tmp_path):
    (tmp_path / "a.txt").write_text(LEMON)
    off = {"punctuation": False, "min_words": 0, "min_sentences": 0, "javascript": False, "policy": False,
           "citations": False, "lorem_ipsum": False, "curly_brackets": False, "duplicates": False}  # fmt: skip
    report = clean([tmp_path / "a.txt"], tmp_path / "b.txt", CleanOptions(documents="blank", **off))
    assert (tmp_path / "b.txt").read_text() == LEMON
    assert report.lines == report.lines_kept
    for rule in ("punctuation", "javascript", "policy", "lorem_ipsum", "curly_brackets", "duplicates"):
        options = CleanOptions(documents="blank", **off | {"citations": True, rule: True})
        report = clean([tmp_path / "a.txt"], tmp_path / "b.txt", options)
        used = {name for name, counts in report.dropped.items() if any(counts)}
        rules = {"punctuation": {rule, "sentences"}, "duplicates": set()}.get(rule, {rule})  # a page is left empty
        assert (used, report.shortened, report.citations) == (rules, int(rule == "duplicates"), 2)


@pytest.mark.ci
def test_language_and_near_duplicates(tmp_path):
    english = " ".join(f"The {n} lemons of the farm are sold in the market of the town." for n in ("ten", "old", "big"))
    french = "Les citrons de la ferme sont vendus au marché de la ville. Ils sont beaux. Nous les aimons beaucoup."
    story = [f"Sentence {n} of a long story about the sea and its ships." for n in "abcdefghijklmnopqrstuvwxyz"]
    pages = [english, french, " ".join(story), " ".join([*story[:20], "Now it ends.", *story[20:]])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    options = CleanOptions(language="en", language_probability=0.9, near_duplicates=0.8, duplicates=False)
    report = clean([tmp_path / "a.jsonl"], tmp_path / "b.jsonl", options, tmp_path / "why.jsonl")
    assert [record["text"] for record in records(tmp_path / "b.jsonl")] == [pages[0], pages[2]]
    assert (report.dropped["language"], report.dropped["near_duplicates"]) == ([1, 1], [1, 1])
    assert records(tmp_path / "why.jsonl")[1]["first"] == f"{tmp_path / 'a.jsonl'}:3:1"


def test_near_duplicates_of_threshold_1_have_the_same_5_grams(tmp_path):
    pages = ["the sea and its old ships", "the sea and its old ships", "the sea and its new ships"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    options = CleanOptions(near_duplicates=1, duplicates=False, punctuation=False, min_sentences=0)
    clean([tmp_path / "a.jsonl"], tmp_path / "b.jsonl", options)
    assert [record["text"] for record in records(tmp_path / "b.jsonl")] == pages[1:]


def test_bad_input_is_named_and_the_rest_is_cleaned(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST", 3000)
    good = "This line has more than five words. So has this second one here. And the third one, too.\n"
    names = {
        "bytes.txt": good.encode() + b"Some \xff bytes.\nA NUL \0 here.\n",
        "long.jsonl": b"",
        "empty.txt": b"",
        "cut.txt.gz": gzip.compress(good.encode() * 5000)[:-40],
        "none.gz": gzip.compress(b""),
        "not.jsonl": b'{"text": 1}\n{"text": "\xe4"}\nno\n',
        "cut.txt.zst": zstd.compress(b"abc" * 999)[:-5],
    }
    names["long.jsonl"] = b'{"text": "' + b"x" * 10**6 + b'"}\n' + json.dumps({"text": good.strip()}).encode()
    for name, data in names.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    inputs = [tmp_path / name for name in (*names, "folder", "missing.txt")]
    code, out, err = run(capsys, "clean", *inputs, "-o", tmp_path / "out.jsonl", "--duplicates", "False",
                         "--format", "json")  # fmt: skip
    assert code == 1
    for wanted in ("bytes.txt: line 2: is not UTF-8", "bytes.txt: line 3: has a NUL", "long.jsonl: line 1: is longer",
                   "empty.txt: empty file", "cut.txt.gz: cannot be read beyond line", "none.gz: holds no text",
                   "not.jsonl: line 1: has no text in field 'text'", "not.jsonl: line 2: is not UTF-8",
                   "not.jsonl: line 3: is not JSON", "cut.txt.zst: cannot be read beyond line", "folder: a folder",
                   "missing.txt: no such file"):  # fmt: skip
        assert sum(wanted in line for line in err.splitlines()) == 1, wanted
    assert len(err.splitlines()) == 13  # and the note
    assert [record["text"] for record in records(tmp_path / "out.jsonl")] == [good.strip()] * 2
    assert json.loads(out)["dropped"]["not_utf8"] == [1, 0]


@pytest.mark.parametrize(("arguments", "cause"), [
    (("a.txt", "--language_probability", "0.5"), "--language_probability: needs --language"),
    (("a.txt", "--text_column", "body"), "--text_column: is for JSON lines"),
    (("a.jsonl", "--documents", "lines"), "--documents: is for text files"),
])  # fmt: skip
def test_a_flag_without_effect_is_refused(capsys, arguments, cause):
    code, _, err = run(capsys, "clean", *arguments, "-o", "b.txt")
    assert (code, cause in err) == (2, True)


@pytest.mark.ci
def test_what_must_not_be_written_is_refused(capsys, tmp_path):
    page = tmp_path / "a.txt"
    page.write_text(LEMON)
    refused = [
        ((page, "-o", page), "is an input"),
        ((page, "-o", tmp_path / "b.txt", "--explain", tmp_path / "b.jsonl", "--bad_words", tmp_path / "no"), "no:"),
        ((page, "-o", tmp_path / "b.csv"), "must end in .txt"),
        ((page, "-o", tmp_path / "b.jsonl", "--explain", tmp_path / "b.jsonl"), "would be written over"),
        ((page, "-o", tmp_path / "b.txt", "--language", "xx"), "--language unknown ('xx'"),
    ]
    for arguments, wanted in refused:
        code, _, err = run(capsys, "clean", *arguments)
        assert code == 1
        assert wanted in one_line(err)
        assert page.read_text() == LEMON
    for name in ("c.txt.part", "c.txt.state"):
        (tmp_path / name).write_text("mine")
        code, _, err = run(capsys, "clean", page, "-o", tmp_path / "c.txt")
        assert (code, (tmp_path / name).read_text()) == (1, "mine")
        assert "move it away" in one_line(err)
        (tmp_path / name).unlink()


def test_a_run_killed_before_its_first_state_resumes(files, tmp_path):
    outputs, whole = (tmp_path / "clean.txt", tmp_path / "why.jsonl"), (tmp_path / "w.txt", tmp_path / "w.jsonl")
    killed = multiprocessing.get_context("fork").Process(
        target=clean, args=(files, outputs[0], CleanOptions(), outputs[1]), kwargs={"progress": lambda _: os._exit(9)}
    )
    killed.start()
    killed.join()
    assert killed.exitcode == 9
    for output in outputs:
        output.with_name(f"{output.name}.part").write_text("what a kill left behind")
    report = clean(files, outputs[0], CleanOptions(), outputs[1])
    assert report == clean(files, whole[0], CleanOptions(), whole[1])
    assert [output.read_bytes() for output in outputs] == [output.read_bytes() for output in whole]


def test_a_full_disk_is_named(tmp_path):
    target = Target(tmp_path / "o.txt", is_ours=True)
    target.open(0)
    target.close(remove=True)
    with open("/dev/full", "wb", buffering=0) as target._file, pytest.raises(OSError, match="No space") as failed:
        target.write(b"text")
    assert failed.value.filename == str(target.part)


def test_a_refused_state_is_closed(tmp_path):
    state = tmp_path / "o.txt.state"
    state.write_text("no database")
    with pytest.raises(UsageError, match="no state of multimodal clean") as refused:
        clean([], tmp_path / "o.txt", CleanOptions())
    assert str(state) not in [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()], refused
