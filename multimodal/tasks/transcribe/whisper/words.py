"""Word timings of a Whisper window, from the decoder's cross-attention (openai/whisper, timing.py)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.attention import Attention
from multimodal.blocks.capture import attention_weights
from multimodal.errors import CheckpointError
from multimodal.inference.modules import inference_mode
from multimodal.models.whisper import Whisper
from multimodal.tasks.transcribe.word_times import Words, WordTiming, split_on_spaces, split_on_unicode, spread
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.text.languages import UNSPACED
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.weights.folder import Checkpoint

Head = tuple[int, int]  # layer, head
STRIDE = 2  # mel frames per encoder position, and so per step of the timestamp tokens
POSITIONS_PER_SECOND = RATE // (STRIDE * HOP)
# compare-exchanges after which the fourth of seven values is the median (N. Devillard, "Fast median search", 1998)
_EXCHANGES = ((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4))
SENTENCE_ENDS = ".。!！?？"
LONGEST_MEDIAN = 0.7  # seconds

# Alignment heads of OpenAI's models by the decoder's (layers, heads, vocabulary): layer to heads, from the table in
# openai/whisper's __init__.py. large-v1 shares large-v2's sizes and so gets its heads.
_HEADS: dict[tuple[int, int, int], dict[int, tuple[int, ...]]] = {
    (4, 6, 51864): {1: (0,), 2: (0, 5), 3: (0, 1, 2, 3, 4)},
    (4, 6, 51865): {2: (2,), 3: (0, 2, 3, 4, 5)},
    (6, 8, 51864): {3: (3,), 4: (7,), 5: (1, 5, 7)},
    (6, 8, 51865): {3: (1,), 4: (2, 3, 7), 5: (1, 2, 4, 6)},
    (12, 12, 51864): {
        6: (6,), 7: (0, 3, 8), 8: (2, 5, 7), 9: (0, 4, 8, 10), 10: (0, 1, 2, 3, 6, 11), 11: (2, 4),
    },
    (12, 12, 51865): {5: (3, 9), 8: (0, 4, 7, 8), 9: (0, 7, 9), 10: (5,)},
    (24, 16, 51864): {
        11: (4,), 14: (1, 12, 14), 15: (4,), 16: (0, 4, 9), 17: (12, 14), 18: (7, 10, 15), 20: (0, 3, 9, 14),
        21: (12,),
    },
    (24, 16, 51865): {13: (15,), 15: (4, 15), 16: (1,), 20: (0,), 23: (4,)},
    (32, 20, 51865): {
        10: (12,), 13: (17,), 16: (11, 12, 13), 17: (15, 16), 18: (4, 11, 19), 19: (11,), 21: (2, 3),
        22: (3, 9, 12), 23: (5, 7, 13), 25: (5,), 26: (1, 12), 27: (15,),
    },
    (32, 20, 51866): {7: (0,), 10: (17,), 12: (18,), 13: (12,), 16: (1,), 17: (14,), 19: (11,), 21: (4,), 24: (1,),
                      25: (6,)},
    (4, 20, 51866): {2: (4, 11), 3: (3, 6, 11, 14)},
}  # fmt: skip


def alignment_heads(checkpoint: Checkpoint) -> list[Head]:
    """(layer, head) pairs whose cross-attention follows the speech: from the checkpoint's card ("alignment_heads"),
    else those of the released model with its sizes, else all heads in the upper half of the layers.

    Raises CheckpointError for a card with an empty list or a head that the model does not have."""
    decoder = checkpoint.model.config.decoder
    layers, heads = decoder.stack.layers, decoder.stack.block.cross.heads
    listed = checkpoint.card.get("alignment_heads")
    if listed is None:
        known = _HEADS.get((layers, heads, decoder.vocabulary), {i: range(heads) for i in range(layers // 2, layers)})
        return [(layer, head) for layer, row in known.items() for head in row]
    pairs = listed if isinstance(listed, list) and listed else [None]
    for pair in pairs:
        whole = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(value) is int for value in pair)
        if not whole or not (0 <= pair[0] < layers and 0 <= pair[1] < heads):
            expected = f"expected [layer, head] of {layers} × {heads} (got {pair!r:.40})"
            raise CheckpointError(f"{checkpoint.source} card: alignment_heads: {expected}")
    return [(layer, head) for layer, head in pairs]


@inference_mode()
def find_alignment(
    model: Whisper, tokenizer: WhisperTokenizer, features: Float[Tensor, "T D"], text_tokens: Sequence[int],
    frames: int, language: str | None, task: str = "transcribe", *, heads: Sequence[Head],
) -> list[WordTiming]:  # fmt: skip
    """Align the words of a window's text; times in seconds from the beginning of the window, probabilities averaged
    over tokens.

    `text_tokens`: without timestamps. `features`: the encoder's output, of which `frames` mel frames are audio.
    `heads`: see `alignment_heads`. A text longer than the decoder's context is spread evenly, with probability 0;
    with less than two mel frames of audio all words have length 0."""
    words = split_to_word_tokens(tokenizer, text_tokens, language)
    start = tokenizer.sot_sequence(language, task)
    tokens = [*start, tokenizer.no_timestamps, *text_tokens, tokenizer.eot]
    count = min(frames // STRIDE, features.shape[0])
    if not words:
        return []
    if count < 1 or len(tokens) > model.config.decoder.context:
        return spread(words, frames * HOP / RATE if count else 0.0)
    ids = torch.tensor([tokens], device=features.device)
    with _cross_attention(model, heads, count) as weights:
        logits = model.decoder(ids, features[None])[0, len(start) : -2, : tokenizer.eot]
    probabilities = logits.float().softmax(-1).gather(1, ids[0, len(start) + 1 : -1, None])[:, 0].tolist()
    matrix = sharpened(torch.cat([weights[layer] for layer in sorted(weights)]))[len(start) : -1]
    return _word_timings(words, dtw(-matrix.cpu().numpy()), probabilities)


def split_to_word_tokens(tokenizer: WhisperTokenizer, tokens: Sequence[int], language: str | None) -> Words:
    """(word, tokens), split at spaces, or at every character in languages written without spaces."""
    if language in UNSPACED:
        return split_on_unicode(tokenizer, tokens)
    return split_on_spaces(tokenizer, tokens, marks_apart=True)


@contextmanager
def _cross_attention(
    model: Whisper, heads: Sequence[Head], count: int
) -> Iterator[dict[int, Float[Tensor, "H T S"]]]:  # fmt: skip
    """Collect by layer the cross-attention of `heads`, normalized over the first `count` positions.

    Not through `capture_attention`, which keeps every head of every layer: 0.8 GB for the largest model."""
    weights: dict[int, Tensor] = {}

    def hook(layer: int, chosen: list[int]):
        def keep(cross: Attention, inputs: tuple[Tensor, Tensor]) -> None:
            x, source = inputs
            query, key = cross.split(cross.query(x)), cross.split(cross.key(source[:, :count]))
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            weights[layer] = attention_weights(query[:, chosen].float(), key[:, chosen].float(), None, cross.scale)[0]

        return keep

    blocks, layers = model.decoder.stack.blocks, sorted({layer for layer, _ in heads})
    hooks = [
        blocks[layer].cross.register_forward_pre_hook(hook(layer, [head for at, head in heads if at == layer]))
        for layer in layers
    ]
    try:
        yield weights
    finally:
        for handle in hooks:
            handle.remove()


def sharpened(weights: Float[Tensor, "H T S"]) -> Float[Tensor, "T S"]:
    """Normalize weights over the tokens, median-filter them over time and average the heads."""
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    return median_filter(((weights - mean) / std).nan_to_num(0.0)).mean(0)


def median_filter(x: Float[Tensor, "H T S"]) -> Float[Tensor, "H T S"]:
    """Median over 7 positions, reflected at the ends; rows too short to reflect are returned unchanged.

    A sorting network per head is 20 times as fast as sorting on a CPU."""
    if x.shape[-1] <= 3:
        return x
    return torch.stack([_median_of_7(head) for head in F.pad(x, (3, 3), mode="reflect")])


def _median_of_7(row: Float[Tensor, "T _"]) -> Float[Tensor, "T _"]:
    values = list(row.unfold(-1, row.shape[-1] - 6, 1).unbind(-2))
    for a, b in _EXCHANGES:
        values[a], values[b] = torch.minimum(values[a], values[b]), torch.maximum(values[a], values[b])
    return values[3]


def dtw(costs: Float[np.ndarray, "N M"]) -> tuple[list[int], list[int]]:
    """Rows and columns of the cheapest monotonic path through a cost matrix (dynamic time warping).

    Vectorized over anti-diagonals. Ties break as in openai-whisper: diagonally where that alone is cheapest, down
    where that alone is, else right."""
    rows, columns = costs.shape
    skewed = np.full((rows + columns - 1, rows), np.inf, np.float32)  # [row + column, row]
    row, column = np.indices(costs.shape)
    skewed[row + column, row] = costs
    total = np.full((rows + columns + 1, rows + 1), np.inf, np.float32)  # [i + j, i], with a border
    total[0, 0] = 0
    best = np.empty(rows, np.float32)
    for diagonal in range(2, rows + columns + 1):
        both, up, left = total[diagonal - 2, :-1], total[diagonal - 1, :-1], total[diagonal - 1, 1:]
        np.minimum(both, up, out=best)
        np.minimum(best, left, out=best)
        np.copyto(best, left, where=both == up)  # neither alone is cheapest
        np.add(best, skewed[diagonal - 2], out=total[diagonal, 1:])
    return _backtrace(total, rows, columns)


def _backtrace(total: Float[np.ndarray, "_ _"], i: int, j: int) -> tuple[list[int], list[int]]:
    path = []
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        both, up, left = total[i + j - 2, i - 1], total[i + j - 1, i - 1], total[i + j - 1, i]
        if both < up and both < left:
            i, j = i - 1, j - 1
        elif up < both and up < left:
            i -= 1
        else:
            j -= 1
    return [i for i, _ in reversed(path)], [j for _, j in reversed(path)]


def _word_timings(words: Words, path: tuple[list[int], list[int]], probabilities: list[float]) -> list[WordTiming]:
    """A word lasts from where the path enters its first token to where it enters the next word's."""
    rows, columns = np.array(path[0]), np.array(path[1])
    # divided, as in openai-whisper: products with 0.02 differ in the last bit, which decides between lengths
    entered = (columns[np.diff(rows, prepend=-1) > 0] / POSITIONS_PER_SECOND).tolist()
    timings, first = [], 0
    for text, part in words:
        last = first + len(part)
        probability = sum(probabilities[first:last]) / len(part)
        timings.append(WordTiming(text, part, entered[first], entered[last], probability))
        first = last
    return timings


