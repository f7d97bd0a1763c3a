"""The compiled library, built once for many tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from multimodal.inference.native import library as native
from multimodal.system import compiled as compiled_parts


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Path:
    """The cache folder with the library, compiled once for many runs."""
    if not any(map(shutil.which, compiled_parts.COMPILERS)):
        pytest.skip("no C++ compiler")
    return request.config.cache.mkdir("compiled")


@pytest.fixture
def compiled(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MULTIMODAL_CACHE", str(built))
    monkeypatch.delenv("MULTIMODAL_NATIVE", raising=False)
    native.library.cache_clear()
    assert native.library() is not None
    yield
    native.library.cache_clear()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path))
    monkeypatch.delenv("MULTIMODAL_NATIVE", raising=False)
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()
