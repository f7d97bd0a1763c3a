"""A stranger's list: what its rows may name, and that nothing is asked, started or written for the others."""

import argparse
import ast
import os
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from multimodal.cli.main import parser
from multimodal.cli.parser import Parser
from multimodal.data.datasets.speech_windows import read_clips
from multimodal.data.loader import Loader, shuffled
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns, open_source
from multimodal.data.validate import validate
from multimodal.errors import DataError, UsageError
from multimodal.tokens.image.reading import read_image
from multimodal.train.recipe_cli import parse
from tests.helpers.commands import run
from tests.helpers.data import sets
from tests.helpers.paths import RECIPES, ROOT

# what recipes read lists with
READERS = (
    "open_source",
    "SpeechCorpus",
    "SpeechWindows",
    "LabelledImageSource",
    "read_clips",
    "open_images",
    "open_references",
    "read_named",
)
MEASURED = ("open_images",)  # sets that are evaluated on, whose columns are found
TRUSTING = Trust(trust_paths=True)


@pytest.fixture
def listener():
    """A server's port, whose connections nobody takes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def unasked(server: socket.socket) -> bool:
    try:
        server.accept()
    except BlockingIOError:
        return True
    return False


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_programs(monkeypatch) -> None:
    def started(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a program was started: {arguments}")

    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(os, "system", started)


HOSTILE = {
    "http://127.0.0.1:{port}/x.jpg": "--remote 127.0.0.1 allows it",
    "HTTP://localhost:{port}/x.jpg": "--remote localhost allows it",
    "http://x@127.0.0.1:{port}/x.jpg": "--remote 127.0.0.1 allows it",
    "http://[::1]:{port}/x.jpg": "--remote ::1 allows it",
    "https://169.254.169.254/latest/x.jpg": "--remote 169.254.169.254 allows it",
    "http://[/x.jpg": "not a URL that can be read",
    "gs://bucket/x.jpg": "--remote gs://bucket allows it",
    "s3://bucket/x.jpg": "--remote s3://bucket allows it",
    "file:///etc/passwd": "file: URLs in a list are not read",
    "ftp://127.0.0.1:{port}/x.jpg": "ftp: URLs in a list are not read",
    "ssh://127.0.0.1:{port}/x.jpg": "ssh: URLs in a list are not read",
    "pipe:touch started": "pipe: URLs in a list are not read",
    "PIPE:touch started": "pipe: URLs in a list are not read",
    "/etc/passwd": "an absolute path outside of the folder of the list ('/etc/passwd'; --trust_paths allows it)",
    "../outside.png": "a path outside of the folder of the list ('../outside.png'; --trust_paths allows it)",
    "in/../../outside.png": "--trust_paths allows it",
    "link.png": "a link leads out of the folder of the list",
    "linked/outside.png": "a link leads out of the folder of the list",
    "linked/../outside.png": "a link leads out of the folder of the list",
    "a\0.png": "NUL in a path",
}


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_what_a_hostile_list_names_is_refused_and_nothing_happens(kind, listener, cache, no_programs, tmp_path):
    place = tmp_path / "set"
    (place / "in").mkdir(parents=True)
    for path in (tmp_path / "outside.png", place / "good.png"):
        path.write_bytes(sets.png(7))
    (place / "link.png").symlink_to(tmp_path / "outside.png")
    (place / "linked").symlink_to(tmp_path)
    names = [name.format(port=listener.getsockname()[1]) for name in HOSTILE]
    if kind == "csv":
        text = "".join(f"{name},x\n" for name in ["file_name,text", *names, "good.png"])
        (place / "list.csv").write_text(text.replace("file_name,text,x", "file_name,text"))
    else:
        sets.lines(place / "list.jsonl", [{"file_name": name, "text": "x"} for name in [*names, "good.png"]])
    before = sorted(tmp_path.rglob("*"))
    first = 2 if kind == "csv" else 1
    report = validate(open_source(place / f"list.{kind}"))
    assert report.broken == len(names)
    for number, (fault, cause) in enumerate(zip(report.faults, HOSTILE.values(), strict=True), first):
        assert fault.name == f"{place}/list.{kind} line {number}"
        assert cause in fault.detail
    assert unasked(listener)
    assert sorted(tmp_path.rglob("*")) == before
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("good.png", True), ("./in/good.png", True), ("in/../good.png", True), ("../set/good.png", True),
        ("{}/good.png", True), ("inner.png", True), ("..png", True), ("a .png", True), ("{}-more/x.png", False),
    ],
)  # fmt: skip
def test_rows_name_files_of_the_lists_own_folder(name, allowed, tmp_path):
    place = tmp_path / "set"
    for path in (place / "in" / "good.png", place / "good.png", place / "..png", place / "a .png",
                 tmp_path / "set-more" / "x.png"):  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sets.png(7))
    (place / "inner.png").symlink_to("in/good.png")
    rows = [{"file_name": name.format(place)}, {"file_name": "good.png"}]
    assert validate(open_source(sets.lines(place / "a.jsonl", rows))).broken == int(not allowed)


def test_trust_lets_rows_leave_the_folder(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "lists").mkdir()
    path = tmp_path / "images" / "x.png"
    path.write_bytes(sets.png(9))
    (tmp_path / "lists" / "link.png").symlink_to(path)
    rows = [{"file_name": name} for name in ("../images/x.png", str(path), "link.png")]
    data = sets.lines(tmp_path / "lists" / "a.jsonl", rows)
    with pytest.raises(DataError, match="trust_paths allows it"):
        open_source(data).read(0)
    assert validate(open_source(data, trust=TRUSTING)).broken == 0
    assert validate(open_source(data)).broken == 3


def test_a_list_and_its_files_may_be_links_into_one_store(tmp_path):
    """As in the Hugging Face cache: snapshots/1/list.jsonl and its files are links to blobs/."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    sets.lines(tmp_path / "blobs" / "aa", [{"file_name": "x.png"}])
    (tmp_path / "blobs" / "bb").write_bytes(sets.png(3))
    (tmp_path / "snapshots" / "1" / "list.jsonl").symlink_to("../../blobs/aa")
    (tmp_path / "snapshots" / "1" / "x.png").symlink_to("../../blobs/bb")
    assert validate(open_source(tmp_path / "snapshots" / "1" / "list.jsonl")).broken == 0


