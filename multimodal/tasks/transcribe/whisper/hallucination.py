"""Hallucination filters: hot words echoed on silence, and openai-whisper's check of segments between silences."""

from typing import Any, NamedTuple

from multimodal.tasks.transcribe.timeline import FRAMES_PER_SECOND

PUNCTUATION = "\"'“¿([{-\"'.。,，!！?？:：”)]}、"


def echoes_hotwords(text: str, hotwords: str | None) -> bool:
    """Return True if a text consists of hot words only, which a model likes to write on silence."""
    words = _words(text)
    return bool(words) and set(words) <= set(_words(hotwords or ""))


def _words(text: str) -> list[str]:
    return "".join(sign if sign.isalnum() else " " for sign in text.lower()).split()


def _anomaly(word: dict[str, Any]) -> float:
    """Score a word that is improbable, too short or too long."""
    duration = word["end"] - word["start"]
    return (word["probability"] < 0.15) + max(0.0, 0.133 - duration) * 15 + max(0.0, duration - 2.0)


def is_anomalous(segment: dict[str, Any] | None) -> bool:
    if segment is None or not segment["words"]:
        return False
    words = [word for word in segment["words"] if word["word"] not in PUNCTUATION][:8]
    score = sum(map(_anomaly, words))
    return score >= 3 or score + 0.01 >= len(words)


def last_end(segments: list[dict[str, Any]]) -> float | None:
    """End of the last word, else of the last segment."""
    ends = (word["end"] for segment in reversed(segments) for word in reversed(segment["words"]))
    return next(ends, segments[-1]["end"] if segments else None)


class DecodedWindow(NamedTuple):
    """Position of a decoded window in frames of 10 ms: `seek`, its `count`, the encoder's `size`, the audio's
    `content`; and the end of the speech before it in seconds."""

    seek: int
    count: int
    size: int
    content: int
    last_speech: float

    @property
    def start(self) -> float:
        return self.seek / FRAMES_PER_SECOND

    @property
    def limit(self) -> float:
        """End of the encoder's window in seconds."""
        return (self.seek + self.size) / FRAMES_PER_SECOND


def leading_gap(segments: list[dict[str, Any]], window: DecodedWindow, threshold: float) -> int | None:
    """Frames of silence before a first segment that may be a hallucination; None to keep the window."""
    first = next((segment for segment in segments if segment["words"]), None)
    if first is None or not is_anomalous(first) or first["start"] - window.start <= threshold:
        return None
    return round((first["start"] - window.start) * FRAMES_PER_SECOND)


def find_hallucination(
    segments: list[dict[str, Any]], window: DecodedWindow, threshold: float
) -> tuple[int, int, float] | None:
    """(index of the first segment that may be a hallucination, frame to continue from, end of the speech before it in
    seconds), or None. Such a segment lies between silences or other hallucinations."""
    before = window.last_speech
    for i, segment in enumerate(segments):
        if not segment["words"]:
            continue
        if is_anomalous(segment):
            following = next((later for later in segments[i + 1 :] if later["words"]), None)
            after = following["words"][0]["start"] if following else window.start + window.count / FRAMES_PER_SECOND
            start, end = segment["start"], segment["end"]
            quiet = start - before > threshold or start < threshold or start - window.start < 2.0
            over = after - end > threshold or is_anomalous(following) or window.limit - end < 2.0
            if quiet and over:
                seek = round(max(window.start + 1, start) * FRAMES_PER_SECOND)
                near = window.content / FRAMES_PER_SECOND - end < threshold
                return i, window.content if near else seek, before
        before = segment["end"]
    return None
