"""Spoken sentences in several languages as cached log-mel frames, noise, and the order in which a run meets them."""

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.datasets.speech import reading_cache, stamp
from multimodal.data.loader import BROKEN, generator
from multimodal.data.manifests import read_list
from multimodal.data.remote.trust import OWN_FOLDER, Trust, is_remote
from multimodal.errors import DataError
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel
from multimodal.tokens.audio.reading import read_audio

FRAMES_STEP = 64  # widths are multiples of it: oneDNN compiles a kernel for each new shape
EDGE = 2  # frames kept before and after the sound of a clip
MOST_BROKEN = 0.05  # share of a manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Clip:
    """A recording of one sentence; `translation` is English, None where there is none. `place`: its line."""

    path: Path
    text: str
    language: str
    translation: str | None = None
    place: str = ""


class Sample(NamedTuple):
    """The key of one window: `clips` after one another (none: noise number `noise`), in `frames` mel frames, after
    the text of the clip `previous` (-1: none). `cut`: the last clip need not fit."""

    clips: tuple[int, ...]
    frames: int
    previous: int = -1
    noise: int = -1
    cut: bool = False


class Spoken(NamedTuple):
    """What `Clips.read` gives: frames and facts of the clips of one sample."""

    sample: Sample
    mels: list[Float[Tensor, "M _"]]
    clips: list[Clip]
    previous: str | None


def read_clips(manifest: Path, language: str | None = None, trust: Trust = OWN_FOLDER) -> list[Clip]:
    """Lines of {"audio_filepath", "text", "language", "translation"}; paths are relative to the manifest, and lie in
    its folder if `trust` does not let them leave it. `language`: of lines that do not say. Raises DataError."""
    found, folders = [], [str(path.parent.resolve()) for path in (manifest, manifest.resolve())]
    for line in read_list(manifest):
        values = ({} if language is None else {"language": language}) | line.values
        lacks = [name for name in ("audio_filepath", "text", "language") if not isinstance(values.get(name), str)]
        if line.fault or lacks:
            raise DataError(f"{manifest} line {line.number}: {line.fault or 'no ' + ', '.join(lacks)}")
        place, given = f"{manifest} line {line.number}", values["audio_filepath"]
        path, refused = trust.placed(given, str(manifest.parent))
        if is_remote(path):
            refused = refused or f"a URL, where only files are read ({given!r:.80})"
        if refused := refused or trust.strays(path, folders):
            raise DataError(f"{place}: {refused}")
        found.append(Clip(Path(path), values["text"], values["language"], values.get("translation"), place))
    if not found:
        raise DataError(f"{manifest}: no utterances (0 lines)")
    return found


def trimmed(wave: Float[Tensor, "T"]) -> Float[Tensor, "_"]:
    """The sound without the silence (under 1 % of the peak) before and after it, but for `EDGE` frames."""
    loud = (wave.abs() > 0.01 * wave.abs().max()).nonzero()
    if not len(loud):
        return wave
    return wave[max(0, int(loud[0]) - EDGE * HOP) : int(loud[-1]) + EDGE * HOP]


def cached_mels(manifest: Path, clips: Sequence[Clip], cache: Path, bands: int) -> list[Float[Tensor, "M _"]]:
    """`log_mel` of each trimmed clip as float16, computed once for a `cache` folder and mapped from its file. A broken
    recording is logged by name and has no frames. Raises DataError as soon as more than `MOST_BROKEN` of all are."""
    names = "\n".join(f"{c.path.resolve()} {stamp(str(c.path))}" for c in clips)
    key = hashlib.sha256(f"{bands} {EDGE}\n{names}".encode()).hexdigest()[:16]
    path = cache / f"{manifest.stem}-{key}.npy"
    sizes = path.with_suffix(".lengths.npy")
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part, lengths = path.with_suffix(".part"), []
        with part.open("wb") as file:
            for clip in clips:
                mel = _read_or_log(clip, bands)
                lengths.append(len(mel))
                file.write(mel.numpy().tobytes())
                if (broken := lengths.count(0)) > MOST_BROKEN * len(clips):
                    many = f"{broken} of the first {len(lengths)} recordings are broken"
                    raise DataError(f"{manifest}: {many}, more than {MOST_BROKEN:.1%} of its {len(clips)}")
        np.save(sizes, np.array(lengths))
        part.rename(path)
    with reading_cache(sizes):
        lengths = np.load(sizes).tolist()
    with reading_cache(path):
        frames = np.memmap(path, np.float16, mode="c", shape=(sum(lengths), bands))
        return [rows.T for rows in torch.from_numpy(frames).split(lengths)]


