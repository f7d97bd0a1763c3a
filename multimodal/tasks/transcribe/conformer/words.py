"""Word timings of a CTC transcription, by forced alignment of its tokens (Graves et al. 2006)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.transcribe.word_times import WordTiming, split_on_spaces, spread
from multimodal.tokens.text.hub.recognizers import LetterTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer

# Frames by which CTC tokens lag: 0.02 s in fluent speech (espeak-ng, whose word times are known)
LAG = 0.5
# Seconds of blanks within a word that do not occur in speech: the tokens before them were emitted too early, as
# happens at the beginning of a window. 0.4 to 0.6 s work equally well.
LONGEST_BLANK = 0.5


def ctc_words(
    logprobs: Float[Tensor, "T W"], ids: Sequence[int], tokenizer: Tokenizer, blank: int, frame_seconds: float
) -> list[WordTiming]:
    """Align the words of `ids`; times in seconds from the first frame, probabilities averaged over tokens, those of
    letters not over spaces.

    A text without a CTC path (more tokens and repeats than frames, or ids outside the output) is spread evenly over
    the frames, with probability 0."""
    words, spans = split_on_spaces(tokenizer, ids), align_tokens(logprobs, ids, blank)
    if spans is None:
        return spread(words, len(logprobs) * frame_seconds)
    timings, first = [], 0
    for text, part in words:
        own = spans[first : first + len(part)]
        first += len(part)
        each = tuple(value for _, _, value in own)
        if isinstance(tokenizer, LetterTokenizer):
            own = [span for token, span in zip(part, own, strict=True) if not tokenizer.is_space(token)] or own
        probability = sum(value for _, _, value in own) / len(own)
        while len(own) > 1 and (own[1][0] - own[0][1]) * frame_seconds > LONGEST_BLANK:
            own = own[1:]
        start, end = (max(0.0, (frame - LAG) * frame_seconds) for frame in (own[0][0], own[-1][1]))
        timings.append(WordTiming(text, part, start, end, probability, each))
    return timings


def align_tokens(logprobs: Float[Tensor, "T W"], ids: Sequence[int], blank: int) -> list[tuple[int, int, float]] | None:
    """(first frame, end frame, mean probability) of each token on the likeliest CTC path; None without a path."""
    repeats = sum(a == b for a, b in pairwise(ids))
    if len(ids) + repeats > len(logprobs) or any(not 0 <= i < logprobs.shape[1] or i == blank for i in ids):
        return None
    if not ids:
        return []
    from torchaudio.functional import forced_align

    path, scores = forced_align(
        logprobs.float().cpu()[None], torch.tensor([ids], dtype=torch.int32, device="cpu"), blank=blank
    )
    spans: list[tuple[int, int, float]] = []
    last, probabilities = blank, scores[0].exp().tolist()
    for frame, token in enumerate(path[0].tolist()):
        if token != blank and token == last:
            spans[-1] = (spans[-1][0], frame + 1, spans[-1][2] + probabilities[frame])
        elif token != blank:
            spans.append((frame, frame + 1, probabilities[frame]))
        last = token
    return [(start, end, total / (end - start)) for start, end, total in spans]
