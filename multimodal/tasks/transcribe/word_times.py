"""Words with times: what one is, and how tokens are joined into words."""

import string
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.text.vocabulary import Tokenizer

FRAMES = RATE // HOP  # a second
# A frame is sound from DROP below its word's loudest frame on; in a noisy window only from ABOVE over the background
# on, which is taken to be LEAST or more below that frame. Chosen on joined recordings of three sets, plain and in white
# noise (benchmarks/studies/words.py); DROP 25 to 35 and BACK 20 to 40 are as good within 2 % of the words.
DROP, ABOVE, LEAST = 30.0, 6.0, 12.0  # dB
QUIET = 0.05  # share of a window's frames that is background, at the least
FLOOR = -80.0  # dB of full scale: below it there is nothing to hear
BACK = 30  # frames before its alignment in which a word may begin
REACH = 50  # frames in which a word has a loud one, and by which its end may move
LASTING, MOST = 5, 4  # sound is where so many frames hold so many loud ones: a click is none
GAP = 3  # frames of silence that end a word


class WordTiming(NamedTuple):
    """A word as it stands in the text, its leading space included; seconds from the window's begin."""

    word: str
    tokens: list[int]
    start: float
    end: float
    probability: float


Words = list[tuple[str, list[int]]]


def split_on_unicode(tokenizer: Tokenizer, tokens: Sequence[int]) -> Words:
    """(text, tokens) of the shortest runs of tokens that hold whole characters. Joined they are the whole text and
    every token, also where bytes are no character."""
    tokens = [int(token) for token in tokens]
    whole, found, done, first = tokenizer.decode(tokens, skip_control=False), [], 0, 0
    for last in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:last], skip_control=False)
        if last < len(tokens) and not whole.startswith(text):  # it ends within a character
            continue
        if len(text) == done and found:  # no text of its own: the rest of a character that is none
            found[-1][1].extend(tokens[first:last])
        else:
            found.append((whole[done : len(text)], tokens[first:last]))
        done, first = len(text), last
    return found


def split_on_spaces(tokenizer: Tokenizer, tokens: Sequence[int]) -> Words:
    """As `split_on_unicode`, joined to words: one begins with a space; control tokens and marks stand alone."""
    words: Words = []
    for text, part in split_on_unicode(tokenizer, tokens):
        alone = part[0] in tokenizer.control or text.strip() in string.punctuation
        if alone or text.startswith(" ") or not words:
            words.append((text, part))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + part)
    return words


def spread(words: Words, start: float, end: float) -> list[WordTiming]:
    """Times for words that could not be aligned: each token takes as long, probability 0."""
    step, found, count = (end - start) / max(1, sum(len(part) for _, part in words)), [], 0
    for text, part in words:
        after = count + len(part)
        found.append(WordTiming(text, part, start + count * step, start + after * step, 0.0))
        count = after
    return found


def wave_level(wave: Float[Tensor, "T"]) -> Float[Tensor, "F"]:
    """dB of full scale of each whole 10 ms of a waveform at 16 kHz."""
    frames = wave[: len(wave) // HOP * HOP].float().unflatten(0, (-1, HOP))
    return 10 * frames.square().mean(1).clamp(min=1e-10).log10()


def mel_level(mel: Float[Tensor, "M F"]) -> Float[Tensor, "F"]:
    """dB of each frame of Whisper's log-mel, 25 to 30 above `wave_level`."""
    return 10 * (10 ** (4 * mel.float() - 4)).sum(0).log10()


def on_sound(timings: Sequence[WordTiming], level: Float[Tensor, "F"]) -> list[WordTiming]:
    """Words that begin and end with their sound where a pause is beside them; in speech without pauses nothing moves.

    An alignment knows within some 0.1 s where a word is, and often lets a window's first word begin with the window.
    A word aligned to silence begins with the first sound before the next word, one within sound where that sound began
    up to 0.3 s before; a word ends with its sound or the next word. `level`: dB of the window's frames of 10 ms."""
    begun: list[WordTiming] = []
    quiet = float(level.quantile(QUIET)) if len(level) else FLOOR
    for place, timing in enumerate(timings):
        first = round(timing.start * FRAMES)
        if first < len(level):
            after = round(timings[place + 1].start * FRAMES) if place + 1 < len(timings) else len(level)
            earliest = round(max(timings[place - 1].end, begun[-1].start) * FRAMES) if begun else 0
            begin = _begin(_loud(level, quiet, first, after), first, max(earliest, first - BACK), after)
            start = timing.start if begin == first else begin / FRAMES
            timing = timing._replace(start=max(start, begun[-1].start if begun else 0.0))
        begun.append(timing)
    limits = [timing.start for timing in begun[1:]] + [len(level) / FRAMES]
    return [_ended(timing, level, quiet, limit) for timing, limit in zip(begun, limits, strict=False)]


def _loud(level: Float[Tensor, "F"], quiet: float, first: int, after: int) -> list[bool]:
    loudest = float(level[max(0, first - FRAMES // 10) : max(after, first + REACH)].max())
    return (level >= max(loudest - DROP, min(quiet + ABOVE, loudest - LEAST), FLOOR)).tolist()


def _begin(loud: list[bool], first: int, earliest: int, after: int) -> int:
    def sound(frame: int) -> bool:
        return sum(loud[frame : frame + LASTING]) >= MOST

    if not sound(first):
        return next((frame for frame in range(first, min(after, len(loud))) if sound(frame)), first)
    begin = first
    while begin > earliest and sound(begin - 1):
        begin -= 1
    return first if begin and sound(begin - 1) else begin  # it goes on before: no pause there


def _ended(timing: WordTiming, level: Float[Tensor, "F"], quiet: float, limit: float) -> WordTiming:
    end = max(timing.start, timing.end)
    first, last = round(timing.start * FRAMES), round(end * FRAMES)
    latest = min(round(limit * FRAMES), last + REACH, len(level))
    if first < latest:
        loud = _loud(level, quiet, first, latest)
        heard = [frame + 1 for frame in range(first, min(last, latest)) if loud[frame]]
        if heard and last - heard[-1] >= GAP:
            end = heard[-1] / FRAMES
        else:
            while last < latest and any(loud[last : last + GAP]):
                last += 1
                end = last / FRAMES
    return timing._replace(end=max(timing.start, min(end, limit)))
