"""Padding, and batches of similar length under a budget, with a curriculum for speech."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import get_worker_info

from multimodal.blocks.masks import padding
from multimodal.data.loader import Plan, generator
from multimodal.system.options import Natural, Positive, Share, check_limits

EASY_END = 500  # frames: once the curriculum's limit passes this, all utterances are used
HELD = 32  # items of a validation batch


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to each tensor in dataclasses, named tuples, lists, tuples and mappings."""
    if isinstance(batch, Tensor):
        return function(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: map_tensors(getattr(batch, name), function) for name in names})
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def tensors_in(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(batch, lambda tensor: found.append(tensor) or tensor)
    return found


def zeros_of_batch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros for the large tensor of a batch. A worker's are in shared memory, where the batch goes: to copy
    them there would take a fifth of the time of a photo."""
    if get_worker_info() is None:
        return torch.zeros(*shape, dtype=dtype)
    shared = torch.UntypedStorage._new_shared(max(1, math.prod(shape)) * dtype.itemsize)  # the system's zeros
    return torch.empty(0, dtype=dtype).set_(shared, 0, shape)


def stacked_batch(rows: Sequence[Tensor]) -> Tensor:
    """`torch.stack` of rows, for the large tensor of a batch."""
    return torch.stack(list(rows), out=zeros_of_batch(len(rows), *rows[0].shape, dtype=rows[0].dtype))


class Pinnable:
    """A batch that a loader's thread can move to pinned memory, from which a GPU copies while the host goes on. torch
    looks for the method; it finds the tensors of named tuples by itself, not those of dataclasses."""

    def pin_memory(self) -> Any:
        return map_tensors(self, Tensor.pin_memory)


@dataclass(frozen=True)
class PaddedText(Pinnable):
    """Token ids padded on the right to one length."""

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"]

    @property
    def valid(self) -> Bool[Tensor, "B T"]:
        return padding(self.lengths, self.ids.shape[1])

    @property
    def padding(self) -> float:
        """Share of the ids that is padding."""
        return 1 - float(self.lengths.sum()) / self.ids.numel()


def pad_text(
    rows: Sequence[Sequence[int] | Tensor], pad_id: int = 0, multiple: int = 8, limit: int | None = None
) -> PaddedText:
    """Pad rows of ids as `pad_rows` does."""
    return PaddedText(pad_rows(rows, pad_id, multiple, limit), torch.tensor([len(row) for row in rows]))


def pad_rows(
    rows: Sequence[Sequence | Tensor], fill: int | bool = 0, multiple: int = 8, limit: int | None = None
) -> Tensor:
    """Pad rows with `fill` to the longest, rounded up to a `multiple` (few lengths, few compiled kernels), but no
    longer than `limit`."""
    size = round_up(max(map(len, rows)), multiple)
    padded = torch.full((len(rows), min(size, limit or size)), fill)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.as_tensor(row)
    return padded


def stack_fields(items: Sequence[tuple]) -> Any:
    """Collate named tuples of tensors field by field; None stays None."""
    fields = zip(*items, strict=True)
    return type(items[0])(*(None if field[0] is None else torch.stack(field) for field in fields))


def fixed_batches(prepare: Callable[[int, torch.Generator], tuple], collate: Callable, numbers: Iterable[int]) -> list:
    """Validation batches of the items with these numbers, prepared in one fixed way, the same for every run; the
    shortest items first."""
    items = sorted((prepare(n, generator("held out", n)) for n in numbers), key=lambda item: len(item[0]))
    return [collate(items[i : i + HELD]) for i in range(0, len(items), HELD)]


class UtteranceGroup(NamedTuple):
    """Utterances to concatenate, by number. Numbers wrap around the corpus: a further round is a copy with its own
    augmentation."""

    numbers: tuple[int, ...]
    augment: bool


@dataclass(frozen=True)
class Batching:
    """Batches of utterances, in frames of 10 ms."""

    budget: Positive = 4000  # padded frames per step, at most
    easy: Natural = 18  # epochs of utterances under `short` frames, not augmented; then the limit grows by a fifth each
    short: Positive = 200
    join: Share = 0.2  # share of the utterances that are joined in pairs
    longest: Positive = 1600  # frames of a pair, at most

    def __post_init__(self):
        check_limits(self)


def speech_plan(lengths: Sequence[int], times: Sequence[tuple[int, float]], b: Batching, seed: int) -> Plan:
    """Return a plan of batches of similar length. `times`: (size, repeats per epoch) of each part of the corpus.

    The first epochs hold short utterances alone, without augmentation, on which CTC soon finds its alignment (the
    curriculum of Amodei et al. 2016, section 3.2). The limit grows to 5 s; later epochs hold all, augmented and partly
    joined."""

    def plan(epoch: int) -> list[list[UtteranceGroup]]:
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
        return [[UtteranceGroup(groups[i], all_kinds) for i in batch] for batch in bucketed(sizes, b.budget, random)]

    return plan


def _drawn(times: Sequence[tuple[int, float]], random: torch.Generator) -> list[int]:
    """Draw the utterances of an epoch: whole repeats of each part, and a random share for the rest."""
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
    """Group numbers singly, or a random `share` in pairs of at most `most` frames, so that the model also trains on
    longer audio and on consecutive sentences."""
    order = torch.randperm(len(numbers), generator=random).tolist()
    count = int(len(order) * share) // 2 * 2
    groups = [(numbers[i],) for i in order[count:]]
    for a, b in zip(order[:count:2], order[1:count:2], strict=True):
        pair = numbers[a], numbers[b]
        groups += [pair] if lengths[a] + lengths[b] <= most else [pair[:1], pair[1:]]
    return groups


def bucketed(sizes: Sequence[int], budget: int, random: torch.Generator | None = None) -> list[list[int]]:
    """Batch indices of similar size, at most `budget` padded frames each (a longer item is alone).

    With `random` the order is random, and noise on the sizes makes batches differ between epochs."""
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


def padding_share(batches: Sequence[Sequence[UtteranceGroup]], lengths: Sequence[int]) -> float:
    """Return the share of padding in `batches`."""
    sizes = [[sum(lengths[i % len(lengths)] for i in group.numbers) for group in batch] for batch in batches]
    return 1 - sum(map(sum, sizes)) / sum(padded_frames(max(size)) * len(size) for size in sizes)


def padded_frames(size: int) -> int:
    """Round up to one of few sizes: oneDNN compiles its kernels for each new shape, which takes as long as a step."""
    return round_up(size, 8 if size <= 128 else 16 if size <= 256 else 32)


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step
