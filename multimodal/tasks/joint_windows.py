"""The joint CTC/attention model over a recording of any length: windows cut at quiet places, decoded in batches."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal import search
from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import padding
from multimodal.ctc import ctc_paths
from multimodal.ctc_prefix import PrefixScorer
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.seq2seq import JointConformer
from multimodal.tasks.whisper_windows import compression_ratio
from multimodal.tokens.mel import HOP, RATE, filterbank_batch
from multimodal.tokens.text import Tokenizer
from multimodal.weights.folder import Checkpoint

LONGEST = 20 * RATE  # samples of a window; attention grows with its square
SILENCE = 0.5 / 32768  # half a step of 16-bit sound: below it there is nothing to hear


class JointBeam(NamedTuple):
    """`ctc_weight` of the CTC score, 0.3 as in Watanabe et al. 2017. `length_penalty`: see `search.beam`."""

    size: int = 10
    ctc_weight: float = 0.3
    length_penalty: float | None = 0.0


class Heard(NamedTuple):
    """What was decoded in one window; `span` in encoder frames, None without a token."""

    ids: list[int]
    span: tuple[int, int] | None
    avg_logprob: float
    no_speech_prob: float


def cut_windows(chunks: Iterable[Float[Tensor, "_"]], longest: int = LONGEST) -> Iterator[tuple[int, Tensor]]:
    """(first sample, samples) of windows that join up to the whole recording, none above `longest` samples.

    A longer recording is cut in the second half of a window, where 0.3 s around are the quietest. Only about
    one window and one chunk are held."""
    held, start = torch.zeros(0), 0
    for chunk in chunks:
        held = torch.cat([held, chunk])
        while len(held) > longest:
            cut = quietest(held[:longest])
            yield start, held[:cut].clone()
            held, start = held[cut:].clone(), start + cut
    if len(held):
        yield start, held


def quietest(wave: Float[Tensor, "T"]) -> int:
    """The sample in the second half around which 0.3 s have the least energy."""
    half = len(wave) // 2
    energy = wave[half : half + (len(wave) - half) // HOP * HOP].square().unflatten(0, (-1, HOP)).mean(1)
    around = min(30, len(energy))
    smooth = energy.unfold(0, around, 1).mean(-1)
    return half + (int(smooth.argmin()) + around // 2) * HOP + HOP // 2


def transcribe_windows(
    chunks: Iterable[Float[Tensor, "_"]], checkpoint: Checkpoint, beam_size: int | None, batch_size: int
) -> list[dict[str, Any]]:
    """Segments of a recording at 16 kHz: one for each window in which something was said.

    `avg_logprob` is that of the CTC path a token (with `beam_size` above 1 the joint score a token), the end
    counted as one. `no_speech_prob` is the CTC probability that the window's text is empty."""
    segments, batch = [], []
    for window in cut_windows(chunks):
        batch.append(window)
        if len(batch) == batch_size:
            segments += _segments(batch, checkpoint, beam_size)
            batch = []
    segments += _segments(batch, checkpoint, beam_size)
    return [{"id": number, **segment} for number, segment in enumerate(segments)]


def _segments(batch: list[tuple[int, Tensor]], checkpoint: Checkpoint, beam_size: int | None) -> list[dict[str, Any]]:
    audible = [(start, wave) for start, wave in batch if wave.abs().max() > SILENCE]
    if not audible:
        return []
    heard = decode_windows([wave for _, wave in audible], checkpoint, beam_size)
    seconds = checkpoint.model.config.encoder.subsample * HOP / RATE
    segments = []
    for (start, wave), found in zip(audible, heard, strict=True):
        text = _tokenizer(checkpoint).decode(found.ids).strip()
        if not text or found.span is None:
            continue
        first, last = start / RATE + found.span[0] * seconds, start / RATE + found.span[1] * seconds
        segments.append({
            "seek": start // HOP, "start": first, "end": min(last, (start + len(wave)) / RATE), "text": text,
            "tokens": found.ids, "temperature": 0.0, "avg_logprob": found.avg_logprob,
            "compression_ratio": compression_ratio(text), "no_speech_prob": found.no_speech_prob,
        })  # fmt: skip
    return segments


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.tokenizer is None or checkpoint.tokenizer.vocab_size != checkpoint.model.config.vocabulary:
        raise CheckpointError(f"{checkpoint.source}: no tokenizer of {checkpoint.model.config.vocabulary} ids with it")
    return checkpoint.tokenizer


