"""Times of the words of a CTC transcription, by forced alignment of its tokens (Graves et al. 2006)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.models.whisper import JointConformer
from multimodal.tasks.transcribe.word_times import Words, WordTiming, on_sound, split_on_unicode, spread, wave_level
from multimodal.tokens.audio.log_mel import HOP, RATE, filterbank
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.folder import Checkpoint

# Of a frame: in speech without pauses tokens came 0.02 s late, half a frame (espeak-ng, whose word times are known).
LATE = 0.5
# Seconds of blanks within a word that no speech has: what stands before them was written before it was heard. Words
# at a window's begin have it, and 0.4 to 0.6 s do as well.
UNHEARD = 0.5


def ctc_words(
    logprobs: Float[Tensor, "T W"], ids: Sequence[int], tokenizer: Tokenizer, blank: int, seconds_a_frame: float
) -> list[WordTiming]:
    """Every word of the text of `ids` with start and end in seconds from the first frame, and the mean probability of
    its tokens. A word begins with a space.

    A text that has no CTC path (more tokens and repeats than frames, or ids that the output has not) is spread evenly
    over the frames, with probability 0. `on_sound` then holds the times against the sound."""
    words, seconds = split_to_words(tokenizer, ids), len(logprobs) * seconds_a_frame
    spans = align_tokens(logprobs, ids, blank)
    if spans is None:
        return spread(words, 0.0, seconds)
    found, first = [], 0
    for text, part in words:
        own = spans[first : first + len(part)]
        first += len(part)
        probability = sum(value for _, _, value in own) / len(own)
        while len(own) > 1 and (own[1][0] - own[0][1]) * seconds_a_frame > UNHEARD:
            own = own[1:]
        start, end = (max(0.0, (frame - LATE) * seconds_a_frame) for frame in (own[0][0], own[-1][1]))
        found.append(WordTiming(text, part, start, end, probability))
    return found


def split_to_words(tokenizer: Tokenizer, ids: Sequence[int]) -> Words:
    """(word, tokens) of a text whose words begin with a space."""
    words: Words = []
    for text, part in split_on_unicode(tokenizer, ids):
        if text.startswith(" ") or not words:
            words.append((text, part))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + part)
    return words


def align_tokens(logprobs: Float[Tensor, "T W"], ids: Sequence[int], blank: int) -> list[tuple[int, int, float]] | None:
    """(first frame, past the last, mean probability) of each token on the likeliest CTC path; None where none is."""
    ids = [int(token) for token in ids]
    repeats = sum(a == b for a, b in pairwise(ids))
    if len(ids) + repeats > len(logprobs) or any(not 0 <= i < logprobs.shape[1] or i == blank for i in ids):
        return None
    if not ids:
        return []
    from torchaudio.functional import forced_align

    path, scores = forced_align(logprobs.float().cpu()[None], torch.tensor([ids], dtype=torch.int32), blank=blank)
    spans: list[tuple[int, int, float]] = []
    last, probabilities = blank, scores[0].exp().tolist()
    for frame, token in enumerate(path[0].tolist()):
        if token != blank and token == last:
            spans[-1] = (spans[-1][0], frame + 1, spans[-1][2] + probabilities[frame])
        elif token != blank:
            spans.append((frame, frame + 1, probabilities[frame]))
        last = token
    return [(start, end, total / (end - start)) for start, end, total in spans]


@torch.inference_mode()
def align_text(wave: Float[Tensor, "T"], text: str, checkpoint: Checkpoint) -> list[WordTiming]:
    """Where the words of a known text are in a recording at 16 kHz, by a joint model's CTC, held against the sound.

    The text is to be written as the model writes it. Raises UsageError for another model or one without a tokenizer."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not isinstance(model, JointConformer) or tokenizer is None:
        raise UsageError(f"model {checkpoint.source}: is no CTC model with a tokenizer, which an alignment needs")
    features = filterbank(wave.to(model.ctc.weight.device), model.config.encoder.bands)[None]
    frames, _, _ = model.encode(features, torch.tensor([features.shape[1]], device=features.device))
    logprobs = model.ctc_logits(frames)[0].float().log_softmax(-1)
    seconds = model.config.encoder.subsample * HOP / RATE
    words = ctc_words(logprobs, tokenizer.encode(" " + text.strip()), tokenizer, model.config.blank, seconds)
    return on_sound(words, wave_level(wave))
