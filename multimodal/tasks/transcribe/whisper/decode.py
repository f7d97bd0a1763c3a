"""Requests of Whisper streams to the model: encode, decode or align a window, or identify its language."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding import logits as processors
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search, best_row
from multimodal.errors import CheckpointError
from multimodal.inference import cuda_graphs
from multimodal.inference.modules import inference_mode
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import Whisper
from multimodal.tasks.transcribe.options import WhisperOptions
from multimodal.tasks.transcribe.results import compression_ratio
from multimodal.tasks.transcribe.whisper.language import language_probabilities
from multimodal.tasks.transcribe.whisper.words import alignment_heads, find_alignment
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.weights.folder import Checkpoint


class Encode(NamedTuple):
    """Encode mel frames [M F]; answered with features [T D]."""

    mel: Tensor


class Decode(NamedTuple):
    """Decode a window after the tokens of the `previous` text; answered with a `DecodingResult`."""

    features: Tensor
    previous: list[int]
    language: str | None
    temperature: float
    seed: int


class Align(NamedTuple):
    """Align text tokens with a window that holds `frames` mel frames of audio; answered with a list of WordTiming."""

    features: Tensor
    tokens: list[int]
    frames: int
    language: str | None


class Identify(NamedTuple):
    """Identify the language; answered with {code: probability} for every language of the model."""

    features: Tensor


class DecodingResult(NamedTuple):
    """One decoded window, as openai-whisper's DecodingResult."""

    tokens: list[int]
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    logprobs: list[float] | None = None  # of the tokens, without temperature and suppressed tokens

    @property
    def compression_ratio(self) -> float:
        return compression_ratio(self.text)


def model_and_tokenizer(checkpoint: Checkpoint) -> tuple[Whisper, WhisperTokenizer]:
    """Raises CheckpointError for a checkpoint without Whisper's vocabulary."""
    if not isinstance(checkpoint.tokenizer, WhisperTokenizer):
        raise CheckpointError(f"{checkpoint.source}: transcription needs Whisper's vocabulary, which it lacks")
    return checkpoint.model, checkpoint.tokenizer


def sampling_seed(seed: int, seek: int, temperature: float) -> int:
    """Seed for sampling a window, independent of earlier draws and of the batch."""
    return zlib.crc32(f"{seed} {seek} {temperature}".encode())


def server(checkpoint: Checkpoint, options: WhisperOptions) -> Callable[[list[Any]], list[Any]]:
    """Return a function that answers requests in order, batching those of one kind where it helps."""
    kinds = {Encode: encode, Decode: decode, Align: align, Identify: identify}

    @inference_mode()
    def serve(requests: list[Any]) -> list[Any]:
        groups: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault((type(request), getattr(request, "temperature", None)), []).append(i)
        answers: list[Any] = [None] * len(requests)
        for (kind, _), indices in groups.items():
            group = kinds[kind](checkpoint, options, [requests[i] for i in indices])
            for i, answer in zip(indices, group, strict=True):
                answers[i] = answer
        return answers

    return serve


def batch_key(request: Any) -> float | None:
    """Requests with the same key share a batch; None for requests that are quick to answer."""
    return request.temperature if isinstance(request, Decode) else None


def encode(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Encode]) -> list[Float[Tensor, "T D"]]:
    """Encode windows; on a CPU one by one, which is as fast and makes results bitwise independent of the batch."""
    encoder = checkpoint.model.encoder
    device = encoder.positions.device
    if device.type == "cpu":
        return [encoder(request.mel[None])[0] for request in requests]
    return list(encoder(torch.stack([request.mel for request in requests]).to(device)))


