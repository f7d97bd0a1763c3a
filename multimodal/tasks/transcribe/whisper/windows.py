"""Whisper over a recording: windows of 30 s, each starting where the text of the previous one ended."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.system.journal import NO_JOURNAL, JournalPart
from multimodal.system.records import to_record
from multimodal.tasks.transcribe.options import WhisperOptions
from multimodal.tasks.transcribe.results import Transcription
from multimodal.tasks.transcribe.timeline import FRAMES_PER_SECOND, Span, overlaid
from multimodal.tasks.transcribe.whisper import hallucination
from multimodal.tasks.transcribe.whisper.decode import Align, Decode, DecodingResult, Encode, Identify, sampling_seed
from multimodal.tasks.transcribe.whisper.language import likeliest
from multimodal.tasks.transcribe.whisper.repetition import BY_TOKEN, remove_repetitions
from multimodal.tasks.transcribe.whisper.words import STRIDE, add_words
from multimodal.tasks.transcribe.word_times import mel_level, snap_to_audio
from multimodal.tokens.audio.log_mel import HOP, RATE, pad_or_trim
from multimodal.tokens.text.tiktokens import WhisperTokenizer

Segments = list[dict[str, Any]]
MARKS = 5  # tokens beside a prompt: its start, and language, task and no timestamps after that of the transcript
WindowResult = tuple[Segments, int, list[Span]]  # segments, next frame, spans skipped


class StreamAudio(NamedTuple):
    """Audio of a stream: `content` mel frames, read in order by `mel(seek, count)`. The encoder takes `size` frames.
    `silent(seek, count)`: the frames are digital silence."""

    mel: Callable[[int, int], Float[Tensor, "M F"]]
    content: int
    size: int
    silent: Callable[[int, int], bool]


class WhisperWindow(NamedTuple):
    """Mel frames [seek, seek + count) and the encoder's `features` of them."""

    seek: int
    count: int
    features: Tensor
    language: str | None


