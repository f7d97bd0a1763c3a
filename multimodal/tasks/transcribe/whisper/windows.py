"""Whisper over a recording: windows of 30 s, each starting where the last one's text ended (openai/whisper)."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.transcribe.timeline import Span, painted
from multimodal.tasks.transcribe.whisper import guards
from multimodal.tasks.transcribe.whisper.decode import Align, Decode, Encode, Identify, Result, draw_seed
from multimodal.tasks.transcribe.whisper.options import WhisperOptions
from multimodal.tasks.transcribe.word_times import mel_level, on_sound
from multimodal.tokens.audio.log_mel import HOP, RATE, pad_or_trim
from multimodal.tokens.text.vocabulary import WhisperTokenizer

STRIDE = 2  # mel frames a position of the encoder, and so a step of the time tokens
FRAMES_PER_SECOND = RATE // HOP


class Sound(NamedTuple):
    """What a stream hears. `mel(seek, count)` gives mel frames in rising order, of which there are `content`; the
    encoder takes `size` at once. `silent(seek, count)`: there is nothing but digital silence."""

    mel: Callable[[int, int], Float[Tensor, "M F"]]
    content: int
    size: int
    silent: Callable[[int, int], bool]


@dataclass
class Heard:
    """What a stream leaves: segments and their tokens, the account of its samples, and the log of its decoding."""

    segments: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    account: list[Span] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)


class Window(NamedTuple):
    """Where the loop is: mel frame `seek`, `count` frames that are heard, the encoder's `features` of them."""

    seek: int
    count: int
    features: Tensor
    language: str | None


Found = tuple[list[dict[str, Any]], int, list[Span]]  # a window's segments, where to go on, what was skipped in it