def _read_or_log(clip: Clip, bands: int) -> Float[Tensor, "_ M"]:
    try:
        return log_mel(trimmed(read_audio(clip.path)), bands).T.half().contiguous()
    except BROKEN as error:
        log.warning("broken recording left out: %s: %s", clip.place, " ".join(str(error).split()))
        return torch.zeros(0, bands, dtype=torch.half)


class Clips:
    """A `Source` of samples over the clips of some manifests; broken ones are left out with their texts."""

    def __init__(self, manifests: Sequence[Path], cache: Path, bands: int = 80, language: str | None = None,
                 trust: Trust = OWN_FOLDER):  # fmt: skip
        self.clips: list[Clip] = []
        self.mels: list[Tensor] = []
        for manifest in manifests:
            clips = read_clips(manifest, language, trust)
            mels = cached_mels(manifest, clips, cache, bands)
            whole = [i for i, mel in enumerate(mels) if mel.shape[1]]
            self.clips += [clips[i] for i in whole]
            self.mels += [mels[i] for i in whole]
        self.lengths = [mel.shape[1] for mel in self.mels]

    def __len__(self) -> int:
        return len(self.clips)

    def name(self, key: Sample) -> str:
        return " + ".join(str(self.clips[i].path) for i in key.clips) or f"noise {key.noise}"

    def read(self, key: Sample) -> Spoken:
        previous = None if key.previous < 0 else self.clips[key.previous].text
        return Spoken(key, [self.mels[i].float() for i in key.clips], [self.clips[i] for i in key.clips], previous)


NOISES = ("silence", "white", "pink", "tones", "clicks")


def noise(kind: str, samples: int, chance: torch.Generator) -> Float[Tensor, "T"]:
    """Sound without speech: digital silence, white or pink noise, one to three steady tones, or clicks; its loudest
    sample lies between 0.001 and 1."""
    if kind == "silence":
        return torch.zeros(samples)
    wave = torch.randn(samples, generator=chance)
    if kind == "pink":  # power falls as 1/f
        spectrum = torch.fft.rfft(wave)
        wave = torch.fft.irfft(spectrum / torch.arange(1, len(spectrum) + 1).sqrt(), n=samples)
    elif kind == "tones":
        pitches = 60 * (100 ** torch.rand(int(torch.randint(1, 4, (), generator=chance)), 1, generator=chance))
        wave = (2 * math.pi * pitches * torch.arange(samples) / RATE).sin().sum(0) + 0.001 * wave
    elif kind == "clicks":
        wave = 0.001 * wave
        at = torch.randint(0, samples, (int(torch.randint(2, 20, (), generator=chance)),), generator=chance)
        wave[at] += 1.0
    level = 10 ** (-3 * torch.rand((), generator=chance))
    return wave / wave.abs().max() * level


@dataclass(frozen=True)
class Curriculum:
    """`window`: mel frames of the model. `budget`: padded frames of a batch. `epoch`: windows of an epoch. The first
    `easy` epochs hold clips under `short` frames alone, and from there the limit grows by `growth` an epoch. Shares
    of windows: `pairs` of two sentences, `noise` without speech; of batches: `full` as wide as the window (as in
    use, where others are only as wide as their longest clip), `prompted` with a previous text."""

    window: int = 600
    budget: int = 5600
    epoch: int = 4000
    easy: int = 15
    short: int = 200
    growth: float = 1.15
    pairs: float = 0.1
    noise: float = 0.05
    full: float = 0.12
    prompted: float = 0.15


