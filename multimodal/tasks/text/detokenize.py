"""Detokenization of generated ids: whole, incremental, and up to a stop string."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from multimodal.decoding.sampling import PADDING, StopRule
from multimodal.tokens.text.tokenizer import Tokenizer, cleaned

HALF = "\ufffd"  # decoded from incomplete UTF-8
UNSETTLED = 4  # characters that cleaning may still change when more come
BEFORE = 8  # ids of context that decide whether the next one is written with a space


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` after `prompt`; decoded alone, ids may lose the space between them."""
    before = list(prompt[-BEFORE:])
    head, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids)


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(text before the first stop string, True if there was one)."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return (text[: min(positions)], True) if positions else (text, False)


class IncrementalDetokenizer:
    """Decode ids one by one into the text that each adds to a prompt. Withholds incomplete characters and possible
    beginnings of a stop string; returns nothing after a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = (), clean: bool = True
    ):  # fmt: skip
        self.decode, self.stops = tokenizer.spelled, stops
        self.cleans, self.raw, self.settled = tokenizer.cleans and clean, "", 0
        self.ids = list(prompt[-BEFORE:])
        self.silent = tokenizer.control | {tokenizer.unknown_id}  # no context: they decode to nothing
        self.first, self.read = 0, len(self.ids)  # ids first..read are decoded; they are the context of the next one
        self.withheld, self.stopped = "", False

    def add(self, token: int) -> str:
        if token in self.silent:
            return ""
        self.ids.append(token)
        head, whole = (self.decode(self.ids[self.first : end]) for end in (self.read, len(self.ids)))
        # a lone blank is seen once a token follows it, where ends are stripped (Marian)
        if whole.endswith(HALF) or not whole.startswith(head) or len(whole) == len(head):
            return ""
        self.first, self.read = self.read, len(self.ids)
        return self._release(whole[len(head) :])

    def end(self, ended: bool) -> str:
        """The text still withheld; an incomplete character only if the text has `ended`."""
        head, whole = (self.decode(self.ids[self.first : end]) for end in (self.read, len(self.ids)))
        rest = whole[len(head) :] if whole.startswith(head) else ""
        text = self._release(rest if ended else rest.rstrip(HALF), last=True)
        withheld, self.withheld = self.withheld, ""
        return text + ("" if self.stopped else withheld)

    def _release(self, new: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        new = self._cleaned(new, last) if self.cleans else new
        text, self.stopped = cut_at(self.withheld + new, self.stops)
        kept = 0 if self.stopped else max((_overlap(text, stop) for stop in self.stops), default=0)
        self.withheld = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _cleaned(self, new: str, last: bool) -> str:
        self.raw += new
        text, start = cleaned(self.raw), self.settled
        self.settled = len(text) if last else max(start, len(text) - UNSETTLED)
        return text[start : self.settled]


def token_texts(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    """The text that each token adds after a prompt: none within a character, all of it for the token that ends it."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, clean=False)
    texts = [detokenizer.add(token) for token in ids]
    return [*texts[:-1], texts[-1] + detokenizer.end(True)] if texts else []


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends the text."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)


def stop_rule(stops: Sequence[str], tokenizer: Tokenizer, start: int) -> StopRule:
    """Stop rows whose text after a prompt of `start` ids contains a stop string."""
    tail = max(len(stop.encode()) for stop in stops) + BEFORE

    def stopped(prompt: list[int], new: list[int]) -> bool:
        recent = continuation(tokenizer, (prompt + new[:-tail])[-BEFORE:], new[-tail:])
        return cut_at(recent, stops)[1] and cut_at(continuation(tokenizer, prompt, new), stops)[1]

    def rule(ids: Int[Tensor, "B T"]) -> Bool[Tensor, "B"]:
        rows = [stopped([i for i in row[:start] if i != PADDING], row[start:]) for row in ids.tolist()]
        return torch.tensor(rows, device=ids.device)

    return rule