class WhisperStream:
    """openai-whisper's loop over clips of a recording, as a generator of requests to the model (`whisper_decode`)."""

    def __init__(
        self, sound: Sound, clips: Sequence[tuple[int, int]], tokenizer: WhisperTokenizer, context: int,
        options: WhisperOptions, language: str | None, tell: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ):  # fmt: skip
        """`clips`: mel frames [start, stop) that are heard. `context`: positions of the decoder. `tell`: is called
        after each window with the mel frame that was reached and the new segments."""
        self.sound, self.clips, self.tokenizer, self.options = sound, clips, tokenizer, options
        self.language, self.tell, self.room = language, tell or (lambda seek, segments: None), context // 2 - 1
        self.heard, self.prompt, self.last_speech = Heard(), Prompt.of(tokenizer, options), 0.0
        self.reset = False  # whether the initial prompt is forgotten
        self.forgotten = 0  # tokens of the text that are not told any more

    def run(self) -> Generator[Any, Any, Heard]:
        for start, stop in self.clips:
            seek = start
            while seek < stop:
                before, count = seek, min(self.sound.size, self.sound.content - seek, stop - seek)
                if self.sound.silent(seek, count):
                    segments, seek, spans = [], seek + count, [_span(seek, seek + count, "silence")]
                else:
                    segments, seek, spans = yield from self._window(seek, count)
                seek = seek if seek > before else before + count  # no rule keeps times without timestamps in order
                end = min(seek, stop)
                self.heard.account += painted(before * HOP, end * HOP, None, spans)
                if self.options.vad_filter or self.options.batched:
                    _clamp(segments, stop / FRAMES_PER_SECOND)
                self.heard.segments += segments
                self.tell(end, segments)
        return self.heard

    def _window(self, seek: int, count: int) -> Generator[Any, Any, Found]:
        options = self.options
        features = yield Encode(pad_or_trim(self.sound.mel(seek, count), self.sound.size))
        window = Window(seek, count, features, (yield from self._language(features)))
        result, silent = yield from self._decoded(window)
        if silent:
            return [], seek + count, [_span(seek, seek + count, "no_speech")]
        segments, advance, closed = split(result, self.tokenizer, seek, count)
        following, spans = seek + advance, []
        if options.cut_loops:
            segments, spans = self._unlooped(segments, result)
        if options.word_timestamps:
            segments, following, skipped = yield from self._worded(window, segments, following, closed)
            if segments is None:
                return [], following, skipped
            spans += skipped
        for segment in segments:
            if segment["start"] == segment["end"] or not segment["text"].strip():
                segment |= {"text": "", "tokens": []} | ({"words": []} if options.word_timestamps else {})
            if options.multilingual:
                segment["language"] = window.language
        self.heard.tokens += [token for segment in segments for token in segment["tokens"]]
        if not options.condition_on_previous_text or result.temperature > 0.5:
            self.reset, self.forgotten = True, len(self.heard.tokens)
        return segments, following, spans

    def _language(self, features: Tensor) -> Generator[Any, Any, str | None]:
        if not self.options.multilingual:
            return self.language
        chances = yield Identify(features)
        return max(self.options.languages or chances, key=lambda code: chances.get(code, 0.0))

    def _decoded(self, window: Window) -> Generator[Any, Any, tuple[Result, bool]]:
        """The first temperature whose text neither repeats itself nor is improbable, else the last one's; and whether
        nothing was said."""
        previous = self.prompt.before(self.heard.tokens[self.forgotten :], self.reset, self.room)
        for temperature in self.options.temperature:
            seed = draw_seed(self.options.seed, window.seek, temperature)
            result = yield Decode(window.features, previous, window.language, temperature, seed)
            failed = failure(result, self.options)
            silent = is_silent(result, self.options)
            if self.options.decode_log:
                self._note(window, result, failed, silent, len(previous))
            if failed is None:
                break
        return result, silent

    def _note(self, window: Window, result: Result, failed: str | None, silent: bool, prompt: int) -> None:
        self.heard.log.append({
            "seek": window.seek, "start": window.seek / FRAMES_PER_SECOND,
            "end": (window.seek + window.count) / FRAMES_PER_SECOND, "language": window.language,
            "prompt_tokens": prompt, "temperature": result.temperature, "avg_logprob": result.avg_logprob,
            "compression_ratio": result.compression_ratio, "no_speech_prob": result.no_speech_prob,
            "fallback": failed, "no_speech": silent, "tokens": result.tokens, "text": result.text,
        })  # fmt: skip

    def _unlooped(self, segments: list[dict[str, Any]], result: Result) -> tuple[list[dict[str, Any]], list[Span]]:
        limit = self.options.compression_ratio_threshold
        repetitive = limit is not None and result.compression_ratio > limit
        kept, cuts = guards.cut_loops(segments, self.tokenizer.eot, repetitive)
        if not cuts:
            return segments, []
        kept = [{**segment, "text": _text(self.tokenizer, segment["tokens"])} for segment in kept]
        return kept, [Span(round(start * RATE), round(end * RATE), "repetition") for start, end in cuts]

    def _worded(
        self, window: Window, segments: list[dict[str, Any]], following: int, closed: bool
    ) -> Generator[Any, Any, tuple[list[dict[str, Any]] | None, int, list[Span]]]:
        """Segments with words, where to go on, and what is skipped; None for segments: the window is to be heard again
        from there."""
        from multimodal.tasks.transcribe.whisper.words import add_words

        options, eot = self.options, self.tokenizer.eot
        seek, limit = window.seek, options.hallucination_silence_threshold
        texts = [token for segment in segments for token in segment["tokens"] if token < eot]
        timings = (yield Align(window.features, texts, window.count, window.language)) if texts else []
        if options.words_on_sound:
            timings = on_sound(timings, mel_level(self.sound.mel(seek, window.count)))
        marks = {"prepend": options.prepend_punctuations, "append": options.append_punctuations}
        add_words(segments, timings, last_speech=self.last_speech, **marks)
        seen = guards.Seen(seek, window.count, self.sound.size, self.sound.content, self.last_speech)
        ended = guards.last_end(segments)
        if not closed and ended is not None and ended > seen.start:
            following = round(ended * FRAMES_PER_SECOND)
            if limit is not None and seen.limit - ended <= limit:
                following = seek + window.count
        spans = []
        if limit is not None:
            if gap := guards.leading_gap(segments, seen, limit):
                return None, seek + gap, [_span(seek, seek + gap, "hallucination")]
            if found := guards.hallucination(segments, seen, limit):
                first, following, before = found
                spans = [Span(round(max(before, seen.start) * RATE), following * HOP, "hallucination")]
                segments = segments[:first]
        ended = guards.last_end(segments)
        self.last_speech = self.last_speech if ended is None else ended
        return segments, following, spans


