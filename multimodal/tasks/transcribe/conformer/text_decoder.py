"""Transcription by an encoder-decoder without CTC (Moonshine): greedy or beam search, without times of words."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.errors import UsageError
from multimodal.models.speech.moonshine import Moonshine
from multimodal.tasks.transcribe.whisper.options import HybridOptions
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.text.tokenizer import Tokenizer

# the most that Moonshine's authors let it write (config of `generate` on its cards); a loop is longer
TOKENS_PER_SECOND = 6.5


def check_options(source: str, options: HybridOptions) -> None:
    """Raise UsageError for what needs the frame of each token."""
    for name in ("word_timestamps", "lm"):
        if getattr(options, name):
            raise UsageError(f"{source} has no CTC, which this needs", argument=name)


def decode_texts(
    model: Moonshine, encoded: Sequence[Float[Tensor, "_ D"]], tokenizer: Tokenizer, beams: int
) -> list[tuple[list[int], list[WordTiming], float, float]]:
    """Ids, the text as one word over the window, average log-probability with the end and probability of no text."""
    return [_decoded(model, frames, tokenizer, beams) for frames in encoded]


def _decoded(
    model: Moonshine, frames: Float[Tensor, "T D"], tokenizer: Tokenizer, beams: int
) -> tuple[list[int], list[WordTiming], float, float]:
    config, seconds = model.config, len(frames) * model.config.encoder.seconds
    step = sampling.cross_attention_step(model.decode, frames[None])
    prompt = torch.tensor([[config.start_id]], device=frames.device)
    limits = {"eos": config.end_id, "max_new": math.ceil(seconds * TOKENS_PER_SECOND)}
    if beams == 1:
        found = sampling.greedy(step, prompt, model.decoder.new_cache(), **limits)
    else:
        found = beam_search(step, prompt, model.decoder.new_cache(), beams=beams, **limits)
    ids, score = found.ids[0], found.logprobs[0] / (len(found.ids[0]) + 1)
    empty = model.decode(prompt, frames[None])[0, -1].float().softmax(-1)[config.end_id]
    word = WordTiming(f" {tokenizer.decode(ids).strip()}", ids, 0.0, seconds, math.exp(score))
    return ids, [word] if word.word.strip() else [], score, float(empty)
