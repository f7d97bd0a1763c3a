"""The package's work before a model: on images in memory, and on files of sound."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from multimodal.data.datasets.images import square
from multimodal.data.sources import Sample
from multimodal.tasks.transcribe.audio_source import AudioSource, MelReader, clip_waves, survey
from multimodal.tasks.transcribe.segmentation import LevelMeter
from multimodal.tokens.audio.log_mel import RATE, filterbank
from multimodal.tokens.audio.reading import stream_audio
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing, preprocess
from multimodal.tokens.image.reading import read_image

FRAMES = 3000  # of a window
Run = Callable[[], list[float]]


def record(size: int) -> Preprocessing:
    return Preprocessing((size, size), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)


def jpegs(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]


def pixels(file: bytes) -> float:
    return float(preprocess(read_image(file), record(224))[0, 0, 0])


def exact(folder: Path, device: str, **_: Any) -> Run:
    files = jpegs(folder)
    return lambda: [pixels(file) for file in files]


def in_processes(folder: Path, device: str, processes: int, **_: Any) -> Run:
    files, pool = jpegs(folder), multiprocessing.Pool(processes, torch.set_num_threads, (1,))
    return lambda: pool.map(pixels, files)


def drawn(folder: Path, device: str, size: int, **_: Any) -> Run:
    """Work of a worker for `train_vit.py` on a GPU: decoded crops in one batch, with their draws."""
    from multimodal.train.objectives.augment_images import ImageAugment, ImageAugmentSettings
    from multimodal.train.objectives.classify import MixImages

    samples, settings = [Sample("", file, "0", (), {}) for file in jpegs(folder)], ImageAugmentSettings()
    prepare, collate = ImageAugment(["0"], record(size), settings), MixImages(1, record(size), settings)

    def run() -> list[float]:
        examples = [prepare(sample, torch.Generator().manual_seed(i)) for i, sample in enumerate(samples)]
        return [float(len(collate(examples).tensors[1]))]

    return run


def squares(folder: Path, device: str, size: int, **_: Any) -> Run:
    """Work of a worker for `train_clip.py` on a GPU: decoded squares of 7/6 of the model's edge."""
    files, edge = jpegs(folder), size * 7 // 6
    return lambda: [float(torch.stack([square(read_image(file, least=edge), edge) for file in files])[-1, 0, 0, 0])]


def samples(folder: Path, device: str, file: str, **_: Any) -> Run:
    return lambda: [float(sum(len(chunk) for chunk in stream_audio(folder / file)))]


def whisper(folder: Path, device: str, file: str, **_: Any) -> Run:
    """The survey with levels, then the log-mel of each window."""

    def run() -> list[float]:
        source = AudioSource(folder / file, quiet=True)
        found = survey(source, bands=80, push=LevelMeter().push)
        mel = MelReader(source, 80, found.mel_peak, found.samples, mel=found.mel)
        return [float(mel.window(start, FRAMES)[0, 0]) for start in range(0, found.samples // 160, FRAMES)]

    return run


def conformer(folder: Path, device: str, file: str, **_: Any) -> Run:
    """The survey with levels, then the filterbank of each piece of 15 s."""

    def run() -> list[float]:
        source = AudioSource(folder / file, quiet=True)
        found = survey(source, push=LevelMeter().push)
        pieces = [(start, start + 15 * RATE) for start in range(0, found.samples, 15 * RATE)]
        return [float(filterbank(wave, 80)[0, 0]) for _, wave in clip_waves(source, pieces)]

    return run
