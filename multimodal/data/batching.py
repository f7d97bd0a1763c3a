"""Batches of like length under a budget of padded frames, with a curriculum, as a pure function of the epoch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from multimodal.data.loader import Plan, generator
from multimodal.errors import demand

EASY_END = 500  # frames: when the curriculum's limit passes this, all utterances are taken


class Group(NamedTuple):
    """Utterances that are heard after each other, by number. A number past the corpus is another copy of the one it
    leaves modulo its size, with its own augmentation."""

    numbers: tuple[int, ...]
    augment: bool


@dataclass(frozen=True)
class Batching:
    """How utterances make batches. `budget`: most padded frames (10 ms) a step."""

    budget: int = 4000
    easy: int = 18
    """epochs of utterances under `short` frames, unchanged, before the limit grows by a fifth an epoch; 0: none"""
    short: int = 200
    join: float = 0.2
    """share of the utterances that are heard in pairs"""
    longest: int = 1600
    """most frames of a pair"""

    def __post_init__(self):
        for name in ("budget", "short", "longest"):
            demand(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        demand("easy", self.easy, self.easy >= 0, "0 or more")
        demand("join", self.join, 0 <= self.join <= 1, "0 to 1")


def speech_plan(lengths: Sequence[int], times: Sequence[tuple[int, float]], b: Batching, seed: int) -> Plan:
    """Batches of groups of like length, a pure function of the epoch. `times`: (size, times an epoch) of each part of
    the utterances.

    The first epochs hold only short utterances, unchanged, since CTC finds its alignment on those soon (the
    curriculum of Amodei et al. 2016, section 3.2). Then the limit grows up to 5 s; the epochs after that hold all,
    joined in part and augmented."""

    def plan(epoch: int) -> list[list[Group]]:
        random = generator(seed, epoch)
        limit = b.short * 1.2 ** max(0, epoch + 1 - b.easy)
        drawn = _drawn(times, random)
        size = lambda number: lengths[number % len(lengths)]
        whole = b.easy == 0 or (epoch >= b.easy and limit >= EASY_END)
        groups = [] if whole else [(number,) for number in drawn if size(number) < limit]
        # a corpus without short utterances has no epochs of them
        all_kinds = whole or not groups
        if all_kinds:
            groups = join_some(drawn, [size(n) for n in drawn], b.join, b.longest, random)
        sizes = [sum(map(size, group)) for group in groups]
        return [[Group(groups[i], all_kinds) for i in batch] for batch in bucketed(sizes, b.budget, random)]

    return plan


def _drawn(times: Sequence[tuple[int, float]], random: torch.Generator) -> list[int]:
    """Numbers of an epoch: each part so many times whole, and a random share of it for the rest."""
    total, start, drawn = sum(count for count, _ in times), 0, []
    for count, often in times:
        whole = int(often)
        rest = torch.randperm(count, generator=random)[: round((often - whole) * count)].tolist()
        drawn += [start + i + total * copy for copy in range(whole) for i in range(count)]
        drawn += [start + i + total * whole for i in rest]
        start += count
    return drawn


def join_some(
    numbers: Sequence[int], lengths: Sequence[int], share: float, most: int, random: torch.Generator
) -> list[tuple[int, ...]]:
    """Numbers in groups of one; of a random `share`, groups of two of at most `most` frames together, so that
    the model meets longer sound than the single utterances, and sentences after each other."""
    order = torch.randperm(len(numbers), generator=random).tolist()
    count = int(len(order) * share) // 2 * 2
    groups = [(numbers[i],) for i in order[count:]]
    for a, b in zip(order[:count:2], order[1:count:2], strict=True):
        pair = numbers[a], numbers[b]
        groups += [pair] if lengths[a] + lengths[b] <= most else [pair[:1], pair[1:]]
    return groups


def bucketed(sizes: Sequence[int], budget: int, random: torch.Generator | None = None) -> list[list[int]]:
    """Indices in batches of like size with at most `budget` padded frames each (a longer one is alone).

    With `random` in random order; a little noise on the sizes makes the batches differ from epoch to epoch."""
    noise = [1.0] * len(sizes) if random is None else torch.empty(len(sizes)).uniform_(0.97, 1.03, generator=random)
    keys = [size * float(own) for size, own in zip(sizes, noise, strict=True)]
    batches: list[list[int]] = []
    longest = 0
    for at in sorted(range(len(sizes)), key=keys.__getitem__):
        padded = padded_frames(sizes[at])
        longest = max(longest, padded)
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = padded
        batches[-1].append(at)
    return batches if random is None else [batches[i] for i in torch.randperm(len(batches), generator=random)]


def padding_share(batches: Sequence[Sequence[Group]], lengths: Sequence[int]) -> float:
    """Share of the frames in `batches` that are padding."""
    sizes = [[sum(lengths[i % len(lengths)] for i in group.numbers) for group in batch] for batch in batches]
    return 1 - sum(map(sum, sizes)) / sum(padded_frames(max(size)) * len(size) for size in sizes)


def padded_frames(size: int) -> int:
    """Padded sizes are few: oneDNN compiles its kernels for each new shape, which costs as much as a step."""
    return round_up(size, 8 if size <= 128 else 16 if size <= 256 else 32)


def padded_length(tokens: int, context: int | None = None) -> int:
    """Of a row of text, at most the context: as with frames, lengths are few."""
    return min(round_up(tokens, 8), context or sys.maxsize)


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step
