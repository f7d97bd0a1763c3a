"""Word timings: tokens grouped into words, and word times snapped to the audio."""

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.transcribe.timeline import FRAMES_PER_SECOND
from multimodal.tokens.audio.log_mel import HOP
from multimodal.tokens.text.tokenizer import Tokenizer

# A frame is sound if it lies at most DROP below its word's loudest frame; in a noisy window only if it lies ABOVE over
# the background, which is assumed to be at least LEAST below that frame. Chosen on joined recordings of three sets,
# plain and in white noise (benchmarks/studies/words.py); DROP 25 to 35 and BACK 20 to 40 differ by 2 % of the words.
DROP, ABOVE, LEAST = 30.0, 6.0, 12.0  # dB
BACKGROUND = 0.05  # minimum share of a window's frames that is background
FLOOR = -80.0  # dB of full scale, below which nothing is audible
BACK = 30  # frames by which a word may begin before its alignment
REACH = 50  # frames in which a word has a loud one, and by which its end may move
RUN, LOUD_IN_RUN = 5, 4  # sound has this many loud frames in a run, which a click does not
GAP = 3  # frames of silence that end a word


class WordTiming(NamedTuple):
    """A word as written, with its leading space; times in seconds from the beginning of the window."""

    word: str
    tokens: list[int]
    start: float
    end: float
    probability: float
    of_tokens: tuple[float, ...] = ()  # probability of each token, where known

    def entry(self, offset: float) -> dict[str, Any]:
        """The word in a result; `offset` in seconds of the recording."""
        return {"word": self.word, "start": offset + self.start, "end": offset + self.end,
                "probability": self.probability}  # fmt: skip


Words = list[tuple[str, list[int]]]


def split_on_unicode(tokenizer: Tokenizer, tokens: Sequence[int]) -> Words:
    """(text, tokens) of the shortest runs of tokens that decode to whole characters.

    Joined they give the whole text and every token, even where the bytes are not valid UTF-8."""
    tokens = [int(token) for token in tokens]
    if tokenizer.joins:
        return [(tokenizer.decode([token], skip_control=False), [token]) for token in tokens]
    whole, words, done, first = tokenizer.decode(tokens, skip_control=False), [], 0, 0
    for last in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:last], skip_control=False)
        if last < len(tokens) and not whole.startswith(text):  # ends within a character
            continue
        if len(text) == done and words:  # no text of its own: the rest of invalid bytes
            words[-1][1].extend(tokens[first:last])
        else:
            words.append((whole[done : len(text)], tokens[first:last]))
        done, first = len(text), last
    return words


def split_on_spaces(tokenizer: Tokenizer, tokens: Sequence[int], marks_apart: bool = False) -> Words:
    """(word, tokens); a word begins with a space. With `marks_apart`, control tokens, punctuation and spaces stand
    alone, as in openai-whisper; else further spaces belong to the next word, those at the end to the last."""
    words: Words = []
    for text, part in split_on_unicode(tokenizer, tokens):
        alone = marks_apart and (part[0] in tokenizer.control or text.strip() in string.punctuation)
        begins = text.startswith(" ") and (marks_apart or (words and words[-1][0].strip()))
        if alone or begins or not words:
            words.append((text, part))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + part)
    if not marks_apart and len(words) > 1 and not words[-1][0].strip():
        (text, part), (space, rest) = words[-2:]
        words[-2:] = [(text + space, part + rest)]
    return words


def spread(words: Words, seconds: float) -> list[WordTiming]:
    """Timings for words that cannot be aligned: equal parts of `seconds` for each token, probability 0."""
    step, timings, count = seconds / max(1, sum(len(part) for _, part in words)), [], 0
    for text, part in words:
        after = count + len(part)
        timings.append(WordTiming(text, part, count * step, after * step, 0.0))
        count = after
    return timings


def wave_level(wave: Float[Tensor, "T"]) -> Float[Tensor, "F"]:
    """Level in dB of full scale of each whole 10 ms of a 16 kHz waveform."""
    frames = wave[: len(wave) // HOP * HOP].float().unflatten(0, (-1, HOP))
    return 10 * frames.square().mean(1).clamp(min=1e-10).log10()


def mel_level(mel: Float[Tensor, "M F"]) -> Float[Tensor, "F"]:
    """Level in dB of each frame of Whisper's log-mel, 25 to 30 above `wave_level`."""
    return (10 * (10 ** (4 * mel.float() - 4)).sum(0).log10()).cpu()


def snap_to_audio(timings: Sequence[WordTiming], level: Float[Tensor, "F"]) -> list[WordTiming]:
    """Move word starts and ends that lie beside a pause to the sound; words in fluent speech stay.

    Alignments are about 0.1 s off, and often let the first word of a window begin with the window. A word aligned to
    silence moves to the first sound before the next word; one aligned to sound moves back by up to 0.3 s to where that
    sound began. A word ends with its sound or at the next word. `level`: dB of the window's frames of 10 ms."""
    moved: list[WordTiming] = []
    background = float(level.quantile(BACKGROUND)) if len(level) else FLOOR
    for index, timing in enumerate(timings):
        first = round(timing.start * FRAMES_PER_SECOND)
        if first < len(level):
            is_last = index + 1 == len(timings)
            after = len(level) if is_last else round(timings[index + 1].start * FRAMES_PER_SECOND)
            earliest = round(max(timings[index - 1].end, moved[-1].start) * FRAMES_PER_SECOND) if moved else 0
            begin = _begin(_loud(level, background, first, after), first, max(earliest, first - BACK), after)
            start = timing.start if begin == first else begin / FRAMES_PER_SECOND
            timing = timing._replace(start=max(start, moved[-1].start if moved else 0.0))
        moved.append(timing)
    limits = [timing.start for timing in moved[1:]] + [len(level) / FRAMES_PER_SECOND]
    return [_snap_end(timing, level, background, limit) for timing, limit in zip(moved, limits, strict=False)]


def _loud(level: Float[Tensor, "F"], background: float, first: int, after: int) -> list[bool]:
    loudest = float(level[max(0, first - FRAMES_PER_SECOND // 10) : max(after, first + REACH)].max())
    return (level >= max(loudest - DROP, min(background + ABOVE, loudest - LEAST), FLOOR)).tolist()


def _begin(loud: list[bool], first: int, earliest: int, after: int) -> int:
    def is_sound(frame: int) -> bool:
        return sum(loud[frame : frame + RUN]) >= LOUD_IN_RUN

    if not is_sound(first):
        return next((frame for frame in range(first, min(after, len(loud))) if is_sound(frame)), first)
    begin = first
    while begin > earliest and is_sound(begin - 1):
        begin -= 1
    return first if begin and is_sound(begin - 1) else begin  # the sound began even earlier: no pause here


def _snap_end(timing: WordTiming, level: Float[Tensor, "F"], background: float, limit: float) -> WordTiming:
    end = max(timing.start, timing.end)
    first, last = round(timing.start * FRAMES_PER_SECOND), round(end * FRAMES_PER_SECOND)
    latest = min(round(limit * FRAMES_PER_SECOND), last + REACH, len(level))
    if first < latest:
        loud = _loud(level, background, first, latest)
        ends = [frame + 1 for frame in range(first, min(last, latest)) if loud[frame]]
        if ends and last - ends[-1] >= GAP:
            end = ends[-1] / FRAMES_PER_SECOND
        else:
            while last < latest and any(loud[last : last + GAP]):
                last += 1
                end = last / FRAMES_PER_SECOND
    return timing._replace(end=max(timing.start, min(end, limit)))
