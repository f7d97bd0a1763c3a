"""Repetition filter: removes loops that a decoder fell into, keeping the first occurrence of each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_UNIT = 32  # tokens of the repeated n-gram: about two sentences
# Laughter, "no, no, no", numbers and choruses repeat too. If the compression ratio already flags the text as
# repetitive, a loop is 4 repeats over 16 tokens; otherwise 8 repeats over 32 tokens.
FLAGGED_REPEATS, FLAGGED_TOKENS = 4, 16
REPEATS, TOKENS = 8, 32
BY_TOKEN = ("tokens", "token_logprobs")  # lists of a segment with a value per token


class RepetitionLoop(NamedTuple):
    """Tokens [start, stop) repeat the `unit` tokens before them."""

    start: int
    stop: int
    unit: int


def find_loops(tokens: Sequence[int], repetitive: bool) -> list[RepetitionLoop]:
    """Find n-grams of text tokens that repeat implausibly often; the first occurrence is not part of a loop.

    `repetitive`: the compression ratio exceeds its threshold, so fewer repeats are enough."""
    repeats, least = (FLAGGED_REPEATS, FLAGGED_TOKENS) if repetitive else (REPEATS, TOKENS)
    loops, position = [], 0
    while position < len(tokens):
        candidates = (_loop_at(tokens, position, unit, repeats, least) for unit in range(1, MAX_UNIT + 1))
        loop = max(candidates, key=lambda loop: (loop.stop - loop.start, -loop.unit))
        if loop.stop > loop.start:
            loops.append(loop)
            position = loop.stop
        else:
            position += 1
    return loops


def _loop_at(tokens: Sequence[int], start: int, unit: int, repeats: int, least: int) -> RepetitionLoop:
    """The loop of the `unit` tokens at `start`, empty if there is none. Its last repeat may be partial."""
    stop = start + unit
    while stop < len(tokens) and tokens[stop] == tokens[stop - unit]:
        stop += 1
    long_enough = stop - start >= max(repeats * unit, least)
    return RepetitionLoop(start + unit, stop if long_enough else start + unit, unit)


def remove_repetitions(
    segments: list[dict[str, Any]], eot: int, repetitive: bool
) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Reduce each loop to its first occurrence. Returns the segments and the removed spans in seconds.

    `tokens` of a segment holds text tokens (below `eot`) and timestamps. A loop that ends inside a segment is timed
    in proportion to the tokens. The caller updates `text`."""
    positions = [(row, i) for row, s in enumerate(segments) for i, token in enumerate(s["tokens"]) if token < eot]
    loops = find_loops([segments[row]["tokens"][i] for row, i in positions], repetitive)
    if not loops:
        return segments, []
    removed = {position for loop in loops for position in positions[loop.start : loop.stop]}
    kept, spans = [], []
    for row, segment in enumerate(segments):
        texts = [i for i, token in enumerate(segment["tokens"]) if token < eot]
        cut = [(row, i) in removed for i in texts]
        spans += _spans(cut, segment["start"], segment["end"])
        if not all(cut) or not cut:
            kept.append(_without(segment, {i for i in texts if (row, i) in removed}, cut))
    return kept, spans


def _spans(cut: list[bool], start: float, end: float) -> list[tuple[float, float]]:
    """The runs of True in seconds."""
    step = (end - start) / max(1, len(cut))
    edges = [i for i in range(len(cut) + 1) if (i > 0 and cut[i - 1]) != (i < len(cut) and cut[i])]
    return [
        (start + a * step, end if b == len(cut) else start + b * step) for a, b in zip(*[iter(edges)] * 2, strict=True)
    ]


def _without(segment: dict[str, Any], removed: set[int], cut: list[bool]) -> dict[str, Any]:
    if not removed:
        return segment
    step = (segment["end"] - segment["start"]) / len(cut)
    first, last = cut.index(False), len(cut) - cut[::-1].index(False)
    end = segment["end"] if last == len(cut) else segment["start"] + last * step
    left = {name: [one for i, one in enumerate(segment[name]) if i not in removed]
            for name in BY_TOKEN if name in segment}  # fmt: skip
    return {**segment, "start": segment["start"] + first * step, "end": end, **left}
