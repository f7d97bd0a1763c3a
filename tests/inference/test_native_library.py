"""The library of compiled steps: built once, kept, checked, done without."""

import ctypes
import os
from pathlib import Path

import pytest

from multimodal.inference.native import library as native
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.text import TextTransformer
from multimodal.system import compiled as compiled_parts
from tests.inference.test_prepared_text import DECODERS, checkpoint


def test_it_can_be_turned_off(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("MULTIMODAL_NATIVE", "0")
    assert native.library() is None
    assert type(prepare_for_inference(checkpoint(DECODERS["learned"]), "float32").model) is TextTransformer
    assert capsys.readouterr().err == ""
    assert not list(empty_cache.iterdir())


@pytest.mark.parametrize(("compiler", "why"), [("missing", "no C++ compiler (missing)"), ("false", "/false failed ()")])
def test_without_a_compiler_one_line_says_so(empty_cache, monkeypatch, capsys, compiler: str, why: str):
    monkeypatch.setenv("CXX", compiler)
    assert native.library() is None
    assert native.library() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("multimodal: models compute without compiled maps: ")
    assert line.endswith(why)
    assert type(prepare_for_inference(checkpoint(DECODERS["learned"]), "float32").model) is TextTransformer


def place(folder: Path, made: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stand in for the compiler; the returned list gets the places of each library that is loaded."""
    loaded = []
    monkeypatch.setattr(compiled_parts, "_build", lambda *_: made)
    monkeypatch.setattr(compiled_parts, "_compiler", lambda: "c++")
    load = ctypes.CDLL
    monkeypatch.setattr(compiled_parts.ctypes, "CDLL", lambda path: loaded.append(Path(path)) or load(path))
    return loaded


@pytest.fixture
def made(built: Path, compiled: None) -> bytes:
    newest = max((built / "native").glob("*.so"), key=lambda path: path.stat().st_mtime)  # of these sources
    return newest.read_bytes()[: -compiled_parts.DIGEST]


def test_it_is_compiled_once_and_again_if_damaged(made: bytes, empty_cache: Path, monkeypatch, capsys):
    loaded = place(empty_cache, made, monkeypatch)
    assert native.library() is not None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("multimodal: compiled linear maps and decoding steps in ")
    native.library.cache_clear()
    assert native.library() is not None
    assert capsys.readouterr().err == ""
    path = loaded[0]
    whole = path.read_bytes()
    for damaged in (b"", whole[:-100], b"\0" + whole[1:]):
        path.unlink()  # the old one is mapped
        path.write_bytes(damaged)
        path.chmod(0o700)
        native.library.cache_clear()
        assert native.library() is not None
        assert path.read_bytes() == whole
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_others_may_write_is_not_loaded(made: bytes, empty_cache: Path, monkeypatch, capsys):
    loaded = place(empty_cache, made, monkeypatch)
    native.library()
    path = loaded.pop()
    capsys.readouterr()
    for open_to_others in (path, path.parent):
        mode = open_to_others.stat().st_mode
        open_to_others.chmod(0o777)
        native.library.cache_clear()
        assert native.library() is None
        assert f"{open_to_others}: must be yours alone to write" in capsys.readouterr().err
        open_to_others.chmod(mode)
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))
    native.library.cache_clear()
    assert native.library() is None
    assert not loaded


def test_a_folder_that_cannot_be_written(made: bytes, empty_cache: Path, monkeypatch, capsys):
    place(empty_cache, made, monkeypatch)
    (empty_cache / "native").write_text("a file where the folder should be")  # the superuser may write in any folder
    assert native.library() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert str(empty_cache / "native") in line
    assert "MULTIMODAL_CACHE names another folder" in line


def test_two_processes_at_once(made: bytes, empty_cache: Path, monkeypatch):
    place(empty_cache, made, monkeypatch)
    first = native.library()
    path = next((empty_cache / "native").glob("*.so"))
    other = path.read_bytes()
    path.unlink()

    def build(*_: object) -> bytes:  # the other one is quicker
        path.write_bytes(other)
        path.chmod(0o700)
        return made

    monkeypatch.setattr(compiled_parts, "_build", build)
    native.library.cache_clear()
    assert native.library() is not None
    assert first is not None
    assert os.listdir(empty_cache / "native") == [path.name]
