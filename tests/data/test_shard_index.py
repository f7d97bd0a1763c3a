"""Indexes of tars: kept, mapped, rebuilt when stale or damaged, and never written over other files."""

import io
import os
import pickle
import tarfile

import pytest

from multimodal.data import shard_index, sources
from multimodal.data.sources import ListColumns, open_source
from multimodal.errors import DataError


def tar(path, values, side: int = 3000):
    with tarfile.open(path, "w") as file:
        for value in values:
            for ending, data in (("png", bytes([value]) * side), ("json", b'{"text": "%d", "other": "x"}' % value)):
                member = tarfile.TarInfo(f"{value:03}.{ending}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """Indexes of small tars too, and how often headers are read."""
    monkeypatch.setattr(shard_index, "LEAST", 1)
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path / "cache"))
    reads, real = [], sources.shots
    monkeypatch.setattr(sources, "shots", lambda path, name: reads.append(path) or real(path, name))
    return reads


def contents(source) -> list[tuple]:
    samples = [source.read(key) for key in range(len(source))]
    return [(sample.name, sample.media[0], sample.texts, sample.fields) for sample in samples]


def test_an_index_lies_beside_its_shard_and_is_read_instead(tmp_path, kept):
    path = tar(tmp_path / "a.tar", range(5))
    first = open_source(path)
    assert (tmp_path / "a.tar.index").exists()
    again = open_source(path)
    assert len(kept) == 1
    assert contents(again) == contents(first)
    assert contents(again)[3] == (f"{path}!003.png", 3, ("3",), {"text": "3", "other": "x"})
    assert contents(pickle.loads(pickle.dumps(again))) == contents(first)
    other = open_source(path, columns=ListColumns(text_column="other"))
    assert other.read(0).texts == ("x",)


def test_a_changed_shard_is_indexed_again(tmp_path, kept):
    path = tar(tmp_path / "a.tar", range(5))
    open_source(path)
    tar(path, range(10, 17))
    assert [value for _, value, *_ in contents(open_source(path))] == list(range(10, 17))
    os.utime(path, (1, 1))
    assert len(open_source(path)) == 7
    assert len(open_source(path)) == 7
    assert len(kept) == 3


@pytest.mark.parametrize("change", [
    lambda data: data[: len(data) // 2], lambda data: data[:-1], lambda data: b"", lambda data: data + b"x",
    lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], lambda data: data[:-9] + b"\0" + data[-8:],
    lambda data: data[:19] + b"\xff" * 24 + data[43:],
])  # fmt: skip
def test_a_damaged_index_is_made_anew(tmp_path, kept, change):
    path, index = tar(tmp_path / "a.tar", range(5)), tmp_path / "a.tar.index"
    wanted = contents(open_source(path))
    index.write_bytes(change(index.read_bytes()))
    assert contents(open_source(path)) == wanted
    assert len(kept) == 2
    assert contents(open_source(path)) == wanted
    assert len(kept) == 2


def test_other_files_stay_and_folders_without_permission_use_the_cache(tmp_path, kept, monkeypatch):
    path = tar(tmp_path / "a.tar", range(5))
    (tmp_path / "a.tar.index").write_text("mine")
    assert contents(open_source(path)) == contents(open_source(path))
    assert (tmp_path / "a.tar.index").read_text() == "mine"
    (found,) = (tmp_path / "cache").rglob("*-a.tar.index")
    assert len(kept) == 1
    found.unlink()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shard_index, "write_whole", refuse)
    assert len(open_source(path)) == 5


def test_an_index_names_no_file(tmp_path):
    """Not even one with a right checksum."""
    path, index = tar(tmp_path / "a.tar", range(5)), tmp_path / "a.tar.index"
    facts = open_source(path)._indexes[0].facts
    row = b'["x.png", %s, null, ["a"], null, "", ""]'
    media = (b'"/etc/passwd"', b"[0, -1]", b"[0, 99999999999]", b"7", b'{"a": 1}', b"[1e999, 1]", b"[%d, 1]" % 2**63)
    others = (b"[" * 100_000, b'[5, [0, 1], null, ["a"], null, "", ""]', b'["x.png", [0, 1], 7, ["a"], null, "", ""]',
              b'["x.png", [0, 1], null, [7], null, "", ""]', b'["x.png", [0, 1], null, ["a"], [], "", ""]')  # fmt: skip
    for wrong in (*(row % one for one in media), *others):
        index.write_bytes(shard_index.packed(facts, [wrong]))
        with pytest.raises(DataError, match=r"a\.tar\.index: row 0 is damaged; delete the index"):
            open_source(path).read(0)


@pytest.mark.parametrize("wrong", [{"labels": 5}, {"labels": [1]}, {"usable": [[True]]}, {"texted": None}])
def test_facts_of_other_types_and_a_pipe_are_no_index(tmp_path, kept, wrong):
    path, index = tar(tmp_path / "a.tar", range(5)), tmp_path / "a.tar.index"
    made = open_source(path)._indexes[0]
    rows = [shard_index.json.dumps(made[i]).encode() for i in range(5)]
    index.write_bytes(shard_index.packed(made.facts | wrong, rows))
    assert len(contents(open_source(path))) == 5
    assert len(kept) == 2
    index.unlink()
    os.mkfifo(index)
    assert len(contents(open_source(path))) == 5


def test_without_home_the_index_lies_beside_the_shard_alone(tmp_path, kept, monkeypatch):
    monkeypatch.delenv("MULTIMODAL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(shard_index.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert len(contents(open_source(tar(tmp_path / "a.tar", range(5))))) == 5
    assert (tmp_path / "a.tar.index").exists()


def test_rows_without_what_others_have_are_broken_across_shards(tmp_path):
    tar(tmp_path / "a.tar", range(3))
    with tarfile.open(tmp_path / "b.tar", "w") as file:
        member = tarfile.TarInfo("x.png")
        member.size = 9
        file.addfile(member, io.BytesIO(b"123456789"))
    assert open_source(tmp_path / "b.tar").read(0).media == b"123456789"
    with pytest.raises(DataError, match="no text"):
        open_source(f"{tmp_path}/a.tar::{tmp_path}/b.tar").read(3)
