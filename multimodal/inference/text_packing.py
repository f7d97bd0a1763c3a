"""States and vectors of many texts of different length, with next to no padding."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.masks import causal, documents, window
from multimodal.models.text import TextTransformer
from multimodal.weights.encode import evaluating

POOLS = ("mean", "max", "first", "last")
TOKENS = {"cpu": 1024}  # of a batch: on a CPU more gain nothing
TOKENS_ELSEWHERE = 16384
WIDTHS = (64, 128)  # of rows of several short texts
ATTENTION = 2000  # in rows of so many positions attention takes as long as the maps (BERT-base, one thread)


class _Batch(NamedTuple):
    """Texts packed into rows: `numbers` of the texts, with the `row` of each, where it starts there and its length."""

    numbers: list[int]
    places: list[tuple[int, int, int]]
    rows: int
    width: int


def encode_ragged(
    model: TextTransformer, rows: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None,
    table: nn.Embedding | None = None, tokens: int | None = None,
) -> list[Float[Tensor, "_ D"]]:  # fmt: skip
    """The states of each text, in their order and on the model's device, as each has them alone (≤ 1e-5, float32).

    Short texts share a row, each seeing itself alone (Krell et al. 2021, "Efficient sequence packing without
    cross-contamination"): on a CPU that beats batches of like length. `segments`: the kind of each token, 0 if not
    given. `table`: the embedding, where the model has none. `tokens`: of a batch at most, but for a single text
    that is longer; padding is not counted. Raises ValueError for a text that is empty or longer than the context."""
    found: list[Tensor | None] = [None] * len(rows)
    with torch.inference_mode(), evaluating(model):
        for batch, states in _states(model, rows, segments, table, tokens):
            for number, (row, start, count) in zip(batch.numbers, batch.places, strict=True):
                found[number] = states[row, start : start + count].clone()  # not a view that keeps the whole batch
    return found


@torch.inference_mode()
def pool_ragged(
    model: TextTransformer, rows: Sequence[Sequence[int]], pool: str,
    table: nn.Embedding | None = None, tokens: int | None = None,
) -> Float[Tensor, "N D"]:  # fmt: skip
    """One vector a text: `mean` or `max` of its states, the `first` or the `last` of them; all else as `encode_ragged`.
    `model.pooled(vectors[:, None])` of the first ones is BERT's pooler. Raises ValueError for another pool."""
    if pool not in POOLS:
        raise ValueError(f"pool {pool!r}: none of {', '.join(POOLS)}")
    parts, order = [torch.empty(0, model.config.width, dtype=torch.float32, device=model.device)], []
    with evaluating(model):
        for batch, states in _states(model, rows, None, table, tokens):
            order += batch.numbers
            flat, places = states.flatten(0, 1), torch.tensor(batch.places, device=states.device)
            firsts, counts = places[:, 0] * batch.width + places[:, 1], places[:, 2]
            if pool in ("first", "last"):
                parts.append(flat[firsts if pool == "first" else firsts + counts - 1])
                continue
            # of each text on its own: sums over the batch would be rounded by its neighbours
            spans = zip(firsts.tolist(), counts.tolist(), strict=True)
            made = [flat[start : start + count] for start, count in spans]
            parts.append(torch.stack([one.mean(0) if pool == "mean" else one.amax(0) for one in made]))
    return torch.cat(parts)[torch.tensor(order, dtype=torch.long, device=model.device).argsort()]


def _states(
    model: TextTransformer, rows: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None,
    table: nn.Embedding | None, tokens: int | None,
) -> Iterator[tuple[_Batch, Float[Tensor, "R T D"]]]:  # fmt: skip
    limit, device = model.config.limit, model.device
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"text {number} has no ids")
        if limit is not None and len(row) > limit:
            raise ValueError(f"text {number} of {len(row)} tokens is longer than the context {limit}")
        if segments is not None and len(segments[number]) != len(row):
            raise ValueError(f"text {number} has {len(row)} ids and {len(segments[number])} segments")
    experts = model.config.stack.block.experts
    # neighbours in a row would take places, or change its length
    if (experts is not None and experts.capacity is not None) or model.config.positions.switch:
        tokens = 1
    for batch in _batches([len(row) for row in rows], tokens or TOKENS.get(device.type, TOKENS_ELSEWHERE)):
        ids = _laid(batch, [rows[number] for number in batch.numbers], 0).to(device)
        kinds = None if segments is None else _laid(batch, [segments[number] for number in batch.numbers], 0).to(device)
        if all(count == batch.width for _, _, count in batch.places):  # no neighbours, no padding
            yield batch, model.states(ids, segments=kinds, table=table)
            continue
        places = _laid(batch, [range(count) for _, _, count in batch.places], 0).to(device)
        owners = _laid(batch, [[at] * count for at, (_, _, count) in enumerate(batch.places)], -1).to(device)
        yield batch, model.states(ids, mask=_mask(model, owners), positions=places, segments=kinds, table=table)


def _laid(batch: _Batch, values: Sequence[Sequence[int]], empty: int) -> Int[Tensor, "R T"]:
    """The values of each text where it lies in the rows."""
    laid = [[empty] * batch.width for _ in range(batch.rows)]
    for (row, start, count), own in zip(batch.places, values, strict=True):
        laid[row][start : start + count] = own
    return torch.tensor(laid, device="cpu")


def _mask(model: TextTransformer, owners: Int[Tensor, "R T"]) -> Bool[Tensor, "R 1 T T"]:
    """Each text sees itself, as far as the model lets it; padding sees padding, which keeps it finite."""
    mask, size = documents(owners), owners.shape[1]
    if not model.config.causal:
        return mask
    seen = model.config.window
    return mask & (window(size, size, seen - 1, 0, owners.device) if seen else causal(size, size, owners.device))


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[_Batch]:
    """Texts of like length together, the longest first."""
    order, first = sorted(range(len(lengths)), key=lambda number: -lengths[number]), 0

    def cost(batch: _Batch) -> float:
        """Width of a token."""
        taken = sum(count for _, _, count in batch.places)
        return batch.rows * batch.width * (1 + batch.width / ATTENTION) / taken

    while first < len(order):
        longest = total = lengths[order[first]]
        last = first + 1
        while last < len(order) and total + lengths[order[last]] <= tokens:
            total, last = total + lengths[order[last]], last + 1
        widths = {longest, *(width for width in WIDTHS if longest <= width <= tokens)}
        batch = min((_packed(order[first:last], lengths, width) for width in widths), key=cost)
        yield batch
        taken = set(batch.numbers)
        others = [number for number in order[first:last] if number not in taken]
        first = last - len(others)
        order[first:last] = others


def _packed(numbers: list[int], lengths: Sequence[int], width: int) -> _Batch:
    """First fit: each text, the longest first, in the first row that has room. Rows but the first that stay rather
    empty are left out: their texts go with the next batch."""
    rows: list[list[int]] = []
    used: list[int] = []
    for number in numbers:
        row = next((row for row, filled in enumerate(used) if filled + lengths[number] <= width), len(used))
        if row == len(used):
            rows.append([])
            used.append(0)
        rows[row].append(number)
        used[row] += lengths[number]
    most = max(WIDTHS[0], width // 4)
    rows = [row for at, (row, filled) in enumerate(zip(rows, used, strict=True)) if not at or width - filled <= most]
    starts = [accumulate((lengths[number] for number in row), initial=0) for row in rows]
    places = [
        (at, start, lengths[number])
        for at, row in enumerate(rows)
        for start, number in zip(starts[at], row, strict=False)
    ]
    return _Batch([number for row in rows for number in row], places, len(rows), width)
