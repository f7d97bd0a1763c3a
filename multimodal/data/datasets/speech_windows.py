"""Spoken sentences in several languages as cached log-mel frames, synthetic noise, and a curriculum of windows."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.datasets.cached_frames import cached_frames
from multimodal.data.loader import generator
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns, Source, open_source
from multimodal.errors import DataError
from multimodal.system.options import Limits, Natural, Positive, Share
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel
from multimodal.tokens.audio.reading import read_audio

FRAMES_STEP = 64  # widths are multiples of it: oneDNN compiles a kernel for each new shape
EDGE = 2  # frames kept before and after the speech in a clip
MOST_BROKEN = 0.05  # share of a manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeechExample:
    """A recording of one sentence, item `key` of `source`; `translation` into English, if known."""

    source: Source
    key: int
    text: str
    language: str
    translation: str | None = None

    def wave(self) -> Float[Tensor, "T"]:
        """Decode the recording at 16 kHz. Raises one of `loader.BROKEN`."""
        return read_audio(self.source.read(self.key).media)


class WindowSample(NamedTuple):
    """Key of a window of `frames` mel frames: `clips` in sequence (none: noise number `noise`), prompted with the text
    of the clip `previous` (-1: none). `cut`: the last clip may exceed the window."""

    clips: tuple[int, ...]
    frames: int
    previous: int = -1
    noise: int = -1
    cut: bool = False


class WindowFrames(NamedTuple):
    """The frames and clips of one sample, as read by `SpeechWindows`."""

    sample: WindowSample
    mels: list[Float[Tensor, "M _"]]
    clips: list[SpeechExample]
    previous: str | None


def read_clips(
    manifest: str | Path, language: str | None = None, trust: Trust = OWN_FOLDER, columns: ListColumns = USUAL,
    broken: bool = False,
) -> list[SpeechExample]:  # fmt: skip
    """Read recordings with their texts, `language` and `translation` from anything that `open_source` reads.
    `language`: of items without one. An empty text says that nobody speaks. `broken`: keep broken items, which raise
    when they are read, with an empty text. Raises DataError."""
    source = open_source(manifest, columns=columns, trust=trust)
    clips = []
    for key in range(len(source)):
        row = source.row(key)
        if broken and row.fault:
            clips.append(SpeechExample(source, key, "", ""))
            continue
        spoken = row.fields.get("language", language)
        english = row.fields.get("translation")
        fault = row.fault or ("" if row.texts else "no text") or ("" if isinstance(spoken, str) else "no language")
        if not fault and not isinstance(english, str | None):
            fault = f"a translation is not a string ({english!r:.40})"
        if fault:
            raise DataError(f"{row.place}: {fault}")
        clips.append(SpeechExample(source, key, row.texts[0], spoken, english))
    return clips


def trimmed(wave: Float[Tensor, "T"]) -> Float[Tensor, "_"]:
    """Trim silence (under 1 % of the peak) at both ends, keeping `EDGE` frames."""
    loud = (wave.abs() > 0.01 * wave.abs().max()).nonzero()
    if not len(loud):
        return wave
    return wave[max(0, int(loud[0]) - EDGE * HOP) : int(loud[-1]) + EDGE * HOP]


class SpeechWindows:
    """A `Source` of window samples over the clips of manifests; broken recordings are dropped with their texts."""

    def __init__(self, manifests: Sequence[str | Path], cache: Path, bands: int = 80, language: str | None = None,
                 columns: ListColumns = USUAL, trust: Trust = OWN_FOLDER):  # fmt: skip
        self.clips: list[SpeechExample] = []
        self.mels: list[Tensor] = []  # [M F]
        for manifest in manifests:
            clips = read_clips(manifest, language, trust, columns, broken=True)
            mels = self._mels(clips, cache, bands, str(manifest))
            good = [i for i, mel in enumerate(mels) if len(mel)]
            if empty := sum(not clips[i].text.strip() for i in good):
                log.warning("%s: %d of %d texts are empty: taken for no speech", manifest, empty, len(good))
            self.clips += [clips[i] for i in good]
            self.mels += [mels[i].T for i in good]
        self.lengths = [mel.shape[1] for mel in self.mels]

    @staticmethod
    def _mels(clips: Sequence[SpeechExample], cache: Path, bands: int, manifest: str) -> list[Float[Tensor, "_ M"]]:
        items = [clip.source.identity(clip.key) for clip in clips]
        return cached_frames(
            cache, items, lambda i: log_mel(trimmed(clips[i].wave()), bands).T,
            lambda i: clips[i].source.name(clips[i].key), bands, manifest, MOST_BROKEN, f"trimmed {EDGE}",
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.clips)

    def name(self, key: WindowSample) -> str:
        return " + ".join(self.clips[i].source.name(self.clips[i].key) for i in key.clips) or f"noise {key.noise}"

    def read(self, key: WindowSample) -> WindowFrames:
        previous = None if key.previous < 0 else self.clips[key.previous].text or None
        return WindowFrames(
            key, [self.mels[i].float() for i in key.clips], [self.clips[i] for i in key.clips], previous
        )


NOISES = ("silence", "white", "pink", "tones", "clicks")


def noise(kind: str, samples: int, chance: torch.Generator) -> Float[Tensor, "T"]:
    """Synthesize audio without speech: digital silence, white or pink noise, one to three steady tones, or clicks, with
    a peak between 0.001 and 1."""
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
    """Speech windows from short to long, in mel frames: the limit of a clip grows after the first epochs."""

    window: Positive = 600  # frames of the model's window
    budget: Positive = 5600  # padded frames per batch
    epoch: Positive = 4000  # windows per epoch
    easy: Natural = 15  # first epochs, of clips under `short` frames alone
    short: Positive = 200
    growth: Annotated[float, Limits(1)] = 1.15  # of the limit per epoch after those
    pairs: Share = 0.1  # share of windows with two sentences
    noise: Share = 0.05  # share of windows without speech
    full: Share = 0.12  # share of batches as wide as the window, as in inference; others fit their longest clip
    prompted: Share = 0.15  # share of batches with a previous text


def curriculum(
    s: Curriculum, lengths: Sequence[int], languages: Sequence[str], seed: int = 0
) -> Callable[[int], list[list[WindowSample]]]:
    """Return a `Plan` of shuffled batches of windows of similar length. Clips longer than the window are skipped."""
    if not any(length <= s.short for length in lengths):
        raise DataError(f"the first epochs need clips shorter than {s.short} frames, and all {len(lengths)} are longer")

    def plan(epoch: int) -> list[list[WindowSample]]:
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
    """Pair clips of one language; the window's end may cut the second, after 0.4 s or more of it."""
    waiting: dict[str, int] = {}
    paired: list[tuple[int, ...]] = []
    left = int(s.pairs * len(groups))
    for (i,) in groups:
        first = waiting.get(languages[i])
        if left <= 0:
            paired.append((i,))
        elif first is None:
            waiting[languages[i]] = i
        elif lengths[first] + 40 < s.window:
            paired.append((first, i))
            del waiting[languages[i]]
            left -= 2
        else:
            paired.append((first,))
            waiting[languages[i]] = i
    return paired + [(i,) for i in waiting.values()]


def _batches(
    groups: list[tuple[int, ...]], s: Curriculum, limit: int, lengths: Sequence[int], languages: Sequence[str],
    chance: torch.Generator,
) -> list[list[WindowSample]]:  # fmt: skip
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
    batches: list[list[WindowSample]] = []
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
        previous = prompted < s.prompted
        batches.append([_sample(groups[i], width, previous, i, others, languages, random[i]) for i in batch])
    return [batches[i] for i in torch.randperm(len(batches), generator=chance).tolist()]


def _sample(
    group: tuple[int, ...], width: int, prompted: bool, number: int, others: dict[str, list[int]],
    languages: Sequence[str], share: float,
) -> WindowSample:  # fmt: skip
    if not group:
        return WindowSample((), width, noise=int(share * 2**30))
    pool = others[languages[group[0]]]
    previous = pool[number % len(pool)] if prompted else -1
    return WindowSample(group, width, previous if previous not in group else -1, cut=len(group) > 1)
