"""What Whisper's streams ask of the model: windows encoded, decoded, aligned, or heard for their language."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding import logits as rules
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam, best
from multimodal.errors import CheckpointError
from multimodal.inference import cuda_graphs
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import SpeechToText
from multimodal.tasks.transcribe.whisper.options import WhisperOptions
from multimodal.tokens.text.vocabulary import WhisperTokenizer
from multimodal.weights.folder import Checkpoint


class Encode(NamedTuple):
    """A window of mel frames [M F]. Answer: features [T D]."""

    mel: Tensor


class Decode(NamedTuple):
    """The text of a window, given the tokens of the text before it. Answer: a `Result`."""

    features: Tensor
    previous: list[int]
    language: str | None
    temperature: float
    seed: int


class Align(NamedTuple):
    """The words of text tokens, of which `frames` mel frames of the window are sound. Answer: a list of WordTiming."""

    features: Tensor
    tokens: list[int]
    frames: int
    language: str | None


class Identify(NamedTuple):
    """Answer: {code: probability} of every language that the model knows."""

    features: Tensor


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


def parts(checkpoint: Checkpoint) -> tuple[SpeechToText, WhisperTokenizer]:
    """Raises CheckpointError for a model without Whisper's vocabulary."""
    if not isinstance(checkpoint.tokenizer, WhisperTokenizer):
        raise CheckpointError(f"{checkpoint.source}: its vocabulary is not one of Whisper's, so it cannot transcribe")
    return checkpoint.model, checkpoint.tokenizer


def draw_seed(seed: int, seek: int, temperature: float) -> int:
    """The seed of a window's draws: it depends on nothing that was drawn before, nor on what runs beside."""
    return zlib.crc32(f"{seed} {seek} {temperature}".encode())


def server(checkpoint: Checkpoint, options: WhisperOptions) -> Callable[[list[Any]], list[Any]]:
    """Answers to a list of requests, in their order; those of one kind are one batch where that is of use."""
    kinds = {Encode: encode, Decode: decode, Align: align, Identify: identify}

    @torch.inference_mode()
    def serve(requests: list[Any]) -> list[Any]:
        groups: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault((type(request), getattr(request, "temperature", None)), []).append(i)
        answers: list[Any] = [None] * len(requests)
        for (kind, _), places in groups.items():
            found = kinds[kind](checkpoint, options, [requests[i] for i in places])
            for i, answer in zip(places, found, strict=True):
                answers[i] = answer
        return answers

    return serve


def batch_key(request: Any) -> float | None:
    """What must be alike in the requests of one batch of texts; None: quick to answer, nothing to wait for."""
    return request.temperature if isinstance(request, Decode) else None


def encode(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Encode]) -> list[Float[Tensor, "T D"]]:
    """On a processor one by one, which is as fast there and gives the same bits whatever the batch."""
    encoder = checkpoint.model.encoder
    device = encoder.positions.device
    if device.type == "cpu":
        return [encoder(request.mel[None])[0] for request in requests]
    return list(encoder(torch.stack([request.mel for request in requests]).to(device)))