def curriculum(
    s: Curriculum, lengths: Sequence[int], languages: Sequence[str], seed: int = 0
) -> Callable[[int], list[list[Sample]]]:
    """A `Plan`: batches of windows of like length, in random order. Clips longer than the window are left out."""
    if not any(length <= s.short for length in lengths):
        raise DataError(f"none of the {len(lengths)} clips is under {s.short} frames, with which training starts")

    def plan(epoch: int) -> list[list[Sample]]:
        chance = generator(seed, "plan", epoch)
        limit = min(s.window, int(s.short * s.growth ** max(0, epoch + 1 - s.easy)))
        order = [i for i in torch.randperm(len(lengths), generator=chance).tolist() if lengths[i] <= limit]
        groups: list[tuple[int, ...]] = [(i,) for i in order[: s.epoch]]
        if limit == s.window:
            groups = _paired(groups, s, lengths, languages)
        groups += [()] * int(s.noise * len(groups))
        return _batches(groups, s, limit, lengths, languages, chance)

    return plan


def _paired(
    groups: list[tuple[int, ...]], s: Curriculum, lengths: Sequence[int], languages: Sequence[str]
) -> list[tuple[int, ...]]:
    """Two clips of one language in one window; the second may be cut by the window's end, if 0.4 s of it are in."""
    waiting: dict[str, int] = {}
    found: list[tuple[int, ...]] = []
    left = int(s.pairs * len(groups))
    for (i,) in groups:
        first = waiting.get(languages[i])
        if left <= 0:
            found.append((i,))
        elif first is None:
            waiting[languages[i]] = i
        elif lengths[first] + 40 < s.window:
            found.append((first, i))
            del waiting[languages[i]]
            left -= 2
        else:
            found.append((first,))
            waiting[languages[i]] = i
    return found + [(i,) for i in waiting.values()]


def _batches(
    groups: list[tuple[int, ...]], s: Curriculum, limit: int, lengths: Sequence[int], languages: Sequence[str],
    chance: torch.Generator,
) -> list[list[Sample]]:  # fmt: skip
    random = torch.rand(len(groups), generator=chance).tolist()
    sizes = [
        min(s.window, sum(lengths[i] for i in group)) if group else int(limit * (0.2 + 0.8 * share))
        for group, share in zip(groups, random, strict=True)
    ]
    order = sorted(range(len(groups)), key=lambda at: sizes[at] * (0.97 + 0.06 * random[at]))
    others: dict[str, list[int]] = {}
    for group in groups:
        if group:
            others.setdefault(languages[group[0]], []).append(group[0])
    found: list[list[Sample]] = []
    while order:
        wide, prompted, at = torch.rand(3, generator=chance).tolist()
        start = int(at * len(order)) if wide < s.full else 0
        batch, width = [], s.window if wide < s.full else 0
        while start < len(order):
            grown = min(s.window, max(width, -(-(sizes[order[start]] + 1) // FRAMES_STEP) * FRAMES_STEP))
            if batch and grown * (len(batch) + 1) > s.budget:
                break
            width = grown
            batch.append(order.pop(start))
        told = prompted < s.prompted
        found.append([_sample(groups[i], width, told, i, others, languages, random[i]) for i in batch])
    return [found[i] for i in torch.randperm(len(found), generator=chance).tolist()]


def _sample(
    group: tuple[int, ...], width: int, told: bool, number: int, others: dict[str, list[int]],
    languages: Sequence[str], share: float,
) -> Sample:  # fmt: skip
    if not group:
        return Sample((), width, noise=int(share * 2**30))
    pool = others[languages[group[0]]]
    previous = pool[number % len(pool)] if told else -1
    return Sample(group, width, previous if previous not in group else -1, cut=len(group) > 1)
