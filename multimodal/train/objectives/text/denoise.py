"""Denoising objectives of T5 (Raffel et al. 2020, section 3.3) and BART (Lewis et al. 2020, section 2.2), as pure
functions of ids and a generator.

Each returns the encoder's source and the decoder's target, without start and end tokens. `N` is the text's length."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from multimodal.errors import DataError

Ids = Int[Tensor, "N"]


class Denoised(NamedTuple):
    source: Ids
    target: Ids


def random_spans(count: int, share: float, mean: float, random: torch.Generator) -> Bool[Tensor, "N"]:
    """Mask a `share` of `count` tokens, rounded, in spans of `mean` tokens on average; the text starts with a kept span
    and ends with noise (T5's `random_spans_noise_mask`)."""
    if count < 2:
        return torch.zeros(count, dtype=torch.bool)
    noise = min(max(round(count * share), 1), count - 1)
    spans = min(max(round(noise / mean), 1), noise, count - noise)
    lengths = torch.stack([_segments(count - noise, spans, random), _segments(noise, spans, random)], 1).flatten()
    return torch.repeat_interleave(torch.arange(2 * spans) % 2 == 1, lengths)


def _segments(count: int, parts: int, random: torch.Generator) -> Int[Tensor, "P"]:
    """Split `count` items into `parts` non-empty parts uniformly at random; return their lengths."""
    cuts = torch.randperm(count - 1, generator=random)[: parts - 1].sort().values + 1
    edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([count])])
    return edges.diff()


def random_tokens(count: int, share: float, random: torch.Generator) -> Bool[Tensor, "N"]:
    """Mask a `share` of the tokens, rounded, at least one and not all (T5's "i.i.d. noise" with a fixed count)."""
    mask = torch.zeros(count, dtype=torch.bool)
    noise = min(max(round(count * share), 1), count - 1) if count > 1 else 0
    mask[torch.randperm(count, generator=random)[:noise]] = True
    return mask


def replace_spans(ids: Ids, noise: Bool[Tensor, "N"], sentinels: Sequence[int]) -> Denoised:
    """Replace each run of noise with a sentinel; the target lists each sentinel with its run, and one more at the end
    (figure 2). Raises DataError for too few sentinels."""
    begins = noise & ~torch.cat([torch.tensor([False]), noise[:-1]])
    runs = int(begins.sum())
    if runs >= len(sentinels):
        raise DataError(f"a text of {len(ids)} tokens has {runs} spans, too many for {len(sentinels)} sentinels")
    marks = torch.tensor(sentinels)[(begins.cumsum(0) - 1).clamp(min=0)]
    source = torch.where(begins, marks, ids)[~noise | begins]
    # a run's mark precedes its first token
    target = torch.stack([marks, ids], 1)[torch.stack([begins, noise], 1)]
    return Denoised(source, torch.cat([target, torch.tensor([sentinels[runs]])]))


def span_corruption(
    ids: Ids, sentinels: Sequence[int], random: torch.Generator, share: float = 0.15, mean: float = 3.0
) -> Denoised:
    """T5's objective: "random spans" (table 3)."""
    return replace_spans(ids, random_spans(len(ids), share, mean, random), sentinels)


def drop_tokens(ids: Ids, random: torch.Generator, share: float = 0.15) -> Denoised:
    """Drop tokens, which are the target (table 3)."""
    noise = random_tokens(len(ids), share, random)
    return Denoised(ids[~noise], ids[noise])


def bert_style(
    ids: Ids, mask_id: int, ordinary: Int[Tensor, "V"], random: torch.Generator, share: float = 0.15, other: float = 0.1
) -> Denoised:
    """Mask tokens, a share `other` of them with random ones of `ordinary`; the target is the whole text (table 3). With
    `other` 0 it is MASS-style (Song et al. 2019)."""
    noise, source = random_tokens(len(ids), share, random), ids.clone()
    count = int(noise.sum())
    drawn = ordinary[torch.randint(len(ordinary), (count,), generator=random)]
    source[noise] = torch.where(torch.rand(count, generator=random) < other, drawn, mask_id)
    return Denoised(source, ids)


def deshuffling(ids: Ids, random: torch.Generator) -> Denoised:
    """Shuffle the tokens (table 3)."""
    return Denoised(ids[torch.randperm(len(ids), generator=random)], ids)


def prefix_language(ids: Ids, random: torch.Generator) -> Denoised:
    """Split the text at a random position; its end is the target (table 3)."""
    cut = int(torch.randint(1, len(ids), (), generator=random)) if len(ids) > 1 else 0
    return Denoised(ids[:cut], ids[cut:])