class WhisperTranscriber:
    """openai-whisper's loop over clips of a recording, as a generator of model requests (see `whisper.decode`).

    The segments equal openai-whisper's, with one exception: with `word_timestamps` an empty trailing segment may start
    0.02 s later where a single encoder position remains."""

    def __init__(
        self, audio: StreamAudio, clips: Sequence[tuple[int, int]], tokenizer: WhisperTokenizer, context: int,
        options: WhisperOptions, language: str | None, report: Callable[[int, Segments], None] | None = None,
        journal: JournalPart = NO_JOURNAL,
    ):  # fmt: skip
        """`clips`: mel frames [start, stop) to transcribe. `context`: positions of the decoder. `report` is called
        after each window with the mel frame reached and the new segments. `journal`: keeps each window with the state
        after it, from which the next call goes on."""
        self.audio, self.clips, self.tokenizer, self.options = audio, clips, tokenizer, options
        self.language, self.report, self.journal = language, report or (lambda seek, segments: None), journal
        self.result, self.prompt, self.last_speech = Transcription(), DecoderPrompt.of(tokenizer, options), 0.0
        self.context = context
        self.initial_dropped = False  # the initial prompt is no longer part of the prompt
        self.dropped = 0  # tokens of the transcript that are no longer part of the prompt

    def run(self) -> Generator[Any, Any, Transcription]:
        position = self._restore()
        for start, stop in self.clips:
            seek = max(start, position)
            while seek < stop:
                lengths = self.result.lengths()
                before, count = seek, min(self.audio.size, self.audio.content - seek, stop - seek)
                if self.audio.silent(seek, count):
                    segments, seek, skipped = [], seek + count, [_span(seek, seek + count, "silence")]
                else:
                    segments, seek, skipped = yield from self._window(seek, count)
                seek = seek if seek > before else before + count  # without timestamp rules times may run backwards
                end = min(seek, stop)
                self.result.coverage += overlaid(before * HOP, end * HOP, skipped)
                if self.options.vad_filter or self.options.batched:
                    within_clip(segments, before / FRAMES_PER_SECOND, stop / FRAMES_PER_SECOND)
                self.result.segments += segments
                self._keep(end, lengths)
                self.report(end, segments)
        return self.result

    def _keep(self, end: int, lengths: list[int]) -> None:
        """Write the window that ended at mel frame `end`, and the state after it."""
        state = [end, self.last_speech, self.initial_dropped, self.dropped]
        self.journal.add({"state": state, "window": to_record(self.result.since(lengths))})

    def _restore(self) -> int:
        """Return to the state after the journal's last window, and the mel frame where it ended."""
        end = 0
        for record in self.journal.records:
            window = Transcription.of(record["window"])
            self.result.extend(window)
            end, self.last_speech, self.initial_dropped, self.dropped = record["state"]
            self.report(end, window.segments)
        return end

    def _window(self, seek: int, count: int) -> Generator[Any, Any, WindowResult]:
        options = self.options
        features = yield Encode(pad_or_trim(self.audio.mel(seek, count), self.audio.size))
        window = WhisperWindow(seek, count, features, (yield from self._language(features)))
        result, silent = yield from self._decode(window)
        if silent:
            return [], seek + count, [_span(seek, seek + count, "no_speech")]
        segments, advance, closed = split(result, self.tokenizer, seek, count)
        following, skipped = seek + advance, []
        if options.remove_repetitions:
            segments, skipped = self._without_repetitions(segments, result)
        if options.word_timestamps:
            segments, following, hallucinated = yield from self._add_words(window, segments, following, closed)
            if segments is None:
                return [], following, hallucinated
            skipped += hallucinated
        for segment in segments:
            if segment["start"] == segment["end"] or not segment["text"].strip():
                segment |= {name: type(segment[name])() for name in ("text", *BY_TOKEN, "words") if name in segment}
            if options.multilingual:
                segment["language"] = window.language
        self.result.tokens += [token for segment in segments for token in segment["tokens"]]
        if not options.condition_on_previous_text or result.temperature > 0.5:
            self.initial_dropped, self.dropped = True, len(self.result.tokens)
        return segments, following, skipped

    def _language(self, features: Tensor) -> Generator[Any, Any, str | None]:
        if not self.options.multilingual:
            return self.language
        return likeliest((yield Identify(features)), self.options.languages)

    def _decode(self, window: WhisperWindow) -> Generator[Any, Any, tuple[DecodingResult, bool]]:
        """The result of the first temperature without a failure, else of the last; and True if the window is silent."""
        previous = self.prompt.tokens(self.result.tokens[self.dropped :], self.initial_dropped, self.context)
        for temperature in self.options.temperature:
            seed = sampling_seed(self.options.seed, window.seek, temperature)
            result = yield Decode(window.features, previous, window.language, temperature, seed)
            failure = fallback_reason(result, self.options)
            silent = is_silent(result, self.options)
            if self.options.decode_log:
                self.result.log.append(_log_entry(window, result, failure, silent, len(previous)))
            if failure is None:
                break
        return result, silent

    def _without_repetitions(self, segments: Segments, result: DecodingResult) -> tuple[Segments, list[Span]]:
        limit = self.options.compression_ratio_threshold
        repetitive = limit is not None and result.compression_ratio > limit
        kept, removed = remove_repetitions(segments, self.tokenizer.eot, repetitive)
        if not removed:
            return segments, []
        kept = [{**segment, "text": _text(self.tokenizer, segment["tokens"])} for segment in kept]
        return kept, [Span(round(start * RATE), round(end * RATE), "repetition") for start, end in removed]

    def _add_words(
        self, window: WhisperWindow, segments: Segments, following: int, closed: bool
    ) -> Generator[Any, Any, tuple[Segments | None, int, list[Span]]]:
        """Segments with words, the next frame, and the spans skipped. None for segments: decode again from there."""
        options, eot = self.options, self.tokenizer.eot
        seek, limit = window.seek, options.hallucination_silence_threshold
        texts = [token for segment in segments for token in segment["tokens"] if token < eot]
        timings = (yield Align(window.features, texts, window.count, window.language)) if texts else []
        if options.snap_words_to_audio:
            timings = snap_to_audio(timings, mel_level(self.audio.mel(seek, window.count)))
        add_words(segments, timings, options.prepend_punctuations, options.append_punctuations, self.last_speech)
        decoded = hallucination.DecodedWindow(
            seek, window.count, self.audio.size, self.audio.content, self.last_speech
        )  # fmt: skip
        end = hallucination.last_end(segments)
        if not closed and end is not None and end > decoded.start:
            following = round(end * FRAMES_PER_SECOND)
            if limit is not None and decoded.limit - end <= limit:
                following = seek + window.count
        skipped = []
        if limit is not None:
            if gap := hallucination.leading_gap(segments, decoded, limit):
                return None, seek + gap, [_span(seek, seek + gap, "hallucination")]
            if hit := hallucination.find_hallucination(segments, decoded, limit):
                first, following, before = hit
                skipped = [Span(round(max(before, decoded.start) * RATE), following * HOP, "hallucination")]
                segments = segments[:first]
        end = hallucination.last_end(segments)
        self.last_speech = self.last_speech if end is None else end
        return segments, following, skipped