def decode(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Decode]) -> list[DecodingResult]:
    """Decode windows of one temperature as one batch. Results do not depend on the batch."""
    model, tokenizer = model_and_tokenizer(checkpoint)
    context, temperature = model.config.decoder.context, requests[0].temperature
    prompts, sot = [], []
    for request in requests:
        sot = tokenizer.sot_sequence(request.language, options.task, not options.without_timestamps)
        prompts.append([*([tokenizer.sot_prev, *request.previous] if request.previous else []), *sot])
    features = torch.stack([request.features for request in requests])
    ids, start = sampling.left_pad(prompts, features.device)
    limits = [min(options.sample_len or context // 2, context - len(prompt) + 1) for prompt in prompts]
    # one model and task: every start sequence has this length, and the tokens before it need no logits
    last = len(sot)
    step, cache = cuda_graphs.fast_step(model.decoder, features, start, ids.shape[1] + max(limits), last=last)
    if cache.start is not None and features.device.type == "cpu":
        step = _unpadded(step, model.decoder, features, prompts, last)
    step, no_speech_probs = _with_no_speech(step, -last, tokenizer.no_speech)
    common = {
        "eos": tokenizer.eot, "max_new": limits, "processors": window_processors(tokenizer, ids.shape[1], options),
    }  # fmt: skip
    copies = 1
    if temperature == 0 and options.beam_size is not None:
        beams = {"beams": options.beam_size, "patience": options.patience or 1.0}
        decoded = beam_search(step, ids, cache, length_penalty=options.length_penalty, **beams, **common)
    elif temperature == 0:
        decoded = sampling.greedy(step, ids, cache, **common)
    else:
        copies = options.best_of or 1
        generators = [torch.Generator(ids.device).manual_seed(request.seed) for request in requests]
        decoded = sampling.sample(
            step, ids, cache, temperature=temperature, generators=generators, copies=copies, **common
        )  # fmt: skip
    results = []
    for row, no_speech in enumerate(no_speech_probs):
        candidates = sampling.SampledTokens(*(part[row * copies : (row + 1) * copies] for part in decoded))
        tokens, logprob = best_row(candidates, options.length_penalty)
        text = tokenizer.decode([token for token in tokens if token < tokenizer.timestamp_begin]).strip()
        each = token_logprobs(model, prompts[row], tokens, features[row]) if options.token_logprobs else None
        results.append(DecodingResult(tokens, text, logprob / (len(tokens) + 1), no_speech, temperature, each))
    return results


def token_logprobs(model: Whisper, prompt: list[int], tokens: list[int], features: Float[Tensor, "T D"]) -> list[float]:
    """Log-probability of each token after those before it."""
    if not tokens:
        return []
    ids = torch.tensor([[*prompt, *tokens]], device=features.device)
    logits = model.decoder(ids[:, :-1], features[None], last=len(tokens))[0].float()
    return sampling.logprobs_of(logits, ids[0, -len(tokens) :]).tolist()


def _unpadded(
    step: sampling.Step, decoder: TextTransformer, features: Float[Tensor, "B T D"], prompts: list[list[int]], last: int
) -> sampling.Step:
    """Wrap a step so that its first call groups prompts of one length instead of padding them, which keeps each row
    bitwise independent of the batch."""

    def unpadded(ids: Tensor, cache: Cache) -> Tensor:
        if cache.length:
            return step(ids, cache)
        groups: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            groups.setdefault(len(prompt), []).append(i)
        logits, caches = [], []
        for rows in groups.values():
            caches.append(decoder.new_cache())
            own = torch.tensor([prompts[i] for i in rows], device="cpu")
            logits.append(decoder(own, features[rows], cache=caches[-1], last=last))
        order = torch.tensor([i for rows in groups.values() for i in rows], device="cpu").argsort()
        cache.join(caches, ids.shape[1], order)
        return torch.cat(logits)[order]

    return unpadded


def _with_no_speech(step: sampling.Step, position: int, no_speech: int) -> tuple[sampling.Step, list[float]]:
    """Wrap a step so that its first call appends each row's no-speech probability at `position` to the list."""
    probabilities: list[float] = []

    def wrapped(ids: Tensor, cache: Any) -> Tensor:
        logits = step(ids, cache)
        if not probabilities:
            probabilities.extend(processors.no_speech_probability(logits[:, position], no_speech).tolist())
        return logits

    return wrapped, probabilities


def window_processors(
    tokenizer: WhisperTokenizer, start: int, options: WhisperOptions
) -> list[sampling.LogitsProcessor]:
    """Logits processors for prompts of `start` tokens."""
    chosen = []
    if options.suppress_blank:
        chosen.append(processors.suppress_first([*tokenizer.encode(" "), tokenizer.eot], start))
    if never := tokenizer.suppressed_tokens(options.suppress_tokens):
        chosen.append(processors.suppress(never))
    if not options.without_timestamps:
        latest = options.max_initial_timestamp
        steps = round(latest / tokenizer.SECONDS_PER_TIMESTAMP) if latest else None
        begin = tokenizer.timestamp_begin
        chosen.append(processors.timestamps(begin, tokenizer.eot, tokenizer.no_timestamps, start, steps))
    return chosen


def align(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Align]) -> list[list[WordTiming]]:
    (model, tokenizer), heads = model_and_tokenizer(checkpoint), alignment_heads(checkpoint)
    return [
        find_alignment(model, tokenizer, r.features, r.tokens, r.frames, r.language, options.task, heads=heads)
        for r in requests
    ]


def identify(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Identify]) -> list[dict[str, float]]:
    return language_probabilities(
        *model_and_tokenizer(checkpoint), torch.stack([request.features for request in requests])
    )  # fmt: skip