def add_words(
    segments: list[dict[str, Any]], timings: Sequence[WordTiming], prepend: str, append: str, last_speech: float
) -> None:
    """Set `words` of a window's segments and move segment times to their words, as openai-whisper does.

    `timings`: of all text tokens of the segments, in order. Punctuation in `prepend` joins the next word, in `append`
    the previous one. `last_speech`: end of the speech before the window in seconds of the recording."""
    if not segments:
        return
    lengths = [length for word in timings if (length := word.end - word.start)]
    median = min(LONGEST_MEDIAN, float(np.median(lengths))) if lengths else 0.0
    words = _merged(_shortened(list(timings), 2 * median) if lengths else list(timings), prepend, append)
    offset, speech = segments[0]["seek"] * HOP / RATE, last_speech
    for segment, own in zip(segments, _by_segment(segments, words), strict=True):
        entries = [word.entry(offset) for word in own if word.word]
        segment["words"] = [{**e, "start": round(e["start"], 2), "end": round(e["end"], 2)} for e in entries]
        if segment["words"]:
            _settle(segment, speech, median)
            speech = segment["end"]


def _shortened(words: list[WordTiming], longest: float) -> list[WordTiming]:
    """Limit words beside a sentence's end, which absorb its pause, to `longest` seconds."""
    for i in range(1, len(words)):
        if words[i].end - words[i].start > longest:
            if words[i].word in SENTENCE_ENDS:
                words[i] = words[i]._replace(end=words[i].start + longest)
            elif words[i - 1].word in SENTENCE_ENDS:
                words[i] = words[i]._replace(start=words[i].end - longest)
    return words


