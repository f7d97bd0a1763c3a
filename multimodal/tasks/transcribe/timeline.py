"""The account of a recording: every sample of it was transcribed, or skipped for a reason."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from multimodal.tokens.audio.log_mel import HOP, RATE


class Span(NamedTuple):
    """Samples [start, stop). `reason` None: transcribed."""

    start: int
    stop: int
    reason: str | None = None


def joined(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one reason as one; empty ones go."""
    found: list[Span] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if found and found[-1].reason == span.reason and found[-1].stop == span.start:
            span = Span(found.pop().start, span.stop, span.reason)
        found.append(span)
    return found


def painted(start: int, stop: int, reason: str | None, over: Iterable[Span]) -> list[Span]:
    """[start, stop) with spans painted over it, of which the later lie on top."""
    spans = [Span(max(start, s.start), min(stop, s.stop), s.reason) for s in over]
    edges = sorted({start, stop, *(edge for s in spans if s.start < s.stop for edge in s[:2])})
    found = []
    for a, b in pairwise(edges):
        top = next((s.reason for s in reversed(spans) if s.start <= a and b <= s.stop), reason)
        found.append(Span(a, b, top))
    return joined(found)


def between(pieces: Iterable[tuple[int, int]], start: int, stop: int, reason: str) -> list[Span]:
    """What of [start, stop) lies before, between and after pieces in rising order."""
    found = []
    for first, last in [*pieces, (stop, stop)]:
        found += [Span(start, first, reason)] if first > start else []
        start = last
    return found


def tiled(spans: Iterable[Span], samples: int) -> list[Span]:
    """Spans in rising order as a tiling of [0, samples]. A gap of less than a mel frame, which the end of a recording
    leaves, belongs to what is before it. Raises ValueError for a longer gap or an overlap."""
    found, at = [], 0
    for span in sorted(spans, key=lambda own: (own.start, own.stop)):
        span = Span(span.start, min(span.stop, samples), span.reason)
        if span.start >= span.stop:
            continue
        if span.start != at:
            raise ValueError(f"account: {at} is followed by {span}")
        found.append(span)
        at = span.stop
    if samples - at >= HOP:
        raise ValueError(f"account: ends at {at} of {samples}")
    if found:
        found[-1] = Span(found[-1].start, samples, found[-1].reason)
    return joined(found or [Span(0, samples, "silence")])


def together(channels: Sequence[list[Span]]) -> list[Span]:
    """One account of several tilings: transcribed where any is, else with the first one's reason."""
    if len(channels) == 1:
        return channels[0]
    heard = [span for spans in channels for span in spans if span.reason is None]
    return painted(0, channels[0][-1].stop, None, [*channels[0], *heard])


def entries(spans: Sequence[Span]) -> dict[str, Any]:
    """`duration`, `transcribed` and `skipped` of a result, in seconds."""
    return {
        "duration": spans[-1].stop / RATE,
        "transcribed": [[s.start / RATE, s.stop / RATE] for s in spans if s.reason is None],
        "skipped": [
            {"start": s.start / RATE, "end": s.stop / RATE, "reason": s.reason} for s in spans if s.reason is not None
        ],
    }