class DecoderPrompt(NamedTuple):
    """Prompt tokens placed before the decoder's own text."""

    initial: list[int]
    hotwords: list[int]
    carried: bool

    @classmethod
    def of(cls, tokenizer: WhisperTokenizer, options: WhisperOptions) -> "DecoderPrompt":
        texts = (options.initial_prompt, options.hotwords or None)  # an empty prompt is a space, as in openai-whisper
        initial, hotwords = ([] if text is None else tokenizer.encode(" " + text.strip()) for text in texts)
        return cls(initial, hotwords, options.carry_initial_prompt)

    def tokens(self, text: list[int], initial_dropped: bool, context: int) -> list[int]:
        """Hot words, then the initial prompt (until dropped, or always if carried) and the end of the text. An initial
        prompt that is too long keeps its end. As in faster-whisper, hot words and the rest may each take half of the
        decoder's `context`; but a quarter of it stays free for what is written."""
        most = context // 2 - 1
        hotwords = self.hotwords[:most]
        room = min(most, context - context // 4 - MARKS - len(hotwords))
        lead = _end(self.initial, room) if self.carried else []
        if not self.carried and not initial_dropped:
            text = self.initial + text
        return hotwords + lead + _end(text, room - len(lead))


def within_clip(segments: Segments, earliest: float, latest: float) -> None:
    """Limit times that lie in the padding after a clip, which would overlap the next clip's. Segments that lie there
    wholly share the time since the last one that ends before, or that one's own."""
    group = [segment for segment in segments if segment["start"] >= latest]
    for segment in (own for own in segments if own["start"] < latest):
        segment["end"] = min(segment["end"], latest)
        earliest = max(earliest, segment["end"] if segment["end"] < latest else segment["start"])
    group = [own for own in segments if own["start"] < latest == own["end"]] + group if group else []
    for i, segment in enumerate(group):
        segment["start"], segment["end"] = (earliest + (latest - earliest) * n / len(group) for n in (i, i + 1))


def _end(tokens: list[int], count: int) -> list[int]:
    return tokens[max(0, len(tokens) - count) :]


def _span(start: int, stop: int, reason: str) -> Span:
    return Span(start * HOP, stop * HOP, reason)


def fallback_reason(result: DecodingResult, options: WhisperOptions) -> str | None:
    """The figure beyond its threshold, for which the next temperature must be tried; None if the result is fine."""
    ratio, silence = options.compression_ratio_threshold, options.no_speech_threshold
    if options.logprob_threshold is not None and result.avg_logprob < options.logprob_threshold:
        return "avg_logprob" if silence is None or result.no_speech_prob <= silence else None  # silence: no fallback
    return "compression_ratio" if ratio is not None and result.compression_ratio > ratio else None


def is_silent(result: DecodingResult, options: WhisperOptions) -> bool:
    """Return True for a window without speech. Hot words alone are no evidence of speech, however probable: the prompt
    makes them so."""
    if options.no_speech_threshold is None or result.no_speech_prob <= options.no_speech_threshold:
        return False
    if options.logprob_threshold is None or result.avg_logprob <= options.logprob_threshold:
        return True
    return hallucination.echoes_hotwords(result.text, options.hotwords)


def split(
    result: DecodingResult, tokenizer: WhisperTokenizer, seek: int, count: int
) -> tuple[Segments, int, bool]:  # fmt: skip
    """Split the text of a window of `count` frames at mel frame `seek` into segments.

    Returns the segments, the frames to advance, and True if the text ends with a single timestamp, after which nobody
    speaks. Two timestamps in a row end one segment and begin the next; text after the last such pair is left to the
    next window."""
    tokens, begin = result.tokens, tokenizer.timestamp_begin
    times = [token >= begin for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]
    closed = times[-2:] == [False, True]
    if not cuts:
        last = next((token - begin for token in reversed(tokens) if token >= begin), 0)
        seconds = last * tokenizer.SECONDS_PER_TIMESTAMP if last else count * HOP / RATE
        return [_segment(result, tokenizer, seek, slice(None), 0.0, seconds)], count, closed
    if closed:
        cuts.append(len(tokens))
    segments = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        first, last = ((tokens[i] - begin) * tokenizer.SECONDS_PER_TIMESTAMP for i in (start, end - 1))
        segments.append(_segment(result, tokenizer, seek, slice(start, end), first, last))
    return segments, count if closed else (tokens[cuts[-1] - 1] - begin) * STRIDE, closed


def _segment(
    result: DecodingResult, tokenizer: WhisperTokenizer, seek: int, part: slice, start: float, end: float
) -> dict[str, Any]:
    """The tokens in `part`; `start` and `end`: seconds from the beginning of the window."""
    offset, tokens = float(seek * HOP / RATE), result.tokens[part]
    scored = {} if result.logprobs is None else {"token_logprobs": result.logprobs[part]}
    return {
        "seek": seek, "start": offset + start, "end": offset + end, "text": _text(tokenizer, tokens), "tokens": tokens,
        "temperature": result.temperature, "avg_logprob": result.avg_logprob,
        "compression_ratio": result.compression_ratio, "no_speech_prob": result.no_speech_prob, **scored,
    }  # fmt: skip


def _log_entry(
    window: WhisperWindow, result: DecodingResult, failure: str | None, silent: bool, prompt_tokens: int
) -> dict[str, Any]:
    return {
        "seek": window.seek, "start": window.seek / FRAMES_PER_SECOND,
        "end": (window.seek + window.count) / FRAMES_PER_SECOND, "language": window.language,
        "prompt_tokens": prompt_tokens, "temperature": result.temperature, "avg_logprob": result.avg_logprob,
        "compression_ratio": result.compression_ratio, "no_speech_prob": result.no_speech_prob,
        "fallback": failure, "no_speech": silent, "tokens": result.tokens, "text": result.text,
    }  # fmt: skip


def _text(tokenizer: WhisperTokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode([token for token in tokens if token < tokenizer.eot])
