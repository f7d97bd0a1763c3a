"""Guards against text that was not said: loops, the prompt read back, and hallucinations between silences."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from multimodal.tokens.audio.log_mel import HOP, RATE

FRAMES_PER_SECOND = RATE // HOP
LONGEST_UNIT = 32  # tokens of a text that repeats: about two sentences
# A loop is a unit that follows itself. Laughter, "no, no, no", numbers and choruses do so too: of 16 tokens, 4 times
# over, only where the whole text's compression ratio says as well that it repeats itself; else 32 tokens, 8 times over.
TIMES, TOKENS = 4, 16
SURE_TIMES, SURE_TOKENS = 8, 32


class Loop(NamedTuple):
    """Tokens [start, stop) are repeats of the `unit` tokens before them."""

    start: int
    stop: int
    unit: int


def loops(tokens: Sequence[int], repetitive: bool) -> list[Loop]:
    """Where text tokens repeat the same n-gram so often that nobody says so, without each loop's first occurrence.

    `repetitive`: the text's compression ratio is above the threshold, so fewer repeats are enough."""
    times, least = (TIMES, TOKENS) if repetitive else (SURE_TIMES, SURE_TOKENS)
    found, at = [], 0
    while at < len(tokens):
        loop = max((_repeats(tokens, at, unit, times, least) for unit in range(1, LONGEST_UNIT + 1)), key=_size)
        if loop.stop > loop.start:
            found.append(loop)
            at = loop.stop
        else:
            at += 1
    return found


def _size(loop: Loop) -> tuple[int, int]:
    return loop.stop - loop.start, -loop.unit


def _repeats(tokens: Sequence[int], at: int, unit: int, times: int, least: int) -> Loop:
    """The loop of the `unit` tokens from `at` on, its last repeat perhaps not whole; empty where there is none."""
    stop = at + unit
    while stop < len(tokens) and tokens[stop] == tokens[stop - unit]:
        stop += 1
    enough = stop - at >= max(times * unit, least)
    return Loop(at + unit, stop if enough else at + unit, unit)


def cut_loops(
    segments: list[dict[str, Any]], eot: int, repetitive: bool
) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Segments with the first occurrence of each loop alone, and the seconds of what was cut.

    `tokens` of the segments hold text below `eot` and time tokens. Where a loop ends inside a segment its time is in
    proportion to the tokens. `text` is left to the caller."""
    places = [(row, i) for row, s in enumerate(segments) for i, token in enumerate(s["tokens"]) if token < eot]
    found = loops([segments[row]["tokens"][i] for row, i in places], repetitive)
    if not found:
        return segments, []
    gone = {place for loop in found for place in places[loop.start : loop.stop]}
    kept, cuts = [], []
    for row, segment in enumerate(segments):
        texts = [i for i, token in enumerate(segment["tokens"]) if token < eot]
        cut = [(row, i) in gone for i in texts]
        cuts += _spans(cut, segment["start"], segment["end"])
        if not all(cut) or not cut:
            kept.append(_without(segment, {i for i in texts if (row, i) in gone}, cut))
    return kept, cuts


def _spans(cut: list[bool], start: float, end: float) -> list[tuple[float, float]]:
    """Seconds of the runs of True."""
    step = (end - start) / max(1, len(cut))
    edges = [i for i in range(len(cut) + 1) if (i > 0 and cut[i - 1]) != (i < len(cut) and cut[i])]
    return [
        (start + a * step, end if b == len(cut) else start + b * step) for a, b in zip(*[iter(edges)] * 2, strict=True)
    ]


def _without(segment: dict[str, Any], gone: set[int], cut: list[bool]) -> dict[str, Any]:
    if not gone:
        return segment
    step = (segment["end"] - segment["start"]) / len(cut)
    first, last = cut.index(False), len(cut) - cut[::-1].index(False)
    end = segment["end"] if last == len(cut) else segment["start"] + last * step
    tokens = [token for i, token in enumerate(segment["tokens"]) if i not in gone]
    return {**segment, "start": segment["start"] + first * step, "end": end, "tokens": tokens}


def read_back(text: str, hotwords: str | None) -> bool:
    """Whether a text is nothing but words of the prompt, which a model likes to write where it hears none."""
    said, prompt = _words(text), set(_words(hotwords or ""))
    return bool(said) and set(said) <= prompt


def _words(text: str) -> list[str]:
    return "".join(sign if sign.isalnum() else " " for sign in text.lower()).split()


# Below: openai-whisper's search for hallucinations by their words' lengths and probabilities.
PUNCTUATION = "\"'“¿([{-\"'.。,，!！?？:：”)]}、"


def _anomaly(word: dict[str, Any]) -> float:
    """How far a word is too improbable, too short or too long."""
    duration = word["end"] - word["start"]
    return (word["probability"] < 0.15) + max(0.0, 0.133 - duration) * 15 + max(0.0, duration - 2.0)


def is_anomalous(segment: dict[str, Any] | None) -> bool:
    if segment is None or not segment["words"]:
        return False
    words = [word for word in segment["words"] if word["word"] not in PUNCTUATION][:8]
    score = sum(map(_anomaly, words))
    return score >= 3 or score + 0.01 >= len(words)


def last_end(segments: list[dict[str, Any]]) -> float | None:
    """Where the last word ends, else the last segment."""
    ends = (word["end"] for segment in reversed(segments) for word in reversed(segment["words"]))
    return next(ends, segments[-1]["end"] if segments else None)


class Seen(NamedTuple):
    """A decoded window. Frames of 10 ms: `seek`, its `count`, the encoder's `size`, the recording's `content`."""

    seek: int
    count: int
    size: int
    content: int
    last_speech: float  # seconds, before this window

    @property
    def start(self) -> float:
        return self.seek / FRAMES_PER_SECOND

    @property
    def limit(self) -> float:
        """Where the encoder's window ends, in seconds."""
        return (self.seek + self.size) / FRAMES_PER_SECOND


def leading_gap(segments: list[dict[str, Any]], seen: Seen, threshold: float) -> int | None:
    """Frames of silence before a first segment that may be a hallucination; None: go on with the window."""
    first = next((segment for segment in segments if segment["words"]), None)
    if first is None or not is_anomalous(first) or first["start"] - seen.start <= threshold:
        return None
    return round((first["start"] - seen.start) * FRAMES_PER_SECOND)


def hallucination(segments: list[dict[str, Any]], seen: Seen, threshold: float) -> tuple[int, int, float] | None:
    """(index of the first segment that may be a hallucination between silences or others, frame to go on from,
    seconds where the speech before it ended)."""
    before = seen.last_speech
    for i, segment in enumerate(segments):
        if not segment["words"]:
            continue
        if is_anomalous(segment):
            following = next((later for later in segments[i + 1 :] if later["words"]), None)
            after = following["words"][0]["start"] if following else seen.start + seen.count / FRAMES_PER_SECOND
            start, end = segment["start"], segment["end"]
            quiet = start - before > threshold or start < threshold or start - seen.start < 2.0
            over = after - end > threshold or is_anomalous(following) or seen.limit - end < 2.0
            if quiet and over:
                seek = round(max(seen.start + 1, start) * FRAMES_PER_SECOND)
                near = seen.content / FRAMES_PER_SECOND - end < threshold
                return i, seen.content if near else seek, before
        before = segment["end"]
    return None
