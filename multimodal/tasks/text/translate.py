"""Translations of texts, by an encoder-decoder that has a token for each language or one direction."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multimodal.decoding import logits
from multimodal.decoding.beam_search import beam
from multimodal.decoding.options import checked
from multimodal.decoding.sampling import greedy
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.cuda_graphs import fast_step
from multimodal.models.encoder_decoder import TextToText
from multimodal.tasks.text.languages import direction
from multimodal.tokens.text.tokenizer import texts_of
from multimodal.tokens.text.vocabulary import TextCut
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

ON_LONG = ("cut", "error")
LONGER = 2.0, 50  # an answer gets so many times its source's tokens, and so many more


@dataclass(frozen=True)
class TranslateOptions:
    """`beam_size` 1 is greedy. `length_penalty` α ranks by log-probability / tokens^α as transformers: 1 by the mean, 0
    by the sum. `max_tokens` None: twice the source's tokens and 50, as far as the model's context goes. `batch_size`:
    texts side by side. `on_long`: a text beyond the context is cut, or an error."""

    beam_size: int = 5
    length_penalty: float = 1.0
    max_tokens: int | None = None
    batch_size: int = 32
    on_long: str = "cut"

    def __post_init__(self):
        given = {"beam_size": self.beam_size, "length_penalty": self.length_penalty}
        checked(given if self.max_tokens is None else given | {"max_tokens": self.max_tokens})
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise UsageError(f"batch_size: must be a whole number of 1 or more ({self.batch_size!r})")
        if self.on_long not in ON_LONG:
            raise UsageError(f"on_long {self.on_long!r}: must be one of {', '.join(ON_LONG)}")


def translate(
    texts: str | Sequence[str], model: str | Path | Checkpoint, source: str | None = None, target: str | None = None, *,
    beam_size: int = 5, length_penalty: float = 1.0, max_tokens: int | None = None, batch_size: int = 32,
    on_long: str = "cut",
) -> str | list[str]:  # fmt: skip
    """The translation of a text, or those of several in their order, from the language `source` into `target`: codes of
    the model ("de") or English names ("German"). A model of one direction needs neither. An empty text stays empty.

    Options: see `TranslateOptions`. A translation does not depend on the texts beside it. Raises UsageError, with the
    near ones for an unknown language; TextError for a text that is no Unicode, or too long with `on_long` "error";
    CheckpointError. Warns (TextCut) of texts that were cut and of translations that were."""
    options = TranslateOptions(beam_size, length_penalty, max_tokens, batch_size, on_long)
    translator = Translator(model if isinstance(model, Checkpoint) else load(model), source, target, options)
    alone = isinstance(texts, str)
    read = [translator.read(text) for text in ([texts] if alone else texts_of(texts, "texts"))]
    found = translator(read)
    tell_cuts([(f"text {i}", one, made) for i, (one, made) in enumerate(zip(read, found, strict=True), 1)])
    made = [one.text for one in found]
    return made[0] if alone else made


class Source(NamedTuple):
    """A text as the encoder gets it; none of it for an empty one. `cut`: tokens that its context has no room for."""

    ids: tuple[int, ...]
    cut: int = 0


class Translation(NamedTuple):
    """`score` is what beams are ranked by; `tokens` counts the end; `finished` False: it was cut."""

    text: str
    score: float
    tokens: int
    finished: bool


@dataclass
class Translator:
    """A model made ready for one direction. Raises UsageError, CheckpointError."""

    checkpoint: Checkpoint
    source: str | None
    target: str | None
    options: TranslateOptions = field(default_factory=TranslateOptions)

    def __post_init__(self):
        network, tokenizer = self.checkpoint.model, self.checkpoint.tokenizer
        if not isinstance(network, TextToText) or network.config.decoder.tied is None:
            what = f"is a {self.checkpoint.kind}, translating needs an encoder-decoder of text"
            raise UsageError(f"model {self.checkpoint.source}: {what}")
        if tokenizer is None:
            raise CheckpointError(f"model {self.checkpoint.source}: its tokenizer is not known, and is not guessed")
        if tokenizer.vocab_size > network.config.decoder.vocabulary or tokenizer.eos_id is None:
            raise CheckpointError(f"model {self.checkpoint.source}: its tokenizer does not go with it")
        self.network, self.tokenizer = network, tokenizer
        self.before, self.forced = direction(self.checkpoint, self.source, self.target)
        self.prompt = [network.config.start_id, *self.forced]
        self.room = network.config.decoder.context - len(self.prompt)
        if self.options.max_tokens is not None and self.options.max_tokens > self.room:
            warnings.warn(f"max_tokens {self.options.max_tokens}: the model's context leaves {self.room}", stacklevel=3)
        never = {tokenizer.pad_id} - {tokenizer.eos_id}
        self.rules = [logits.suppress(sorted(never))] if never else []

    def read(self, text: str) -> Source:
        """Raises TextError for half a character, and for a text that is too long where that is an error."""
        if not text.strip():
            return Source(())
        ids = self.tokenizer.encode(text)
        room = self.network.config.encoder.context - len(self.before) - 1
        cut = max(len(ids) - room, 0)
        if cut and self.options.on_long == "error":
            raise TextError(f"{text[:40]!r}: has {len(ids)} tokens, the model's context leaves {room}")
        return Source((*self.before, *ids[:room], self.tokenizer.eos_id), cut)

    def __call__(self, sources: Sequence[Source]) -> list[Translation]:
        """In their order. Texts of like length go together, and equal ones are translated once."""
        found: dict[tuple[int, ...], Translation] = {(): Translation("", 0.0, 0, True)}
        order = sorted({one.ids for one in sources} - {()}, key=lambda ids: (len(ids), ids))
        for first in range(0, len(order), self.options.batch_size):
            part = order[first : first + self.options.batch_size]
            found |= dict(zip(part, self._batch(part), strict=True))
        return [found[one.ids] for one in sources]

    @torch.inference_mode()
    def _batch(self, rows: Sequence[tuple[int, ...]]) -> list[Translation]:
        options, device = self.options, self.network.decoder.device
        valid = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
        ids = torch.full(valid.shape, self.tokenizer.pad_id)
        for own, real, row in zip(ids, valid, rows, strict=True):
            own[: len(row)], real[: len(row)] = torch.tensor(row), True
        valid = valid.to(device)
        prompt = torch.tensor([self.prompt] * len(rows), device=device)
        limits = [self._limit(len(row)) for row in rows]
        common: dict[str, Any] = {"eos": self.tokenizer.eos_id, "max_new": limits, "rules": self.rules}
        source, room = self.network.encode(ids.to(device), valid), len(self.prompt) + max(limits)
        step, cache = fast_step(self.network.decoder, source, None, room, valid)
        if options.beam_size == 1:
            made = greedy(step, prompt, cache, **common)
        else:
            made = beam(step, prompt, cache, beams=options.beam_size, length_penalty=self._norm, early_stopping=False,
                        **common)  # fmt: skip
        return [self._made(*row) for row in zip(made.ids, made.logprobs, limits, strict=True)]

    def _limit(self, size: int) -> int:
        factor, more = LONGER
        asked = self.options.max_tokens
        return min(int(factor * size) + more if asked is None else asked, self.room)

    def _norm(self, length: int) -> float:
        """transformers counts the language's token, which it forces, as one of the answer's."""
        return float(length + 1 + len(self.forced)) ** self.options.length_penalty

    def _made(self, ids: list[int], logprob: float, limit: int) -> Translation:
        if not math.isfinite(logprob):
            raise CheckpointError(f"model {self.checkpoint.source}: gives logits that are not finite")
        finished = len(ids) < limit
        text = self.tokenizer.decode(ids).strip()
        text = text if finished else text.rstrip("\ufffd")  # half a letter
        tokens = len(ids) + finished
        return Translation(text, logprob / self._norm(tokens - 1), tokens, finished)


def tell_cuts(made: Sequence[tuple[str, Source, Translation]]) -> None:
    """One warning for all texts that were cut, and one for all translations. Each comes with what it is called."""
    texts = [(name, one.cut) for name, one, _ in made if one.cut]
    answers = [(name, one.tokens) for name, _, one in made if not one.finished]
    for found, what in (
        (texts, "was cut to the model's context, {} tokens lost"),
        (answers, "has a translation that was cut, after {} tokens"),
    ):
        if found:
            name, count = found[0]
            more = f"; so {len(found) - 1} more" if len(found) > 1 else ""
            warnings.warn(TextCut(f"{name} {what.format(count)}{more}"), stacklevel=3)