def _merged(words: list[WordTiming], prepend: str, append: str) -> list[WordTiming]:
    """Join punctuation to its word, which keeps its own time; the mark stays in the list without text or tokens."""
    following = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        mark, word = words[i], words[following]
        if mark.word.startswith(" ") and mark.word.strip() in prepend:
            words[following] = word._replace(word=mark.word + word.word, tokens=mark.tokens + word.tokens)
            words[i] = mark._replace(word="", tokens=[])
        else:
            following = i
    previous = 0
    for j in range(1, len(words)):
        word, mark = words[previous], words[j]
        if not word.word.endswith(" ") and mark.word in append:
            words[previous] = word._replace(word=word.word + mark.word, tokens=word.tokens + mark.tokens)
            words[j] = mark._replace(word="", tokens=[])
        else:
            previous = j
    return words


def _by_segment(segments: list[dict[str, Any]], words: list[WordTiming]) -> list[list[WordTiming]]:
    """The words of each segment. A word across a border belongs to the segment in which it begins."""
    tokens = [token for word in words for token in word.tokens]
    groups, index, position, saved = [], 0, 0, 0
    for segment in segments:
        end = position
        for token in segment["tokens"]:  # timestamps belong to no word, so they never match
            end += end < len(tokens) and token == tokens[end]
        count, position, saved, own = end - position, end, 0, []
        while index < len(words) and saved < count:
            own.append(words[index])
            saved += len(words[index].tokens)
            index += 1
        groups.append(own)
    return groups


def _settle(segment: dict[str, Any], last_speech: float, median: float) -> None:
    """Shorten the first two words after a pause, and reconcile the segment's times with its outer words: a word may
    extend up to 0.5 s beyond the segment, which then takes the word's time."""
    words, longest = segment["words"], 2 * median
    first, last = words[0], words[-1]
    second = words[1] if len(words) > 1 else None
    long = first["end"] - first["start"] > longest or (
        second is not None and second["end"] - first["start"] > 2 * longest
    )
    if first["end"] - last_speech > 4 * median and long:
        if second is not None and second["end"] - second["start"] > longest:
            first["end"] = second["start"] = max(second["end"] / 2, second["end"] - longest)
        first["start"] = max(0.0, first["end"] - longest)
    if segment["start"] < first["end"] and segment["start"] - 0.5 > first["start"]:
        first["start"] = max(0.0, min(first["end"] - median, segment["start"]))
    else:
        segment["start"] = first["start"]
    if segment["end"] > last["start"] and segment["end"] + 0.5 < last["end"]:
        last["end"] = max(last["start"] + median, segment["end"])
    else:
        segment["end"] = last["end"]
