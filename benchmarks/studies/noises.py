"""Generated audio without speech, for which a recognizer must return no text.

    for noise in collection(): ...    # 100 clips, the same on every call

Silence, dither, white, pink and brown noise, tones, chords with a melody and a beat, clicks, mains hum and chirps, of
3 to 40 s, their loudest sample between -60 and -3 dB of full scale.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from multimodal.data.loader import generator
from multimodal.tokens.audio.log_mel import RATE


class Noise(NamedTuple):
    """`level`: dB of full scale of the loudest sample."""

    name: str
    kind: str
    level: float
    wave: Tensor


def draw(chance: Generator, low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=chance).item()


def choose(chance: Generator, values: list) -> float:
    return values[int(torch.randint(len(values), (), generator=chance))]


def silence(samples: int, chance: Generator) -> Tensor:
    return torch.zeros(samples)


def dither(samples: int, chance: Generator) -> Tensor:
    """Triangular noise, as a converter adds it."""
    return torch.rand(samples, generator=chance) - torch.rand(samples, generator=chance)


def coloured(exponent: float) -> Callable[[int, Generator], Tensor]:
    """Noise whose power falls as 1 / frequency^(2 × exponent)."""

    def make(samples: int, chance: Generator) -> Tensor:
        spectrum = torch.fft.rfft(torch.randn(samples, generator=chance))
        frequency = torch.fft.rfftfreq(samples, 1 / RATE).clamp(min=20)
        return torch.fft.irfft(spectrum / frequency**exponent, n=samples)

    return make


def tones(samples: int, chance: Generator) -> Tensor:
    """One to four steady tones between 60 and 6,000 Hz."""
    time = torch.arange(samples, dtype=torch.float64) / RATE
    pitches = [60 * 100 ** draw(chance, 0, 1) for _ in range(int(choose(chance, [1, 2, 3, 4])))]
    return sum((2 * math.pi * pitch * time).sin() for pitch in pitches).float()


def note(pitch: float, seconds: float, chance: Generator) -> Tensor:
    """Eight harmonics that die away, with an attack."""
    time = torch.arange(int(seconds * RATE)) / RATE
    fall = draw(chance, 1, 6)
    sound = sum((2 * math.pi * pitch * k * time).sin() * torch.exp(-fall * k * time / 2) / k for k in range(1, 9))
    return sound * (time / 0.01).clamp(max=1) * ((seconds - time) / 0.02).clamp(0, 1)


def music(samples: int, chance: Generator) -> Tensor:
    """Chords, a melody over them and a drum on each beat."""
    beat, base = draw(chance, 0.3, 0.7), 110 * 2 ** draw(chance, 0, 1)
    wave = torch.zeros(samples + 4 * RATE)
    for number in range(int(samples / RATE / beat) + 1):
        at = int(number * beat * RATE)
        parts = [(base * 2 ** (choose(chance, [0, 2, 4, 5, 7, 9, 11, 12]) / 12 + 1), beat, 0.8)]
        if number % 4 == 0:
            root = choose(chance, [0, 5, 7, 9])
            parts += [(base * 2 ** ((root + step) / 12), 4 * beat, 0.5) for step in (0, 4, 7)]
        for pitch, seconds, loud in parts:
            sound = loud * note(pitch, seconds, chance)
            wave[at : at + len(sound)] += sound
        drum = torch.randn(1600, generator=chance) * torch.exp(-torch.arange(1600) / 300)
        wave[at : at + 1600] += drum * (1.0 if number % 2 else 0.4)
    return wave[:samples]


def clicks(samples: int, chance: Generator) -> Tensor:
    """Up to four a second, each a sample or a short thud."""
    wave = 0.001 * torch.randn(samples, generator=chance)
    for _ in range(int(draw(chance, 1, 4) * samples / RATE) + 1):
        size = int(choose(chance, [1, 16, 160, 800]))
        at = int(draw(chance, 0, samples - size))
        wave[at : at + size] += torch.exp(-torch.arange(size) / (size / 4)) * choose(chance, [-1, 1])
    return wave


def hum(samples: int, chance: Generator) -> Tensor:
    """Mains at 50 or 60 Hz with its overtones, and a little noise."""
    base, time = choose(chance, [50, 60]), torch.arange(samples, dtype=torch.float64) / RATE
    parts = [(2 * math.pi * base * k * time).sin() * draw(chance, 0, 1) / k for k in range(1, 12)]
    return sum(parts).float() + 0.01 * torch.randn(samples, generator=chance)


def chirps(samples: int, chance: Generator) -> Tensor:
    """Sweeps up or down between 200 and 6,000 Hz, one after another."""
    wave, at = torch.zeros(samples), 0
    while at < samples:
        size = min(samples - at, int(draw(chance, 0.1, 2.0) * RATE))
        low, high = sorted((draw(chance, 200, 6000), draw(chance, 200, 6000)))
        pitch = torch.linspace(low, high, size, dtype=torch.float64)
        pitch = pitch.flip(0) if draw(chance, 0, 1) < 0.5 else pitch
        wave[at : at + size] = ((2 * math.pi * pitch / RATE).cumsum(0).sin() * torch.hann_window(size)).float()
        at += size + int(draw(chance, 0, 0.5) * RATE)
    return wave


KINDS: dict[str, Callable[[int, Generator], Tensor]] = {
    "silence": silence, "dither": dither, "white": coloured(0.0), "pink": coloured(0.5), "brown": coloured(1.0),
    "tones": tones, "music": music, "clicks": clicks, "hum": hum, "chirps": chirps,
}  # fmt: skip


def clip(kind: str, seconds: float, level: float, seed: int) -> Tensor:
    """[seconds × 16,000] samples; the loudest is `level` dB of full scale, in silence there is none."""
    chance = generator(seed, kind)
    wave = KINDS[kind](round(seconds * RATE), chance)
    peak = wave.abs().max()
    return wave / peak * 10 ** (level / 20) if peak else wave


def collection(each: int = 10) -> Iterator[Noise]:
    """`each` clips of every kind, their levels and lengths spread evenly and paired by chance. Dither stays under
    -60 dB."""
    for kind in KINDS:
        chance = generator(0, kind, "collection")
        order = torch.randperm(each, generator=chance).tolist()
        for number in range(each):
            place, other = (number + draw(chance, 0, 1)) / each, (order[number] + draw(chance, 0, 1)) / each
            level = -90 + 30 * place if kind == "dither" else -60 + 57 * place
            wave = clip(kind, 3 + 37 * other, level, number)
            yield Noise(f"{kind}-{number}", kind, round(level, 1), wave)
