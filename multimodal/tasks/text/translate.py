"""Translation with an encoder-decoder that has language tokens or one fixed direction."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack, overload

import torch
from torch.nn.utils.rnn import pad_sequence

from multimodal.blocks.masks import padding
from multimodal.decoding import logits
from multimodal.decoding.beam_search import beam_search
from multimodal.decoding.sampling import greedy
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.cuda_graphs import fast_step
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.tasks.encode.arguments import TranslateArguments, TranslatorArguments
from multimodal.tasks.encode.loaded import LoadedModel, Model, device_of, loaded
from multimodal.tasks.encode.search_defaults import FORCED, forced_token, search_defaults, warn_of_search
from multimodal.tasks.text.detokenize import HALF
from multimodal.tasks.text.languages import direction, is_language, task_prefix
from multimodal.tasks.text.options import TranslateOptions
from multimodal.tokens.text.tokenizer import TextCut, texts_of
from multimodal.weights.folder import Checkpoint

LENGTH_FACTOR, LENGTH_EXTRA = 2.0, 50  # maximum tokens of a translation, from those of its source


class SourceText(NamedTuple):
    """Encoder input ids, empty for an empty text. `cut`: number of tokens beyond the context."""

    ids: tuple[int, ...]
    cut: int = 0


class Translation(NamedTuple):
    """`score`: beam ranking score; `tokens` includes the end; `finished` False: cut at the length limit."""

    text: str
    score: float
    tokens: int
    finished: bool


@dataclass
class TranslationWriter:
    """A model with a translation direction and options. Raises UsageError, CheckpointError."""

    checkpoint: Checkpoint
    source: str | None
    target: str | None
    options: TranslateOptions = field(default_factory=TranslateOptions)

    def __post_init__(self):
        check_translator(self.checkpoint)
        network = self.checkpoint.model
        tokenizer = self.checkpoint.required_tokenizer()
        if tokenizer.vocab_size > network.config.decoder.vocabulary or tokenizer.eos_id is None:
            raise CheckpointError(f"model {self.checkpoint.source}: tokenizer does not fit the model")
        self.network, self.tokenizer = network, tokenizer
        self.prefix = task_prefix(self.checkpoint, self.source, self.target)
        plain = ([], []) if self.prefix is not None else direction(self.checkpoint, self.source, self.target)
        self.before, self.forced = plain
        self.prompt = [network.config.start_id, *self.forced]
        self.capacity = network.config.decoder.context - len(self.prompt)
        most = self.options.max_new_tokens
        if most is not None and most > self.capacity:
            warnings.warn(f"max_new_tokens {most}: the model's context leaves {self.capacity}", stacklevel=3)
        never = {tokenizer.pad_id} - {tokenizer.eos_id}
        self.processors = [logits.suppress(sorted(never))] if never else []
        if self.options.repetition_penalty != 1:
            self.processors.append(logits.repetition_penalty(self.options.repetition_penalty))
        if self.options.no_repeat_ngram:
            ends = logits.end_if_all_forbidden(tokenizer.eos_id)
            self.processors += [logits.no_repeat_ngram(self.options.no_repeat_ngram), ends]
        first = forced_token(self.checkpoint, FORCED[0])
        if first is not None and not self.forced:
            self.processors.append(logits.force([first], len(self.prompt)))

    def read(self, text: str) -> SourceText:
        """Encode a text. Raises TextError for invalid Unicode, and with `on_long` "error" for one that is too long."""
        if not text.strip():
            return SourceText(())
        ids = self.tokenizer.encode((self.prefix or "") + text)
        capacity = self.network.config.encoder.context - len(self.before) - 1
        cut = max(len(ids) - capacity, 0)
        if cut and self.options.on_long == "error":
            raise TextError(f"{text[:40]!r}: has {len(ids)} tokens, the model's context leaves {capacity}")
        return SourceText((*self.before, *self.tokenizer.kept(ids, capacity), self.tokenizer.eos_id), cut)

    def __call__(self, sources: Sequence[SourceText]) -> list[Translation]:
        """Translate in order. Batches hold texts of similar length; duplicates are translated once."""
        results: dict[tuple[int, ...], Translation] = {(): Translation("", 0.0, 0, True)}
        order = sorted({one.ids for one in sources} - {()}, key=lambda ids: (len(ids), ids))
        for first in range(0, len(order), self.options.batch_size):
            part = order[first : first + self.options.batch_size]
            results |= dict(zip(part, self._batch(part), strict=True))
        return [results[one.ids] for one in sources]

    @inference_mode()
    def _batch(self, rows: Sequence[tuple[int, ...]]) -> list[Translation]:
        options, device = self.options, self.network.decoder.device
        sources = [torch.tensor(row, device="cpu") for row in rows]
        ids = pad_sequence(sources, batch_first=True, padding_value=self.tokenizer.pad_id)
        valid = padding(torch.tensor(list(map(len, rows)), device=device), ids.shape[1])
        prompt = torch.tensor([self.prompt] * len(rows), device=device)
        limits = [self._limit(len(row)) for row in rows]
        common: dict[str, Any] = {"eos": self.tokenizer.eos_id, "max_new": limits, "processors": self.processors}
        source, length = self.network.encode(ids.to(device), valid), len(self.prompt) + max(limits)
        step, cache = fast_step(self.network.decoder, source, None, length, valid)
        if options.beam_size == 1:
            decoded = greedy(step, prompt, cache, **common)
        else:
            decoded = beam_search(step, prompt, cache, beams=options.beam_size, length_penalty=self._norm,
                               early_stopping=options.early_stopping, **common)  # fmt: skip
        return [self._result(*row) for row in zip(decoded.ids, decoded.logprobs, limits, strict=True)]

    def _limit(self, size: int) -> int:
        limit = self.options.max_new_tokens
        return min(int(LENGTH_FACTOR * size) + LENGTH_EXTRA if limit is None else limit, self.capacity)

    def _norm(self, length: int) -> float:
        """As in transformers, the forced language token counts as part of the translation."""
        return float(length + 1 + len(self.forced)) ** self.options.length_penalty

    def _result(self, ids: list[int], logprob: float, limit: int) -> Translation:
        if not math.isfinite(logprob):
            raise CheckpointError(f"model {self.checkpoint.source}: logits are not finite")
        finished = len(ids) < limit
        text = self.tokenizer.decode(ids).strip()
        text = text if finished else text.rstrip(HALF)  # an incomplete character
        tokens = len(ids) + finished
        return Translation(text, logprob / self._norm(tokens - 1), tokens, finished)


class Translator(LoadedModel):
    """Translator: loads an encoder-decoder once, for one direction.

    `source`, `target`: codes of the model ("de") or English names ("German"); a model with one direction needs neither.
    Other options: see `TranslateOptions`. `device`: `auto` is a GPU if there is one; `compute_type`: see
    `prepare_for_inference`.

    Raises UsageError, with close matches for an unknown language; CheckpointError."""

    def __init__(
        self, model: Model | None = None, source: str | None = None, target: str | None = None, *,
        device: str | torch.device | None = "auto", compute_type: str = "auto", **options: Unpack[TranslateArguments],
    ):  # fmt: skip
        TranslateOptions(**options)  # refuses what cannot be before the model is loaded
        if isinstance(model, str) and is_language(model) and not Path(model).exists():
            raise UsageError(f"model {model!r}: is a language; name languages as source=, target= (model comes first)")
        checkpoint = loaded(model, "translate")
        check_translator(checkpoint)
        checkpoint = prepare_for_inference(checkpoint, compute_type, device_of(device, checkpoint))
        self.writer = TranslationWriter(checkpoint, source, target, asked_of(checkpoint, options))
        warn_of_search(checkpoint, options, TranslateOptions, self.writer.tokenizer.pad_id)

    @overload
    def __call__(self, texts: str) -> str: ...
    @overload
    def __call__(self, texts: Sequence[str]) -> list[str]: ...
    def __call__(self, texts: str | Sequence[str]) -> str | list[str]:
        """Translate a text, or several in order. An empty text stays empty. Translations do not depend on the batch.

        Raises TextError for invalid Unicode, or a text that is too long with `on_long` "error". Warns (TextCut) of
        texts and translations that were cut."""
        single = isinstance(texts, str)
        sources = [self.writer.read(text) for text in ([texts] if single else texts_of(texts, "texts"))]
        with self._lock:
            results = self.writer(sources)
        warn_of_cuts([(f"text {i}", *pair) for i, pair in enumerate(zip(sources, results, strict=True), 1)])
        return results[0].text if single else [one.text for one in results]


def translate(
    texts: str | Sequence[str], model: Model | None = None, source: str | None = None, target: str | None = None,
    **options: Unpack[TranslatorArguments],
) -> str | list[str]:  # fmt: skip
    """Translate with a new `Translator`, whose options it takes. Each call loads the model."""
    return Translator(model, source, target, **options)(texts)


def asked_of(checkpoint: Checkpoint, given: Mapping[str, Any]) -> TranslateOptions:
    """Options of a translation, by default those that the checkpoint asks for. Raises UsageError, CheckpointError."""
    options = search_defaults(checkpoint, given, TranslateOptions)
    if "max_new_tokens" not in given:
        options.pop("max_new_tokens", None)  # twice the source is nearer to a translation's length
    return TranslateOptions(**options)


def check_translator(checkpoint: Checkpoint) -> None:
    """Raises UsageError for another kind of model."""
    network = checkpoint.model
    if not isinstance(network, EncoderDecoder) or network.config.decoder.tied is None:
        expected = f"expected an encoder-decoder of text, got {checkpoint.kind}"
        raise UsageError(f"model {checkpoint.source}: {expected}")


def warn_of_cuts(results: Sequence[tuple[str, SourceText, Translation]]) -> None:
    """Warn once of all texts that were cut, and once of all translations; each is given with its name."""
    texts = [(name, one.cut) for name, one, _ in results if one.cut]
    answers = [(name, one.tokens) for name, _, one in results if not one.finished]
    for cut, what in (
        (texts, "was cut to the model's context, losing {} tokens"),
        (answers, "has a translation that was cut after {} tokens"),
    ):
        if cut:
            name, count = cut[0]
            more = f"; {len(cut) - 1} more" if len(cut) > 1 else ""
            warnings.warn(TextCut(f"{name} {what.format(count)}{more}"), stacklevel=3)
