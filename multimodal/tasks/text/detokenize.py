"""Text out of generated ids: whole, as it grows, and up to where it is to stop."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.decoding.sampling import PADDING, Rule
from multimodal.tokens.text.tokenizer import Tokenizer

HALF = "\ufffd"  # what bytes that are no UTF-8 are decoded to
BEFORE = 8  # ids whose text says how the next one is written: with a space before it or not


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` as it stands after `prompt`: ids alone may be written without the space between them."""
    before = list(prompt[-BEFORE:])
    head, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids)


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop in it, and whether there was one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


class Growing:
    """The text that each new id adds to a prompt's. A letter of which bytes are missing waits for them, and what may
    be the begin of a stop for what follows; after a stop nothing more comes."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self.decode, self.stops = tokenizer.decode, stops
        self.ids = list(prompt[-BEFORE:])
        self.first, self.read = 0, len(self.ids)  # `first`..`read` is known, and says how the next id is written
        self.held, self.stopped = "", False

    def add(self, token: int) -> str:
        self.ids.append(token)
        head, whole = (self.decode(self.ids[self.first : end]) for end in (self.read, len(self.ids)))
        if whole.endswith(HALF) or not whole.startswith(head):
            return ""
        self.first, self.read = self.read, len(self.ids)
        return self._passed(whole[len(head) :])

    def end(self, ended: bool) -> str:
        """What still waits; a half letter only where the text has `ended`."""
        head, whole = (self.decode(self.ids[self.first : end]) for end in (self.read, len(self.ids)))
        rest = whole[len(head) :] if whole.startswith(head) else ""
        text = self._passed(rest if ended else rest.rstrip(HALF))
        held, self.held = self.held, ""
        return text + ("" if self.stopped else held)

    def _passed(self, new: str) -> str:
        if self.stopped:
            return ""
        text, self.stopped = cut_at(self.held + new, self.stops)
        begun = 0 if self.stopped else max((_begun(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """How many letters at the end of a text are the begin of a stop."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)


def ends_at(stops: Sequence[str], tokenizer: Tokenizer, start: int) -> Rule:
    """The end, with probability 1, for rows whose text after a prompt of `start` ids holds one of `stops`."""
    tail = max(len(stop.encode()) for stop in stops) + BEFORE

    def over(prompt: list[int], new: list[int]) -> bool:
        lately = continuation(tokenizer, (prompt + new[:-tail])[-BEFORE:], new[-tail:])
        return cut_at(lately, stops)[1] and cut_at(continuation(tokenizer, prompt, new), stops)[1]

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        rows = [over([i for i in row[:start] if i != PADDING], row[start:]) for row in ids.tolist()]
        if any(rows):
            ended = torch.tensor(rows, device=logits.device)
            logits[ended] = -torch.inf
            logits[ended, tokenizer.eos_id] = 0.0
        return logits

    return rule