def text_infilling(
    ids: Ids, mask_id: int, random: torch.Generator, share: float = 0.3, mean: float = 3.0
) -> Int[Tensor, "M"]:
    """Replace spans of Poisson(`mean`) lengths, a `share` of the tokens in total, rounded, with one mask each; an empty
    span inserts a mask (BART), as long as the text does not become longer by it."""
    left, lengths = round(share * len(ids)), []
    while left > 0:
        length = min(int(torch.poisson(torch.tensor([mean]), generator=random)), left)
        lengths.append(length)
        left -= length
    whole = [length for length in lengths if length]
    empty, kept = min(len(lengths) - len(whole), sum(whole) - len(whole)), len(ids) - sum(whole)
    # at most one span in each gap between kept tokens, so that spans stay separate
    whole = whole if len(whole) <= kept + 1 else [sum(whole)]
    gaps = torch.randperm(kept + 1, generator=random)[: len(whole)].tolist()
    spans = dict(zip(gaps, whole, strict=True))
    more = torch.randint(kept + 1, (empty,), generator=random).tolist() if empty else []
    tokens: list[int] = []
    text = iter(ids.tolist())
    for gap in range(kept + 1):
        for _ in range(spans.get(gap, 0)):
            next(text)
        tokens += [mask_id] * (more.count(gap) + (gap in spans))
        tokens += [next(text)] if gap < kept else []
    return torch.tensor(tokens, dtype=ids.dtype)


def token_deletion(ids: Ids, random: torch.Generator, share: float = 0.15) -> Int[Tensor, "M"]:
    """Drop tokens; the target is the whole text (BART)."""
    return ids[~random_tokens(len(ids), share, random)]


def sentence_permutation(sentences: Sequence[Sequence[int]], random: torch.Generator) -> list[Sequence[int]]:
    """Shuffle the sentences (BART)."""
    return [sentences[i] for i in torch.randperm(len(sentences), generator=random).tolist()]


def document_rotation(ids: Ids, random: torch.Generator) -> Ids:
    """Rotate the text to start at a random token (BART)."""
    return ids.roll(-int(torch.randint(max(1, len(ids)), (), generator=random)))


class Vocabulary(NamedTuple):
    """The mask, the sentinels in order, and the ids to draw random replacements from."""

    mask_id: int
    sentinels: Sequence[int]
    ordinary: Int[Tensor, "V"]


Noise = Callable[[Sequence[Sequence[int]], Vocabulary, torch.Generator, float, float], Denoised]


def _flat(sentences: Sequence[Sequence[int]]) -> Ids:
    return torch.tensor([i for sentence in sentences for i in sentence], dtype=torch.long)


def _bart(sentences: Sequence[Sequence[int]], v: Vocabulary, r: torch.Generator, share: float, mean: float) -> Denoised:
    shuffled = _flat(sentence_permutation(sentences, r))
    return Denoised(text_infilling(shuffled, v.mask_id, r, share, mean), _flat(sentences))


# name → function of sentences, vocabulary, generator, share of the tokens and mean span length
OBJECTIVES: dict[str, Noise] = {
    "spans": lambda s, v, r, share, mean: span_corruption(_flat(s), v.sentinels, r, share, mean),
    "replace": lambda s, v, r, share, _: replace_spans(t := _flat(s), random_tokens(len(t), share, r), v.sentinels),
    "drop": lambda s, v, r, share, _: drop_tokens(_flat(s), r, share),
    "bert": lambda s, v, r, share, _: bert_style(_flat(s), v.mask_id, v.ordinary, r, share),
    "mass": lambda s, v, r, share, _: bert_style(_flat(s), v.mask_id, v.ordinary, r, share, 0.0),
    "deshuffle": lambda s, v, r, *_: deshuffling(_flat(s), r),
    "prefix": lambda s, v, r, *_: prefix_language(_flat(s), r),
    "bart": _bart,
    "infill": lambda s, v, r, share, mean: Denoised(text_infilling(t := _flat(s), v.mask_id, r, share, mean), t),
    "delete": lambda s, v, r, share, _: Denoised(token_deletion(t := _flat(s), r, share), t),
    "permute": lambda s, v, r, *_: Denoised(_flat(sentence_permutation(s, r)), _flat(s)),
    "rotate": lambda s, v, r, *_: Denoised(document_rotation(t := _flat(s), r), t),
}