def test_relative_lists_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets.table(Path("a.csv"), range(3))
    source = open_source("a.csv")
    assert [source.read(key).media for key in range(3)] == [Path(f"00{value}.png") for value in range(3)]
    assert source.name(2) == "a.csv line 4"
    assert open_source(str(tmp_path / "." / "a.csv")).read(0).media == tmp_path / "000.png"


@pytest.mark.parametrize("host", ["", "*", "a/b", "http://a/b", "a b", "x@y"])
def test_hosts_are_names(host):
    with pytest.raises(UsageError, match=r"remote .*not a host"):
        Trust(remote=(host,))


@pytest.mark.parametrize(
    ("remote", "url", "allowed"),
    [
        ("example.org", "https://example.org/x.jpg", True), ("example.org", "https://EXAMPLE.org:8443/x.jpg", True),
        ("Example.org", "https://example.org/x.jpg", True), ("example.org", "https://a.example.org/x.jpg", False),
        ("example.org", "https://example.org.evil.net/x.jpg", False), ("example.org:80", "http://example.org/x", False),
        ("example.org", "https://example.org@evil.net/x.jpg", False), ("example.org:81", "http://example.org:81", True),
        ("https://example.org", "http://example.org/x.jpg", False), ("[::1]", "http://[::1]:8/x.jpg", True),
        ("s3://bucket", "s3://bucket/x.jpg", True), ("bucket", "s3://bucket/x.jpg", False),
        ("s3://bucket", "gs://bucket/x.jpg", False), ("s3://bucket", "s3://bucket-2/x.jpg", False),
        ("etc", "file://etc/passwd", False), ("x", "pipe:x", False),
    ],
)  # fmt: skip
def test_hosts_are_matched_whole(remote, url, allowed):
    assert bool(Trust(remote=(remote,)).refuses_url(url)) != allowed


@pytest.mark.parametrize(
    ("row", "allowed"),
    [
        ("x.jpg", True), ("in/x.jpg", True), ("memory://sets/a/x.jpg", True), ("../b/x.jpg", False),
        ("in/%2e%2E/%2e%2e/x.jpg", False), ("..%2fx.jpg", False), ("..\\x.jpg", False), ("/etc/passwd", False),
        ("//other/x.jpg", False), ("memory://sets/b/x.jpg", False), ("memory://other/x.jpg", False),
    ],
)  # fmt: skip
def test_rows_of_a_list_behind_a_url_lie_below_it(row, allowed):
    assert bool(Trust().placed(row, "memory://sets/a")[1]) != allowed


def test_clips_are_judged_too(tmp_path):
    row = {"text": "x", "language": "en"}
    for name, cause in (("/etc/x.wav", "--trust_paths"), ("../x.wav", "--trust_paths"), ("http://h/x.wav", "--remote")):
        path = sets.lines(tmp_path / "a.jsonl", [row | {"audio_filepath": "y.wav"}, row | {"audio_filepath": name}])
        with pytest.raises(DataError, match=rf"a\.jsonl line 2: .*{cause}"):
            read_clips(path)
    sets.lines(path, [row | {"audio_filepath": "/etc/x.wav"}])
    assert read_clips(path, trust=TRUSTING)[0].source.row(0).media == "/etc/x.wav"


