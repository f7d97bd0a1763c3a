"""Spans of three sentences that stand once in the output (Raffel et al. 2020, section 2.2)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from multimodal.data.cleaning.sentences import SPAN, span_keys
from multimodal.data.cleaning.state import Place


class PageSentences(NamedTuple):
    """Keys of a page's sentences, the lines of the page that they stand on (from 1), and the page's place."""

    keys: list[int]
    lines: list[int]
    file: int
    line: int


def repeated(
    page: PageSentences, spans: list[int], seen: Mapping[int, Place], find: Callable[[list[int]], dict[int, Place]]
) -> dict[int, Place]:
    """The sentences, by number, of spans that stand earlier: in `seen`, which `find` tells of spans other than `spans`,
    or in the page itself. Each has the place of its first copy, the line of the sentence as the third field. After
    their removal no span of what stays stands earlier or twice."""
    removed: dict[int, Place] = {}
    if len(set(spans)) == len(spans) and seen.keys().isdisjoint(spans):
        return removed
    left = list(range(len(page.keys)))
    while found := _repeated_once(page, left, spans, seen):
        removed |= found
        left = [number for number in left if number not in found]
        spans = span_keys([page.keys[number] for number in left])
        seen = find(spans)
    return removed


def _repeated_once(
    page: PageSentences, left: list[int], spans: list[int], seen: Mapping[int, Place]
) -> dict[int, Place]:
    found: dict[int, Place] = {}
    own: dict[int, int] = {}
    for at, key in enumerate(spans):
        if (place := seen.get(key)) is not None:
            for step in range(SPAN):
                found.setdefault(left[at + step], Place(place.file, place.line, place[2 + step]))
            continue
        first = own.setdefault(key, at)
        for step in range(SPAN if first < at else 0):
            if at + step >= first + SPAN:  # not of the first copy itself, where the two overlap
                line = page.lines[left[first + step]]
                found.setdefault(left[at + step], Place(page.file, page.line, line))
    return found


def places(page: PageSentences, left: list[int]) -> dict[int, Place]:
    """The spans of the sentences that stay, with their places."""
    keys, lines = span_keys([page.keys[number] for number in left]), [page.lines[number] for number in left]
    file, line = page.file, page.line
    return {key: Place(file, line, *on) for key, *on in zip(keys, lines, lines[1:], lines[2:], strict=False)}
