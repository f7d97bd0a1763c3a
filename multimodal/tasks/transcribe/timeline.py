"""Timeline of a recording: every sample was transcribed, or skipped for a reason."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from multimodal.tokens.audio.log_mel import HOP, RATE

FRAMES_PER_SECOND = RATE // HOP  # mel frames of 10 ms


class Span(NamedTuple):
    """Samples [start, stop). `reason` None: transcribed."""

    start: int
    stop: int
    reason: str | None = None


def merged(spans: Iterable[Span]) -> list[Span]:
    """Drop empty spans and join neighbours with the same reason."""
    result: list[Span] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if result and result[-1].reason == span.reason and result[-1].stop == span.start:
            span = Span(result.pop().start, span.stop, span.reason)
        result.append(span)
    return result


def overlaid(start: int, stop: int, over: Iterable[Span]) -> list[Span]:
    """[start, stop) with other spans on top; later ones win."""
    spans = [Span(max(start, s.start), min(stop, s.stop), s.reason) for s in over]
    edges = sorted({start, stop, *(edge for s in spans if s.start < s.stop for edge in s[:2])})
    result = []
    for a, b in pairwise(edges):
        top = next((s.reason for s in reversed(spans) if s.start <= a and b <= s.stop), None)
        result.append(Span(a, b, top))
    return merged(result)


def gaps(pieces: Iterable[tuple[int, int]], start: int, stop: int, reason: str) -> list[Span]:
    """The parts of [start, stop) outside ascending pieces."""
    result = []
    for first, last in [*pieces, (stop, stop)]:
        result += [Span(start, first, reason)] if first > start else []
        start = last
    return result


def tiled(spans: Iterable[Span], samples: int) -> list[Span]:
    """Check that spans tile [0, samples] and merge them.

    A remainder shorter than a mel frame at the end joins the last span. Raises ValueError for a longer gap or an
    overlap."""
    result, position = [], 0
    for span in sorted(spans, key=lambda own: (own.start, own.stop)):
        span = Span(span.start, min(span.stop, samples), span.reason)
        if span.start >= span.stop:
            continue
        if span.start != position:
            raise ValueError(f"coverage: expected a span from {position}, got {span}")
        result.append(span)
        position = span.stop
    if samples - position >= HOP:
        raise ValueError(f"coverage: ends at {position} of {samples}")
    if result:
        result[-1] = Span(result[-1].start, samples, result[-1].reason)
    return merged(result or [Span(0, samples, "silence")])


def union(channels: Sequence[list[Span]]) -> list[Span]:
    """One tiling of several channels: transcribed where any channel is, else with the first reason other than silence
    of a channel, else silence."""
    if len(channels) == 1:
        return channels[0]
    spans = [span for spans in reversed(channels) for span in spans]
    ranked = sorted(spans, key=lambda span: {"silence": 0, None: 2}.get(span.reason, 1))
    return overlaid(0, channels[0][-1].stop, ranked)


def coverage(spans: Sequence[Span]) -> dict[str, Any]:
    """`duration`, `transcribed` and `skipped` of a result, in seconds."""
    return {
        "duration": spans[-1].stop / RATE,
        "transcribed": [[s.start / RATE, s.stop / RATE] for s in spans if s.reason is None],
        "skipped": [
            {"start": s.start / RATE, "end": s.stop / RATE, "reason": s.reason} for s in spans if s.reason is not None
        ],
    }
