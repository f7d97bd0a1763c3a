"""Folder walks: link loops, links elsewhere, patterns with `**`, unreadable folders."""

import glob
import os
import warnings
from pathlib import Path

import pytest

from multimodal.data.sources import open_source
from multimodal.data.validate import validate
from multimodal.system import walk as module
from multimodal.system.walk import matches
from multimodal.tokens.audio.reading import find_audio
from multimodal.tokens.image.reading import find_images
from tests.helpers.data import sets


def place(tmp_path: Path, *files: str) -> Path:
    for name in files:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sets.png(1))
    return tmp_path / "data"


def names(data: Path, warning: str | None = None) -> list[str]:
    """Items of a source and its expected warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = open_source(data)
    assert [warning in str(one.message) for one in caught] == ([] if warning is None else [True])
    return [os.path.relpath(source.name(key), data) for key in range(len(source))]


@pytest.mark.parametrize("target", [".", "..", "../..", "../cat", "{}", "{}/cat"])
def test_a_loop_is_not_walked_and_is_named(target, tmp_path):
    data = place(tmp_path, "cat/a.png", "cat/in/b.png", "dog/c.png")
    (data / "cat" / "loop").symlink_to(target.format(data))
    actual = names(data, f"{data}/cat/loop: the link leads to ")
    assert actual == ["cat/a.png", "cat/in/b.png", "dog/c.png"]


def test_loops_through_each_other_end(tmp_path):
    data = place(tmp_path, "cat/a.png", "dog/b.png")
    (data / "cat" / "x").symlink_to("../dog")
    (data / "dog" / "y").symlink_to("../cat")
    for number in range(20):  # 2^20 ways, if each were gone
        (data / "dog" / f"z{number}").symlink_to(".")
    assert names(data, "cat/x: the link leads to ") == ["cat/a.png", "dog/b.png"]
    assert names(data, ", nor are 21 more such links") == ["cat/a.png", "dog/b.png"]


def test_links_to_folders_elsewhere_are_followed_once(tmp_path):
    store = tmp_path / "store"
    for name in ("cats/1.png", "cats/in/2.png", "dogs/3.png"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(sets.png(1))
    (store / "cats" / "back").symlink_to("..")
    data = place(tmp_path, "ape/4.png")
    (data / "cat").symlink_to(store / "cats")
    (data / "dog").symlink_to(store / "dogs")
    actual = names(data, "cat/back/cats: the link leads to ")
    assert actual == ["ape/4.png", "cat/1.png", "cat/in/2.png", "dog/3.png"]


def test_a_class_that_is_a_link_keeps_its_label(tmp_path):
    data = place(tmp_path, "cat/a.png", ".store/dog/b.png")
    (data / "dog").symlink_to(".store/dog")
    source = open_source(data)
    assert [(source.row(key).label, source.row(key).name) for key in range(2)] == [
        ("cat", f"{data}/cat/a.png"), ("dog", f"{data}/dog/b.png")
    ]  # fmt: skip


def test_a_folder_that_cannot_be_listed_is_a_broken_item(tmp_path, monkeypatch):
    data = place(tmp_path, "cat/a.png", "dog/b.png")
    scan = os.scandir

    def refuses(path: str) -> object:
        if path.endswith("dog"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(module.os, "scandir", refuses)
    (fault,) = validate(open_source(data)).faults
    assert (fault.name, fault.detail) == (f"{data}/dog", "a folder that cannot be listed (Permission denied)")
    with pytest.warns(UserWarning, match=r"dog: cannot be listed \(Permission denied\)"):
        assert [path.name for path in find_images([str(data)])] == ["a.png"]


def test_patterns_do_not_follow_links(tmp_path):
    data = place(tmp_path, "cat/a.png", "cat/in/b.png", "c.png", ".hidden/d.png")
    for number in range(20):
        (data / "cat" / f"loop{number}").symlink_to("..")
    actual = [os.path.relpath(path, data) for path in matches(f"{data}/**/*.png")]
    assert actual == ["c.png", "cat/a.png", "cat/in/b.png"]
    for pattern, expected in (
        (f"{data}/**", 3),
        (f"{data}/*/**/*.png", 2),
        (f"{data}/c*/**/in/*", 1),
        (f"{data}/**/in", 1),
    ):
        assert len(find_images([pattern])) == expected, pattern


def test_patterns_are_as_those_of_glob(tmp_path, monkeypatch):
    place(tmp_path, "cat/a.png", "cat/in/b.png", "c.png", "x/y/z/d.png", "x/y/e.png")
    monkeypatch.chdir(tmp_path)
    for pattern in ("data/**/*.png", "**/*.png", "data/*/**/?.png", "d*/x/**/z/*", "./data/**/[ab].png", "none/**/x",
                    "data/**/y/**/*.png", "data/*/*.png", "**/y/*.png", f"{tmp_path}/**/*.png"):  # fmt: skip
        assert matches(pattern) == sorted(glob.glob(pattern, recursive=True)), pattern


def test_audio_is_found_once(tmp_path):
    data = place(tmp_path, "a.wav", "in/b.flac", "in/c.txt")
    (data / "in" / "loop").symlink_to("..")
    (data / "dead.wav").symlink_to("nowhere")
    expected = [data / name for name in ("a.wav", "dead.wav", "in/b.flac")]
    assert find_audio([data]) == expected
    assert find_audio([f"{data}/**/*.wav"]) == expected[:1]