def decode(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Decode]) -> list[Result]:
    """Windows of one temperature as one batch, each with the result that it has alone."""
    model, tokenizer = parts(checkpoint)
    context, temperature = model.config.decoder.context, requests[0].temperature
    most, ends, prompts = options.sample_len or context // 2, [], []
    for request in requests:
        kept = request.previous[-(context // 2 - 1) :]
        sot = tokenizer.sot_sequence(request.language, options.task, not options.without_timestamps)
        prompts.append([*([tokenizer.sot_prev, *kept] if kept else []), *sot])
        ends.append(len(sot))
    features = torch.stack([request.features for request in requests])
    ids, start = sampling.left_padded(prompts, features.device)
    limits = [min(most, context - len(prompt) + 1) for prompt in prompts]
    # all start sequences are equally long: one model, one task; what is before them needs no logits
    step, cache = cuda_graphs.fast_step(model.decoder, features, start, ids.shape[1] + max(limits), last=ends[0])
    if cache.start is not None and features.device.type == "cpu":
        step = _unpadded(step, model.decoder, features, prompts, ends[0])
    step, silence = _watched(step, -ends[0], tokenizer.no_speech)
    common = {
        "eos": tokenizer.eot, "max_new": limits, "rules": window_rules(tokenizer, ids.shape[1], options),
    }  # fmt: skip
    copies = 1
    if temperature == 0 and options.beam_size is not None:
        beams = {"beams": options.beam_size, "patience": options.patience or 1.0}
        found = beam(step, ids, cache, length_penalty=options.length_penalty, **beams, **common)
    elif temperature == 0:
        found = sampling.greedy(step, ids, cache, **common)
    else:
        copies = options.best_of or 1
        chance = [torch.Generator().manual_seed(request.seed) for request in requests]
        found = sampling.sample(step, ids, cache, temperature=temperature, generators=chance, copies=copies, **common)
    rows = [sampling.Decoded(*(part[i : i + copies] for part in found)) for i in range(0, len(found.ids), copies)]
    chosen = [best(row, options.length_penalty) for row in rows]
    return [_result(tokenizer, *row, silent, temperature) for row, silent in zip(chosen, silence, strict=True)]


def _result(tokenizer: WhisperTokenizer, ids: list[int], logprob: float, silent: float, temperature: float) -> Result:
    text = tokenizer.decode([token for token in ids if token < tokenizer.timestamp_begin]).strip()
    return Result(ids, text, logprob / (len(ids) + 1), silent, temperature)


def _unpadded(
    step: sampling.Step, decoder: TextTransformer, features: Float[Tensor, "B T D"], prompts: list[list[int]], last: int
) -> sampling.Step:
    """The step, whose first call takes prompts of one length together and without padding, so that each has the bits
    that it has alone."""

    def unpadded(ids: Tensor, cache: Cache) -> Tensor:
        if cache.length:
            return step(ids, cache)
        groups: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            groups.setdefault(len(prompt), []).append(i)
        logits, made = [], []
        for rows in groups.values():
            made.append(decoder.new_cache())
            own = torch.tensor([prompts[i] for i in rows])
            logits.append(decoder(own, features[rows], cache=made[-1], last=last))
        order = torch.tensor([i for rows in groups.values() for i in rows]).argsort()
        cache.join(made, ids.shape[1], order)
        return torch.cat(logits)[order]

    return unpadded


def _watched(step: sampling.Step, position: int, no_speech: int) -> tuple[sampling.Step, list[float]]:
    """The step, and a list in which its first call leaves each row's no-speech probability after `position`."""
    seen: list[float] = []

    def watched(ids: Tensor, cache: Any) -> Tensor:
        logits = step(ids, cache)
        if not seen:
            seen.extend(rules.no_speech_probability(logits[:, position], no_speech).tolist())
        return logits

    return watched, seen


def window_rules(tokenizer: WhisperTokenizer, start: int, options: WhisperOptions) -> list[sampling.Rule]:
    """What may not come next, for prompts of `start` ids."""
    found = []
    if options.suppress_blank:
        found.append(rules.suppress_first([*tokenizer.encode(" "), tokenizer.eot], start))
    if listed := options.suppress_tokens:  # as openai-whisper: without a list even the control tokens stay allowed
        t = tokenizer
        never = [token for token in listed if token >= 0] + ([*t.non_speech_tokens()] if -1 in listed else [])
        never += [t.transcribe, t.translate, t.sot, t.sot_prev, t.sot_lm, t.no_speech]
        found.append(rules.suppress(never))
    if not options.without_timestamps:
        latest = options.max_initial_timestamp
        steps = round(latest / tokenizer.SECONDS_PER_TIMESTAMP) if latest else None
        begin = tokenizer.timestamp_begin
        found.append(rules.timestamps(begin, tokenizer.eot, tokenizer.no_timestamps, start, steps))
    return found


def align(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Align]) -> list[list[Any]]:
    from multimodal.tasks.transcribe.whisper.words import alignment_heads, find_alignment

    (model, tokenizer), heads = parts(checkpoint), alignment_heads(checkpoint)
    return [
        find_alignment(model, tokenizer, r.features, r.tokens, r.frames, r.language, options.task, heads)
        for r in requests
    ]


def identify(checkpoint: Checkpoint, options: WhisperOptions, requests: Sequence[Identify]) -> list[dict[str, float]]:
    from multimodal.tasks.transcribe.whisper.language import language_probabilities

    return language_probabilities(*parts(checkpoint), torch.stack([request.features for request in requests]))
