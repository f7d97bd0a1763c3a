"""Whisper over a recording: windows of 30 s, each starting where the last one's text ended (openai/whisper)."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal import rules, search
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.seq2seq import SpeechToText
from multimodal.tokens.mel import HOP, RATE, log_mel, pad_or_trim
from multimodal.tokens.text import WhisperTokenizer
from multimodal.weights.folder import Checkpoint

STRIDE = 2  # mel frames a position of the encoder, and so a step of the time tokens


@dataclass(frozen=True)
class WhisperOptions:
    """openai-whisper's options, with its names and defaults. `seed` makes sampled fallbacks repeatable."""

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    temperature: float | Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    beam_size: int | None = None
    best_of: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    without_timestamps: bool = False
    max_initial_timestamp: float | None = 1.0
    suppress_blank: bool = True
    suppress_tokens: str | Sequence[int] | None = "-1"
    sample_len: int | None = None
    seed: int = 0


class Result(NamedTuple):
    """One decoded window, as openai-whisper's DecodingResult."""

    tokens: list[int]
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float

    @property
    def compression_ratio(self) -> float:
        return compression_ratio(self.text)


def compression_ratio(text: str) -> float:
    """UTF-8 size over its zlib size: above about 2.4 a text repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@torch.inference_mode()
def transcribe_windows(wave: Float[Tensor, "T"], checkpoint: Checkpoint, options: WhisperOptions) -> dict[str, Any]:
    """`text`, `segments` and `language` of a recording at 16 kHz."""
    model, tokenizer = _parts(checkpoint)
    size = STRIDE * model.config.encoder.context
    device = model.encoder.positions.device
    mel = log_mel(F.pad(wave, (0, size * HOP)), model.config.encoder.bands)  # silence after the end, to cut from
    content = mel.shape[-1] - size
    if options.language is None:
        first = model.encoder(mel[None, :, :size].to(device))
        language = "en" if not tokenizer.multilingual else detect_language(checkpoint, first)
        options = replace(options, language=language)
    prompt = tokenizer.encode(" " + options.initial_prompt.strip()) if options.initial_prompt else []
    tokens, segments, seek, reset = list(prompt), [], 0, 0
    generator = torch.Generator().manual_seed(options.seed)
    while seek < content:
        count = min(size, content - seek)
        window = pad_or_trim(mel[:, seek : seek + count], size)[None].to(device)
        result = decode_with_fallback(checkpoint, model.encoder(window), tokens[reset:], options, generator)
        if _is_silent(result, options):
            seek += count
            continue
        found, advance = split(result, tokenizer, seek, count)
        segments += [{"id": len(segments) + i, **segment} for i, segment in enumerate(found)]
        tokens += [token for segment in found for token in segment["tokens"]]
        seek += advance
        if not options.condition_on_previous_text or result.temperature > 0.5:
            reset = len(tokens)
    return {"text": tokenizer.decode(tokens[len(prompt) :]), "segments": segments, "language": options.language}


def _parts(checkpoint: Checkpoint) -> tuple[SpeechToText, WhisperTokenizer]:
    if not isinstance(checkpoint.tokenizer, WhisperTokenizer):
        raise CheckpointError(f"{checkpoint.source}: its vocabulary is not one of Whisper's, so it cannot transcribe")
    return checkpoint.model, checkpoint.tokenizer


@torch.inference_mode()
def detect_language(checkpoint: Checkpoint, features: Float[Tensor, "1 T D"]) -> str:
    """Code of the most probable language, from the logits after <|startoftranscript|>."""
    model, tokenizer = _parts(checkpoint)
    start = torch.tensor([[tokenizer.sot]], device=features.device)
    logits = model.decoder(start, features)[0, 0, list(tokenizer.language_tokens)]
    return tokenizer.languages[int(logits.argmax())]


def decode_with_fallback(
    checkpoint: Checkpoint, features: Float[Tensor, "1 T D"], previous: list[int], options: WhisperOptions,
    generator: torch.Generator,
) -> Result:  # fmt: skip
    """The first temperature whose text neither repeats itself nor is improbable, else the last one's."""
    temperatures = options.temperature if isinstance(options.temperature, Sequence) else [options.temperature]
    if not temperatures:
        raise UsageError(f"temperature: needs at least one value ({options.temperature!r})")
    for temperature in temperatures:
        result = decode_window(checkpoint, features, previous, options, temperature, generator)
        if not _needs_fallback(result, options):
            break
    return result


def _improbable(result: Result, options: WhisperOptions) -> bool:
    return options.logprob_threshold is not None and result.avg_logprob < options.logprob_threshold


def _needs_fallback(result: Result, options: WhisperOptions) -> bool:
    ratio, silence = options.compression_ratio_threshold, options.no_speech_threshold
    if _improbable(result, options):
        return silence is None or result.no_speech_prob <= silence  # no fallback in silence
    return ratio is not None and result.compression_ratio > ratio


def _is_silent(result: Result, options: WhisperOptions) -> bool:
    if options.no_speech_threshold is None or result.no_speech_prob <= options.no_speech_threshold:
        return False
    return options.logprob_threshold is None or result.avg_logprob <= options.logprob_threshold


