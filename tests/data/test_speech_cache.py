"""Cached speech features: each tar, and each state of one, has its own."""

import io
import os
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

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
