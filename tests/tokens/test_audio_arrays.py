"""Audio in memory: each form gives the samples of the file that holds it; what could mean two things is refused."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.audio.arrays import Samples, as_audio
from multimodal.tokens.audio.reading import read_audio
from tests.helpers.data.audio_files import chirp, encode, wav

STEREO = np.stack([chirp(44100, 2.5), 0.5 * chirp(44100, 2.5)[::-1]]).astype(np.float32)
FILE = encode(STEREO, 44100, "wav", "pcm_f32le", "stereo")


def mono(source: object, sampling_rate: int | None = None) -> torch.Tensor:
    found = as_audio(source, sampling_rate)
    return torch.cat(list(found.stream(30))) if isinstance(found, Samples) else read_audio(found)


def pcm(dtype: str) -> np.ndarray:
    return (STEREO * np.float32(np.iinfo(dtype).max)).round().astype(dtype)


# as torchcodec's AudioSamples
DECODED = SimpleNamespace(data=torch.from_numpy(STEREO), sample_rate=44100)
FORMS = {
    "array": lambda: (STEREO, 44100),
    "array [T C]": lambda: (STEREO.T, 44100),
    "float64": lambda: (STEREO.astype(np.float64), 44100),
    "tensor": lambda: (torch.from_numpy(STEREO), 44100),
    "pair": lambda: ((44100, STEREO.T), None),
    "other pair": lambda: ((torch.from_numpy(STEREO), 44100), None),
    "pair with a float": lambda: ((STEREO, 44100.0), None),
    "datasets": lambda: ({"path": "a.wav", "array": STEREO, "sampling_rate": 44100}, None),
    "decoder of datasets 4": lambda: (SimpleNamespace(get_all_samples=lambda: DECODED), None),
    "undecoded": lambda: ({"path": None, "bytes": FILE}, None),
    "file": lambda: (io.BytesIO(FILE), None),
    "bytearray": lambda: (bytearray(FILE), None),
    "memoryview": lambda: ({"bytes": memoryview(FILE)}, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_equal_to_the_file(form):
    assert torch.equal(mono(*FORMS[form]()), read_audio(FILE))


@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_integers_have_their_full_scale(dtype):
    found = mono(pcm(dtype), 44100)
    assert (found - read_audio(FILE)).abs().max() < 2e-4
    if dtype == "int16":
        assert torch.equal(found, read_audio(wav(STEREO, 44100)))


def test_sixteen_kilohertz_is_the_default():
    wave = torch.from_numpy(chirp(16000))
    assert torch.equal(mono(wave), wave)
    assert torch.equal(mono(wave[None]), wave)
    assert torch.equal(mono(wave[:, None]), wave)


def test_one_channel_of_an_array():
    (left, right) = (torch.cat(list(as_audio(STEREO, 16000).stream(30, channel))) for channel in (0, 1))
    assert torch.equal(left, torch.from_numpy(STEREO[0]))
    assert torch.equal(right, torch.from_numpy(STEREO[1]))


def test_paths_stay_paths():
    assert as_audio("a.wav") == "a.wav"
    assert as_audio({"path": Path("a.wav")}) == Path("a.wav")


WRONG = {
    "objects": (np.array([None, 1.0]), "expected int16, int32, float16"),
    "bool": (np.zeros(9, bool), "(got bool)"),
    "int64": (torch.zeros(900, dtype=torch.long), "(got int64)"),
    "uint8": (np.zeros(900, np.uint8), "(got uint8)"),
    "empty": (np.zeros(0, np.float32), "expected at least one (got shape [0])"),
    "no channels": (np.zeros((0, 900), np.float32), "expected at least one (got shape [0, 900])"),
    "two meanings": (np.zeros((2, 9), np.float32), "(got shape [2, 9])"),
    "no channel axis": (np.zeros((900, 800), np.float32), "(got shape [900, 800])"),
    "batch": (np.zeros((2, 1, 900), np.float32), "shape [T], [C T] or [T C] (got [2, 1, 900])"),
    "unscaled": (np.full(900, 3000.0), "floats must be in [-1, 1] (got 3000"),
    "nan": (np.full(900, np.nan), "not a finite sample near 0 s (nan)"),
    "infinite": (np.full(900, 1e300), "not a finite sample near 0 s (inf)"),
    "two arrays": ((np.zeros(9), np.zeros(9)), "or (array, sampling rate) (got (ndarray, ndarray))"),
    "three": ((16000, np.zeros(9), 1), "(got (int, ndarray, int))"),
    "pair of lists": ((16000, [0.0, 0.1]), "(got (int, list))"),
    "list in a dict": ({"array": [0.0], "sampling_rate": 16000}, "'array' must be an array or tensor (got list)"),
    "no rate": ({"array": np.zeros(900)}, "expected 'sampling_rate' beside 'array'"),
    "empty dict": ({}, "(got none)"),
    "other dict": ({"audio": 1}, "expected 'array', 'bytes' or 'path' (got audio)"),
    "text file": (io.StringIO("a"), "opened in binary mode (got str)"),
    "audio opened as text": (io.TextIOWrapper(io.BytesIO(b"\xff\xfb"), "utf-8"), "opened in binary mode (got str)"),
    "sparse": (torch.zeros(900).to_sparse(), "expected a dense tensor of numbers (got torch.sparse_coo"),
    "masked": (np.ma.masked_equal(np.arange(900, dtype=np.int16), 3), "without a mask (got 1 masked"),
    "number": (3, "<int>: expected a path, bytes"),
    "list": ([0.0, 0.1], "or {'array', 'sampling_rate'}; many() takes a list of recordings"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused_in_one_line(name):
    source, message = WRONG[name]
    with pytest.raises(AudioError) as error:
        mono(source)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "rate", "message"),
    [
        ("a.wav", 16000, "sampling_rate 16000: only for arrays"),
        ((8000, np.zeros(900)), 16000, "sampling_rate 16000: the audio has its own rate, 8000"),
        (("16000", np.zeros(900)), None, r"sampling_rate: .* \(got '16000'\)"),
        (np.zeros(900), 10, "sampling_rate: must be a whole number from 1,000"),
        ((16000.5, np.zeros(900)), None, r"sampling_rate: .* \(got 16000.5\)"),
        ([0.0, 0.1], 16000, "<list>: expected a path, bytes"),  # the list is the fault, not the rate
    ],
)
def test_rates_that_cannot_be(source, rate, message):
    with pytest.raises((UsageError, AudioError), match=message):
        as_audio(source, rate)