@torch.inference_mode()
def decode_window(
    checkpoint: Checkpoint, features: Float[Tensor, "1 T D"], previous: list[int], options: WhisperOptions,
    temperature: float, generator: torch.Generator,
) -> Result:  # fmt: skip
    """Text tokens and time tokens of one window, given the tokens of the text before it."""
    model, tokenizer = _parts(checkpoint)
    context = model.config.decoder.context
    kept = [tokenizer.sot_prev, *previous[-(context // 2 - 1) :]] if previous else []
    prompt = [*kept, *tokenizer.sot_sequence(options.language, options.task, not options.without_timestamps)]
    room = min(options.sample_len or context // 2, context - len(prompt) + 1)
    step, silence = _watched(search.over_source(model.decoder, features), len(kept), tokenizer.no_speech)
    common = {"eos": tokenizer.eot, "max_new": room, "rules": window_rules(tokenizer, len(prompt), options)}
    ids, cache = torch.tensor([prompt], device=features.device), model.decoder.new_cache()
    if temperature == 0 and options.beam_size is not None:
        beams = {"beams": options.beam_size, "patience": options.patience or 1.0}
        found = search.beam(step, ids, cache, length_penalty=options.length_penalty, **beams, **common)
    elif temperature == 0:
        found = search.greedy(step, ids, cache, **common)
    else:
        ids = ids.repeat(options.best_of or 1, 1)
        found = search.sample(step, ids, cache, temperature=temperature, generator=generator, **common)
    tokens, logprob = search.best(found, options.length_penalty)
    text = tokenizer.decode([token for token in tokens if token < tokenizer.timestamp_begin]).strip()
    return Result(tokens, text, logprob / (len(tokens) + 1), silence[0], float(temperature))


def _watched(step: search.Step, position: int, no_speech: int) -> tuple[search.Step, list[float]]:
    """The step, and a list in which its first call leaves the no-speech probability after `position`."""
    seen: list[float] = []

    def watched(ids: Tensor, cache: Any) -> Tensor:
        logits = step(ids, cache)
        if not seen:
            seen.append(rules.no_speech_probability(logits[:1, position], no_speech).item())
        return logits

    return watched, seen


def window_rules(tokenizer: WhisperTokenizer, start: int, options: WhisperOptions) -> list[search.Rule]:
    """What may not come next, for a prompt of `start` ids."""
    listed = options.suppress_tokens or ()
    chosen = [int(token) for token in (listed.split(",") if isinstance(listed, str) else listed)]
    found = []
    if options.suppress_blank:
        found.append(rules.suppress_first([*tokenizer.encode(" "), tokenizer.eot], start))
    if chosen:  # as openai-whisper: without a list even the control tokens stay allowed
        never = [token for token in chosen if token >= 0] + ([*tokenizer.non_speech_tokens()] if -1 in chosen else [])
        t = tokenizer
        never += [t.transcribe, t.translate, t.sot, t.sot_prev, t.sot_lm, t.no_speech]
        found.append(rules.suppress(never))
    if not options.without_timestamps:
        latest = options.max_initial_timestamp
        steps = round(latest / tokenizer.SECONDS_PER_TIMESTAMP) if latest else None
        begin = tokenizer.timestamp_begin
        found.append(rules.timestamps(begin, tokenizer.eot, tokenizer.no_timestamps, start, steps))
    return found


def split(result: Result, tokenizer: WhisperTokenizer, seek: int, count: int) -> tuple[list[dict[str, Any]], int]:
    """Segments of a window that starts at mel frame `seek` and holds `count` frames, and how far to go on.

    Between two time tokens in a row one segment ends and the next begins; text after the last such pair is left
    to the next window."""
    tokens, begin = result.tokens, tokenizer.timestamp_begin
    times = [token >= begin for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]
    closed = times[-2:] == [False, True]  # one time at the end: no speech after it
    if not cuts:
        last = next((token - begin for token in reversed(tokens) if token >= begin), 0)
        seconds = last * tokenizer.SECONDS_PER_TIMESTAMP if last else count * HOP / RATE
        return [_segment(result, tokenizer, seek, tokens, 0.0, seconds)], count
    if closed:
        cuts.append(len(tokens))
    segments = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        part = tokens[start:end]
        first, last = ((part[i] - begin) * tokenizer.SECONDS_PER_TIMESTAMP for i in (0, -1))
        segments.append(_segment(result, tokenizer, seek, part, first, last))
    return segments, count if closed else (tokens[cuts[-1] - 1] - begin) * STRIDE


def _segment(
    result: Result, tokenizer: WhisperTokenizer, seek: int, tokens: list[int], start: float, end: float
) -> dict[str, Any]:
    """`start` and `end` in seconds from the window's begin. One without text or duration is emptied."""
    offset = float(seek * HOP / RATE)
    text = tokenizer.decode([token for token in tokens if token < tokenizer.eot])
    empty = start == end or not text.strip()
    return {
        "seek": seek, "start": offset + start, "end": offset + end, "text": "" if empty else text,
        "tokens": [] if empty else tokens, "temperature": result.temperature, "avg_logprob": result.avg_logprob,
        "compression_ratio": result.compression_ratio, "no_speech_prob": result.no_speech_prob,
    }  # fmt: skip