class Prompt(NamedTuple):
    """What is told to the decoder before the text that it has written."""

    initial: list[int]
    hot: list[int]
    carried: bool

    @classmethod
    def of(cls, tokenizer: WhisperTokenizer, options: WhisperOptions) -> "Prompt":
        initial, hot = (tokenizer.encode(" " + text.strip()) if text else [] for text in
                        (options.initial_prompt, options.hotwords))  # fmt: skip
        return cls(initial, hot, options.carry_initial_prompt)

    def before(self, text: list[int], reset: bool, room: int) -> list[int]:
        """At most `room` tokens: hot words, the initial prompt (until `reset`, or always if carried), and as much of
        the end of the text as is left room for. Of an initial prompt that is too long the end is kept."""
        lead = self.hot[:room]
        if self.carried:
            lead = lead + _end(self.initial, room - len(lead))
        elif not reset:
            text = self.initial + text
        return lead + _end(text, room - len(lead))


def _clamp(segments: list[dict[str, Any]], latest: float) -> None:
    """Times that lie in the padding behind a clip, which would be out of order with the next clip's."""
    for segment in segments:
        segment["end"] = min(segment["end"], latest)
        segment["start"] = min(segment["start"], segment["end"])


def _end(tokens: list[int], count: int) -> list[int]:
    return tokens[max(0, len(tokens) - count) :]


def _span(start: int, stop: int, reason: str) -> Span:
    return Span(start * HOP, stop * HOP, reason)


def _improbable(result: Result, options: WhisperOptions) -> bool:
    return options.logprob_threshold is not None and result.avg_logprob < options.logprob_threshold


def failure(result: Result, options: WhisperOptions) -> str | None:
    """Why the next temperature must be tried: the figure that is beyond its threshold."""
    ratio, silence = options.compression_ratio_threshold, options.no_speech_threshold
    if _improbable(result, options):
        heard = silence is None or result.no_speech_prob <= silence  # no fallback in silence
        return "avg_logprob" if heard else None
    return "compression_ratio" if ratio is not None and result.compression_ratio > ratio else None


def is_silent(result: Result, options: WhisperOptions) -> bool:
    """Whether nothing was said. Words of `hotwords` alone are no sign of speech, however probable they are: the
    prompt makes them so."""
    if options.no_speech_threshold is None or result.no_speech_prob <= options.no_speech_threshold:
        return False
    if options.logprob_threshold is None or result.avg_logprob <= options.logprob_threshold:
        return True
    return guards.read_back(result.text, options.hotwords)


def split(result: Result, tokenizer: WhisperTokenizer, seek: int, count: int) -> tuple[list[dict[str, Any]], int, bool]:
    """Segments of a window that starts at mel frame `seek` and holds `count` frames, how far to go on, and whether
    the text ends with one time token, so that no speech follows.

    Between two time tokens in a row one segment ends and the next begins; text after the last such pair is left
    to the next window."""
    tokens, begin = result.tokens, tokenizer.timestamp_begin
    times = [token >= begin for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]
    closed = times[-2:] == [False, True]
    if not cuts:
        last = next((token - begin for token in reversed(tokens) if token >= begin), 0)
        seconds = last * tokenizer.SECONDS_PER_TIMESTAMP if last else count * HOP / RATE
        return [_segment(result, tokenizer, seek, tokens, 0.0, seconds)], count, closed
    if closed:
        cuts.append(len(tokens))
    segments = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        part = tokens[start:end]
        first, last = ((part[i] - begin) * tokenizer.SECONDS_PER_TIMESTAMP for i in (0, -1))
        segments.append(_segment(result, tokenizer, seek, part, first, last))
    return segments, count if closed else (tokens[cuts[-1] - 1] - begin) * STRIDE, closed


def _segment(
    result: Result, tokenizer: WhisperTokenizer, seek: int, tokens: list[int], start: float, end: float
) -> dict[str, Any]:
    """`start` and `end` in seconds from the window's begin."""
    offset = float(seek * HOP / RATE)
    return {
        "seek": seek, "start": offset + start, "end": offset + end, "text": _text(tokenizer, tokens), "tokens": tokens,
        "temperature": result.temperature, "avg_logprob": result.avg_logprob,
        "compression_ratio": result.compression_ratio, "no_speech_prob": result.no_speech_prob,
    }  # fmt: skip


def _text(tokenizer: WhisperTokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode([token for token in tokens if token < tokenizer.eot])


def held(mel: Float[Tensor, "M F"], first: int) -> Callable[[int, int], Float[Tensor, "M _"]]:
    """A reader of a clip's frames that begin at frame `first` of the recording."""
    return lambda seek, count: mel[:, seek - first : seek - first + count]
