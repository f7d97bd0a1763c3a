"""Captions for pictures, by a captioner checkpoint."""

import math
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.decoding import logits as rules
from multimodal.decoding.beam_search import beam, per_token
from multimodal.decoding.sampling import greedy, sample
from multimodal.errors import CheckpointError, ImageError, TextError, UsageError
from multimodal.inference.cuda_graphs import fast_step
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.captioner import Captioner, Captions, Decoding
from multimodal.tasks.caption.options import CaptionOptions, options_for
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.encode.images import batches, name_of
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def caption(
    images: Any, model: str | Path | Checkpoint, beam_size: int | None = None, max_tokens: int | None = None, *,
    batch_size: int = 16, workers: int | None = None, compute_type: str = "auto",
    device: str | torch.device | None = None, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Captions of one or several pictures (path, bytes or PIL image), in their order: `file`, `caption`, `score`
    (log-probability / tokens^`length_penalty`: with the default its mean a token), `logprob` (the sum), `tokens` (the
    end counted), `finished` (False: cut at `max_tokens`), and with `num_captions` above 1 `captions`, the best first,
    each with these and its `count`: how many sequences of tokens gave this very text.

    `options`: those of `CaptionOptions`; what is not given is as the model's card has it under "caption". A caption
    depends on its picture, the options and the seed, not on `batch_size` pictures that are captioned together and
    `workers` threads that decode them. `compute_type`: see `prepare_for_inference`; `device` None: where the model is.

    Raises ImageError, UsageError, TextError (a prompt that leaves no room), CheckpointError."""
    given = {"beam_size": beam_size, "max_tokens": max_tokens}
    options |= {name: value for name, value in given.items() if value is not None}
    several = list(images) if isinstance(images, list | tuple) else [images]
    if not several:
        raise UsageError("images: there are none")
    found = []
    for _, result in caption_many(
        several, model, batch_size=batch_size, workers=workers, compute_type=compute_type, device=device, **options
    ):
        if isinstance(result, ImageError):
            raise result
        found.append(result)
    return found


def caption_many(
    images: Iterable[Any], model: str | Path | Checkpoint, *, batch_size: int = 16, workers: int | None = None,
    compute_type: str = "auto", device: str | torch.device | None = None, **options: Any,
) -> Iterator[tuple[Any, dict[str, Any] | ImageError]]:  # fmt: skip
    """(picture, its `caption` result) as soon as it is there; an ImageError stands in the place of a result. Raises as
    `caption`, but for a picture's own errors, before a picture is read."""
    write = CaptionWriter(*prepared(model, compute_type, device, options))
    found = written(images, write, batch_size, workers)
    return ((image, one if isinstance(one, ImageError) else write.record(image, one.captions)) for image, one in found)


def prepared(
    model: str | Path | Checkpoint, compute_type: str, device: str | torch.device | None, options: dict[str, Any]
) -> tuple[Checkpoint, CaptionOptions]:
    """The checkpoint as it computes, and all options. Raises UsageError, CheckpointError."""
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    if not isinstance(checkpoint.model, Captions):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, captions need a captioner")
    chosen = options_for(checkpoint, options)
    device = device or next(checkpoint.model.parameters()).device
    return prepare_for_inference(checkpoint, compute_type, device), chosen


def written(
    images: Iterable[Any], write: "CaptionWriter", batch_size: int, workers: int | None
) -> Iterator[tuple[Any, "Written | ImageError"]]:
    """(picture, what was written for it) as soon as it is there; an ImageError stands in its place."""
    for pictures in batches(images, write.checkpoint.preprocessing, batch_size, workers):
        yield from pictures.refused
        found = in_parts(partial(_captions, write, pictures.pixels), len(pictures.read))
        for image, pixels, captions in zip(pictures.read, pictures.pixels, found, strict=True):
            if isinstance(captions, Exception):
                yield image, item_error(captions, name_of(image), ImageError)
            else:
                yield image, Written(pixels, captions)


def _captions(write: "CaptionWriter", pixels: Float[Tensor, "B 3 H W"], part: slice) -> list[list["Caption"]]:
    return write(pixels[part])


class Written(NamedTuple):
    """A picture as the model saw it, and its captions, the best first."""

    pixels: Float[Tensor, "3 H W"]
    captions: list["Caption"]


class Caption(NamedTuple):
    """`ids` as the search gave them, without prompt and end; `count`: how many sequences gave this text."""

    text: str
    ids: list[int]
    score: float
    logprob: float
    tokens: int
    finished: bool
    count: int

    def record(self) -> dict[str, Any]:
        """What users see of it."""
        names = ("score", "logprob", "tokens", "finished")
        return {"caption": self.text, **{name: getattr(self, name) for name in names}}


class CaptionWriter:
    """A captioner with all that its options ask for made ready; called with pixels it gives the captions of each
    picture, the best first.

    Raises CheckpointError where tokenizer or preprocessing are not known, TextError for a prompt that leaves no room,
    UsageError for `min_tokens` that the context does not hold."""

    def __init__(self, checkpoint: Checkpoint, options: CaptionOptions):
        self.checkpoint, self.options = checkpoint, options
        self.network, tokenizer = checkpoint.model, checkpoint.tokenizer
        known_preprocessing(checkpoint)
        if tokenizer is None:
            raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise CheckpointError(f"model {checkpoint.source}: its vocabulary has no token for begin or end of a text")
        self.device = next(self.network.parameters()).device
        self.prompt = [tokenizer.bos_id, *tokenizer.encode(options.prompt)]
        self.limit = self._limit()
        self.rules = self._rules(tokenizer.eos_id)

    def _limit(self) -> int:
        context, options = self.network.caption_context, self.options
        room = context - len(self.prompt)
        if room < 1:
            raise TextError(f"prompt: has {len(self.prompt) - 1} tokens, the model's context is {context}")
        if options.min_tokens > room:
            raise UsageError(f"min_tokens {options.min_tokens}: the model's context leaves {room}")
        if options.max_tokens > room and options.max_tokens != CaptionOptions.max_tokens:
            warnings.warn(f"max_tokens {options.max_tokens}: the model's context leaves {room}", stacklevel=4)
        return min(options.max_tokens, room)

    def _rules(self, eos: int) -> list[rules.Rule]:
        options, found = self.options, []
        if options.repetition_penalty != 1:
            found += [rules.normalised] if options.beam_size > 1 else []
            found.append(rules.repetition_penalty(options.repetition_penalty))
        if options.no_repeat_ngram:
            found.append(rules.no_repeat(options.no_repeat_ngram))
        if options.min_tokens:
            found.append(rules.at_least(options.min_tokens, eos, len(self.prompt)))
        return [*found, rules.or_end(eos)] if found else []

    @torch.inference_mode()
    def __call__(self, pixels: Float[Tensor, "B 3 H W"]) -> list[list[Caption]]:
        options = self.options
        step, cache = self._decoding(self.network.encode(pixels.to(self.device, non_blocking=True)))
        prompt = torch.tensor([self.prompt] * len(pixels), device=self.device)
        common = {"eos": self.checkpoint.tokenizer.eos_id, "max_new": self.limit, "rules": self.rules}
        if options.temperature > 0:
            chance = [torch.Generator().manual_seed(options.seed) for _ in pixels]
            found = sample(step, prompt, cache, temperature=options.temperature, generators=chance,
                           copies=options.num_captions, narrow=self._narrowed, **common)  # fmt: skip
        elif options.beam_size > 1:
            found = beam(step, prompt, cache, beams=options.beam_size, patience=math.inf, keep=options.num_captions,
                         length_penalty=per_token(options.length_penalty), **common)  # fmt: skip
        else:
            found = greedy(step, prompt, cache, **common)
        rows, each = list(zip(*found, strict=True)), options.num_captions
        return [self._captions(rows[first : first + each]) for first in range(0, len(rows), each)]

    def _decoding(self, source: Float[Tensor, "B S _"]) -> Decoding:
        """The network's own; of a plain decoder with what a GPU can replay."""
        if isinstance(self.network, Captioner):
            return fast_step(self.network.decoder, source, None, len(self.prompt) + self.limit, last=1)
        return self.network.decoding(source)

    def _narrowed(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        self._check(not logits.isnan().any())  # which no draw survives
        return rules.narrowed(self.options.top_k, self.options.top_p)(logits)

    def _check(self, finite: bool) -> None:
        if not finite:
            raise CheckpointError(f"model {self.checkpoint.source}: gives logits that are not finite")

    def _captions(self, rows: list[tuple[list[int], float]]) -> list[Caption]:
        """Those of one picture; of equal texts the best."""
        texts: dict[str, Caption] = {}
        rows = [row for row in rows if row[1] > -math.inf] or rows
        self._check(all(map(math.isfinite, (logprob for _, logprob in rows))))
        for one in sorted((self._caption(*row) for row in rows), key=lambda one: (not one.finished, -one.score)):
            held = texts.setdefault(one.text, one._replace(count=0))
            texts[one.text] = held._replace(count=held.count + 1)
        return list(texts.values())

    def _caption(self, ids: list[int], logprob: float) -> Caption:
        finished = len(ids) < self.limit
        text = self.checkpoint.tokenizer.decode([*self.prompt, *ids]).strip()
        text = text if finished else text.rstrip("\ufffd")  # half a letter
        tokens = len(ids) + finished
        return Caption(text, ids, logprob / float(tokens) ** self.options.length_penalty, logprob, tokens, finished, 1)

    def record(self, image: Any, found: list[Caption]) -> dict[str, Any]:
        """What `caption` gives for a picture; warns of an empty caption, and of one that the rules ended."""
        best, name = found[0], name_of(image)
        if not best.text:
            warnings.warn(f"{name}: the caption is empty; min_tokens 1 or more asks for a longer one", stacklevel=2)
        if best.finished and len(best.ids) < self.options.min_tokens:
            few = f"ends after {len(best.ids)} tokens, under min_tokens {self.options.min_tokens}"
            warnings.warn(f"{name}: the caption {few}: the rules forbid every other token", stacklevel=2)
        several = [{**one.record(), "count": one.count} for one in found]
        return {"file": name, **best.record(), **({"captions": several} if self.options.num_captions > 1 else {})}
