"""Masked spans filled by an encoder-decoder: BART writes the whole text, T5 what stands for each sentinel."""

import re
from collections.abc import Mapping, Sequence
from itertools import count, takewhile, zip_longest
from typing import Any

from multimodal.errors import TextError, UsageError
from multimodal.tasks.encode.search_defaults import search_defaults
from multimodal.tasks.text.generate import TextWriter
from multimodal.tasks.text.options import GenerateOptions, options_for
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint

SENTINEL = re.compile(r"<extra_id_(\d+)>")
LENGTH_FACTOR, LENGTH_EXTRA = 2, 50  # greatest number of tokens, from those of the masked text
BART = "bart"  # begins the format of cards of transformers' BART, whose texts have a bos on both sides


def fill_spans(texts: Sequence[str], checkpoint: Checkpoint, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each text `filled`, and `score`, the mean log-probability of the decoder's tokens; with sentinels
    (<extra_id_0>, Raffel et al. 2020) also `spans`, the text of each in order.

    Otherwise masks (Lewis et al. 2020: a mask is a span of any length) and `filled` is the decoder's text, as
    transformers' `generate` gives it. `options`: of `GenerateOptions`; others are those of the checkpoint. Raises
    UsageError for a model that knows neither, TextError."""
    tokenizer = checkpoint.required_tokenizer()
    framed = checkpoint.card.get("format", "").startswith(BART) and tokenizer.bos_id is not None
    rows = [span_ids(text, checkpoint, framed) for text in texts]
    results = []
    for text, row in zip(texts, rows, strict=True):
        most = {"max_new_tokens": LENGTH_FACTOR * len(row) + LENGTH_EXTRA}
        writer = TextWriter(checkpoint, options_for(search_defaults(checkpoint, most | options, GenerateOptions)))
        writer.first = tokenizer.bos_id if framed else None
        ((best,),) = writer([row])
        made, result = best.ids, {"text": text, "score": best.logprob / (len(best.ids) + 1)}
        if SENTINEL.search(text):
            found = _spans(made, tokenizer)
            spans = [found.get(int(number), "") for number in SENTINEL.findall(text)]
            parts = re.split(SENTINEL, text)[::2]
            filled = "".join(map("".join, zip_longest(parts, spans, fillvalue="")))
            result |= {"filled": filled, "spans": spans}
        else:
            result["filled"] = tokenizer.decode(made).strip()
        results.append(result)
    return results


def spelling(tokenizer: Tokenizer) -> str:
    """The mask as text."""
    return tokenizer.decode([tokenizer.mask_id], skip_control=False).strip()


def sentinels_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The vocabulary's sentinels in order: named ones, else the control ids at its end, the last one first."""
    last = tokenizer.vocab_size - 1
    return tokenizer.sentinel_ids or tuple(takewhile(tokenizer.control.__contains__, count(last, -1)))


def span_ids(text: str, checkpoint: Checkpoint, framed: bool) -> list[int]:
    """Ids of a text with its masks or sentinels as control tokens, `framed` after bos. Raises TextError for a text that
    is empty, too long or has neither, UsageError."""
    tokenizer, config = checkpoint.required_tokenizer(), checkpoint.model.config.encoder
    if not text.strip():
        raise TextError(f"text {text[:40]!r}: is empty")
    marks, mask = sentinels_of(tokenizer), tokenizer.mask_id
    if not marks and mask is None:
        raise UsageError(f"model {checkpoint.source}: expected a tokenizer with a mask or sentinels")
    spelled = None if mask is None else spelling(tokenizer)
    names = [r"<extra_id_\d+>", *([] if spelled is None else [re.escape(spelled)])]
    parts = re.split(f"({'|'.join(names)})", text)  # texts and marks alternate
    if len(parts) == 1:
        known = " or ".join(name for name in (spelled, "<extra_id_0>" if marks else None) if name)
        raise TextError(f"text {text[:40]!r}: has no {known}")
    ids = [tokenizer.bos_id] if framed else []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            strips = number < len(parts) - 1 and (tokenizer.mask_lstrip or parts[number + 1] != spelled)
            ids += tokenizer.encode(part.rstrip() if strips else part)
        elif part == spelled:
            ids.append(mask)
        elif (index := int(SENTINEL.fullmatch(part)[1])) < len(marks):
            ids.append(marks[index])
        else:
            raise TextError(f"text {text[:40]!r}: has {part}, the vocabulary has {len(marks)} sentinels")
    ids += tokenizer.frame[1]
    if config.limit and len(ids) > config.limit:
        raise TextError(f"text {text[:40]!r}: has {len(ids)} tokens, the model's context is {config.limit}")
    return ids


def _spans(ids: Sequence[int], tokenizer: Tokenizer) -> dict[int, str]:
    """Text that follows each sentinel."""
    index = {i: number for number, i in enumerate(sentinels_of(tokenizer))}
    spans: dict[int, list[int]] = {}
    current = None
    for i in ids:
        if i in index:
            current = index[i]
            spans.setdefault(current, [])
        elif current is not None:
            spans[current].append(i)
    return {number: tokenizer.decode(own).strip() for number, own in spans.items()}
