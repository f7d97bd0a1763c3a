"""Cached speech features: each tar, and each state of one, has its own."""

import io
import os
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from multimodal.data.datasets import cached_frames as cached_frames_file
from multimodal.data.datasets.cached_frames import cached_frames
from multimodal.data.datasets.speech import SpeechCorpus
from multimodal.data.datasets.speech_windows import SpeechWindows
from multimodal.errors import DataError
from tests.helpers.data import sets


def recording(pitch: int) -> bytes:
    sound = 0.3 * np.sin(2 * np.pi * pitch * np.arange(6400) / 16000)
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    return held.getvalue()


def spoken(path: Path, *pitches: int) -> Path:
    named = [(f"{i}.{end}", data) for i, pitch in enumerate(pitches)
             for end, data in (("wav", recording(pitch)), ("txt", f"tone {pitch}".encode()))]  # fmt: skip
    return sets.tar(path, named)


def corpus_frames(tars: list[Path], cache: Path | None) -> list[torch.Tensor]:
    made = SpeechCorpus(list(map(str, tars)), cache)
    return [made.frames(i) for i in range(len(made))]


def window_frames(tars: list[Path], cache: Path) -> list[torch.Tensor]:
    return SpeechWindows(tars, cache, language="en").mels


@pytest.mark.parametrize("frames", [corpus_frames, window_frames])
def test_tars_of_the_same_layout_do_not_share_features(tmp_path, frames):
    """Members of equal sizes lie at equal places of both tars, and of one that is written again."""
    tars = [spoken(tmp_path / "a.tar", 300, 500), spoken(tmp_path / "b.tar", 900, 2500)]
    found = frames(tars, tmp_path / "cache")
    wanted = [frames([spoken(tmp_path / f"{pitch}.tar", pitch)], tmp_path / f"cache{pitch}")[0]
              for pitch in (300, 500, 900, 2500)]  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert len(list((tmp_path / "cache").iterdir())) == 4  # frames and lengths of each
    frames(tars, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 4
    spoken(tars[0], 2500, 900)
    assert torch.equal(frames(tars[:1], tmp_path / "cache")[0], wanted[3])


def test_a_broken_item_is_named_again_and_read_once_it_is_mended(tmp_path, caplog):
    """As after chmod, which changes neither its size nor its time."""
    broken = {1}

    def read(number: int) -> torch.Tensor:
        if number in broken:
            raise PermissionError(13, "Permission denied")
        return torch.ones(20 + number, 3)

    lengths = lambda: list(map(len, cached_frames(tmp_path, "abc", read, str, 3, "here", 0.5)))
    assert [lengths(), lengths()] == [[20, 0, 22]] * 2
    assert caplog.text.count("broken recording skipped: 1: [Errno 13]") == 2
    broken.clear()
    assert lengths() == [20, 21, 22]


def test_a_stop_leaves_no_partial_cache_and_a_full_disk_is_named(tmp_path, monkeypatch):
    lengths = lambda read: cached_frames(tmp_path, "ab", read, str, 3, "here", 0.5)
    with pytest.raises(KeyboardInterrupt):
        lengths(lambda number: exec("raise KeyboardInterrupt") if number else torch.ones(9, 3))
    monkeypatch.setattr(cached_frames_file, "write_whole", lambda path, data: os.write(-1, b""))
    with pytest.raises(OSError, match=r"frames-\w+\.f16"):
        lengths(lambda number: torch.ones(9, 3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lengths", [[-5, 46], [41], [20, 20, 1], None])
def test_lengths_that_do_not_fit_the_items_are_damage(tmp_path, lengths):
    read = lambda: cached_frames(tmp_path, ["a", "b"], lambda i: torch.ones(20 + i, 3), str, 3, "here", 0.1)
    assert list(map(len, read())) == [20, 21]
    (file,) = tmp_path.glob("*.npy")
    if lengths is None:
        file.unlink()
        os.mkfifo(file)
    else:
        np.save(file, np.array(lengths))
    with pytest.raises(DataError, match=r"damaged cache \(expected"):
        read()