def test_the_commands_flag(tmp_path, capsys):
    (tmp_path / "x.png").write_bytes(sets.png(1))
    (tmp_path / "set").mkdir()
    data = sets.lines(tmp_path / "set" / "a.jsonl", [{"file_name": "../x.png"}])
    code, _, err = run(capsys, "validate", data, "--workers", "1")
    assert (code, err.count("\n")) == (1, 1)
    assert "line 1: a path outside of the folder of the list ('../x.png'; --trust_paths allows it)" in err
    code, out, _ = run(capsys, "validate", data, "--workers", "1", "--trust_paths")
    assert (code, "0 of 1 items are broken" in out) == (0, True)


def commands_with(flag: str, found: Parser, name: str = "") -> set[str]:
    names = {name} if any(flag in action.option_strings for action in found.load()._actions) else set()
    for action in found._actions:
        if isinstance(action, argparse._SubParsersAction):
            names |= {n for key, inner in action.choices.items() for n in commands_with(flag, inner, f"{name} {key}")}
    return names


def test_all_commands_that_read_lists_have_the_flags():
    kinds = ("asr", "classification", "zeroshot", "retrieval", "linear-probe", "few-shot", "captions", "answers")
    wanted = {" validate", " classify", *(f" evaluate {kind}" for kind in kinds)}
    assert commands_with("--trust_paths", parser()) == commands_with("--remote", parser()) == wanted


@dataclass(frozen=True)
class Settings:
    """As a recipe has them."""

    columns: ListColumns = field(default_factory=ListColumns)
    trust: Trust = field(default_factory=Trust)


def test_recipes_pass_on_their_columns_and_trust():
    found = 0
    finetuning = ROOT / "multimodal" / "train" / "objectives" / "finetune"
    for path in [*sorted(RECIPES.rglob("*.py")), *sorted(finetuning.glob("*.py"))]:
        tree = ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in READERS:
                given = [ast.unparse(value) for value in (*call.args, *(word.value for word in call.keywords))]
                names = [name.split(".")[-1] for name in given]
                assert names[-1] == "trust", f"{path.name}:{call.lineno}"
                trains = (path.name.startswith("train_") or path.parent == finetuning) and call.func.id not in MEASURED
                assert not trains or names[-2] == "columns", f"{path.name}:{call.lineno}"
                found += 1
    assert found > 15
    flags = ["--trust_paths", "--remote", "a.org", "s3://b"]
    assert parse(Settings, "x", "", flags).trust == Trust(True, ("a.org", "s3://b"))
    assert parse(Settings, "x", "", []) == Settings()
    assert parse(Settings, "x", "", ["--text_column", "said"]).columns == ListColumns(text_column="said")


def test_the_loader_names_the_line(tmp_path, caplog):
    rows = [{"file_name": name, "label": "a"} for name in ("x.png", "/etc/x.png", "none.png", "none.png")]
    (tmp_path / "x.png").write_bytes(sets.png(1))
    data = sets.lines(tmp_path / "a.jsonl", rows)
    source = open_source(data)
    loader = Loader(source, shuffled(4, 4, 0), lambda sample, _: read_image(sample.media), list, most_broken=1.0)
    assert next(loader.start(0)).broken == 3
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"broken item skipped: {data} line 2: an absolute path outside of the folder of the list ('/etc/x.png'; "
        "--trust_paths allows it)",
        f"broken item skipped: {data} line 3: {tmp_path}/none.png: no such file (cannot be opened)",
        f"broken item skipped: {data} line 4: {tmp_path}/none.png: no such file (cannot be opened)",
    ]


def test_lines_that_hold_the_same_broken_image_are_each_named(tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(sets.png(1)[:40])
    data = sets.lines(tmp_path / "a.jsonl", [{"file_name": "bad.png"}] * 3)
    shard = sets.tar(tmp_path / "b.tar", [("x.png", b"no"), ("y.png", b"no")])
    code, out, _ = run(capsys, "validate", data, shard, "--workers", "1")
    lines = out.splitlines()
    assert code == 1
    for number, line in enumerate(lines[:3], 1):
        assert line.startswith(f"{data} line {number}: {tmp_path}/bad.png: not a readable image (")
    assert lines[3].split() == ["3", "not", "a", "readable", "image"]
    assert [line.partition(": ")[0] for line in lines[5:7]] == [f"{shard}!x.png", f"{shard}!y.png"]


def test_a_row_of_a_csv_is_named_by_its_first_line(tmp_path):
    (tmp_path / "a.csv").write_text('file_name,text\nx.png,"one\ntwo"\n\nnone.png,"three\nfour"\n')
    (tmp_path / "x.png").write_bytes(sets.png(1))
    (fault,) = validate(open_source(tmp_path / "a.csv")).faults
    assert fault.name == f"{tmp_path}/a.csv line 5"
