"""Masked spans filled by an encoder-decoder: BART writes the whole text, T5 what stands for each sentinel."""

import re
from collections.abc import Sequence
from itertools import count, takewhile, zip_longest
from typing import Any

import torch

from multimodal.decoding.beam_search import beam_search, per_token
from multimodal.decoding.logits import force
from multimodal.decoding.sampling import cross_attention_step, greedy
from multimodal.errors import TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.tasks.text.options import FillMaskOptions
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint

SENTINEL = re.compile(r"<extra_id_(\d+)>")
BART = "bart"  # begins the format of cards of transformers' BART, whose texts have a bos on both sides


@inference_mode()
def fill_spans(texts: Sequence[str], checkpoint: Checkpoint, options: FillMaskOptions) -> list[dict[str, Any]]:
    """For each text `filled`, and `score`, the mean log-probability of the decoder's tokens; with sentinels
    (<extra_id_0>, Raffel et al. 2020) also `spans`, the text of each in order.

    Otherwise masks (Lewis et al. 2020: a mask is a span of any length) and `filled` is the decoder's text, as
    transformers' `generate` gives it. Raises UsageError for a model that knows neither, TextError."""
    network, tokenizer = checkpoint.model, checkpoint.required_tokenizer()
    framed = checkpoint.card.get("format", "").startswith(BART) and tokenizer.bos_id is not None
    rows = [span_ids(text, checkpoint, framed) for text in texts]
    results = []
    for text, row in zip(texts, rows, strict=True):
        made, logprob = _written(network, tokenizer, row, framed, options)
        result = {"text": text, "score": logprob / (len(made) + 1)}
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


def _written(
    network: EncoderDecoder, tokenizer: Tokenizer, row: list[int], framed: bool, options: FillMaskOptions
) -> tuple[list[int], float]:
    """Ids that the decoder writes, and their log-probability."""
    device = network.decoder.device
    step = cross_attention_step(network.decode, network.encode(torch.tensor([row], device=device)))
    ids = torch.full((1, 1), network.config.start_id, device=device)
    room = options.max_new_tokens or 2 * len(row) + 50
    limit = network.decoder.config.limit
    processors = [force([tokenizer.bos_id], 1)] if framed else []
    common = {"eos": tokenizer.eos_id, "max_new": room if limit is None else min(room, limit), "processors": processors}
    if options.beam_size > 1:
        made = beam_search(step, ids, network.decoder.new_cache(), beams=options.beam_size, early_stopping=False,
                           length_penalty=per_token(1.0), **common)  # fmt: skip
    else:
        made = greedy(step, ids, network.decoder.new_cache(), **common)
    return made.ids[0], made.logprobs[0]


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