@torch.inference_mode()
def decode_windows(waves: list[Tensor], checkpoint: Checkpoint, beam_size: int | None = None) -> list[Heard]:
    """CTC best path of each waveform, or a joint beam search with `beam_size` above 1. Batched = alone."""
    model: JointConformer = checkpoint.model
    if beam_size is not None and beam_size > 1 and model.decoder is None:
        raise UsageError(f"beam_size {beam_size}: {checkpoint.source} has no attention decoder, only CTC")
    device = model.ctc.weight.device
    features, lengths = filterbank_batch([wave.to(device) for wave in waves], model.config.encoder.bands)
    frames, valid, lengths = model.encode(features, lengths)
    logprobs = model.ctc_logits(frames).float().log_softmax(-1)
    best = logprobs.amax(-1).masked_fill(~valid, 0).sum(1).tolist()
    silent = logprobs[..., model.config.blank].masked_fill(~valid, 0).sum(1).exp().tolist()
    paths = ctc_paths(logprobs, lengths, model.config.blank)
    found = [(path.ids, score) for path, score in zip(paths, best, strict=True)]
    # a text longer than the decoder's context stays the CTC's, so that nothing is lost
    if beam_size is not None and beam_size > 1:
        rows = [i for i, (ids, _) in enumerate(found) if ids and len(ids) + 2 <= model.decoder.config.context]
        if rows:
            decoded = joint_beam(frames[rows], logprobs[rows], lengths[rows], checkpoint, JointBeam(beam_size))
            for row, ids, score in zip(rows, *decoded, strict=True):
                found[row] = ids, score
    heard = []
    for (ids, score), path, empty in zip(found, paths, silent, strict=True):
        span = (path.spans[0][0], path.spans[-1][1]) if path.spans else None
        heard.append(Heard(ids, span, score / (len(ids) + 1), empty))
    return heard


@torch.inference_mode()
def joint_beam(
    frames: Float[Tensor, "B T D"], logprobs: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"],
    checkpoint: Checkpoint, options: JointBeam,
) -> search.Decoded:  # fmt: skip
    """Beam search of the attention decoder with CTC prefix scores, of which `lengths` frames are real (Watanabe et
    al. 2017). It ends when no going text can overtake the best ended one: a stop at the first `size` endings, as
    openai-whisper has it, fills them with short texts while a sure model still spells its answer.

    Weight 0 is the decoder alone, weight 1 the CTC alone, which then is a prefix beam search."""
    model, tokenizer = checkpoint.model, _tokenizer(checkpoint)
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise CheckpointError(f"{checkpoint.source}: its tokenizer has no start and end ids, which a beam needs")
    prompt = torch.full((len(frames), 1), tokenizer.bos_id, device=frames.device)
    room, scorer = logprobs.shape[1] + 1, None  # CTC writes at most one token a frame
    if options.ctc_weight:
        scorer = PrefixScorer(logprobs, lengths, tokenizer.eos_id, 1, options.ctc_weight)
    if options.ctc_weight == 1:
        step, cache = partial(_indifferent, model.config.vocabulary), Cache(0)
    else:
        room = min(model.decoder.config.context - 1, room)
        step, cache = (
            search.over_source(model.attend, frames, padding(lengths, frames.shape[1])),
            model.decoder.new_cache(),
        )
    return search.beam(
        step, prompt, cache, eos=tokenizer.eos_id, max_new=room, beams=options.size, patience=math.inf,
        length_penalty=options.length_penalty, scorer=scorer,
    )  # fmt: skip


def _indifferent(vocabulary: int, ids: Int[Tensor, "R T"], cache: Cache) -> Float[Tensor, "R T V"]:
    """Every next token is as good: the scorer decides."""
    return torch.zeros(*ids.shape, vocabulary, device=ids.device)
