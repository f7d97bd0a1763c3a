"""Text that continues a prompt, or answers it, by a language model checkpoint."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding import logits as rules
from multimodal.decoding.beam_search import beam, per_token
from multimodal.decoding.sampling import Choice, Decoded, Rule, Step, drawing, greedy, left_padded, sample, streamed
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.cuda_graphs import fast_step
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.encoder_decoder import TextToText
from multimodal.models.text import TextTransformer
from multimodal.system.files import shown
from multimodal.tasks.text.detokenize import HALF, Growing, continuation, cut_at, ends_at
from multimodal.tasks.text.options import GenerateOptions, options_for
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


class Continuation(NamedTuple):
    """`logprob`: the sum over the tokens, the end among them; `score`: that / tokens^`length_penalty`. `stopped` by:
    end, stop, max_tokens or context."""

    text: str
    score: float
    logprob: float
    tokens: int
    stopped: str


def generate(
    prompt: str, model: str | Path | Checkpoint, max_tokens: int = 100, temperature: float | None = None, seed: int = 0,
    *, compute_type: str = "auto", device: str | torch.device | None = None, **options: Any,
) -> str:  # fmt: skip
    """The continuation alone, or what an encoder-decoder answers: up to the end-of-text token, `max_tokens` or the
    model's context.

    `temperature` None or 0 is greedy; `options`: the others of `GenerateOptions`. An empty prompt is begun by the
    vocabulary's begin-of-text token, or its end where it has no other. Raises UsageError, TextError for a prompt that
    leaves no room or has no token, CheckpointError."""
    given = {"max_tokens": max_tokens, "seed": seed, **options}
    given |= {} if temperature is None else {"temperature": temperature}
    ((best, *_),) = generate_many([prompt], model, compute_type=compute_type, device=device, **given)
    return best.text


def generate_many(
    prompts: Iterable[str], model: str | Path | Checkpoint, *, batch_size: int = 8, compute_type: str = "auto",
    device: str | torch.device | None = None, **options: Any,
) -> Iterator[list[Continuation]]:  # fmt: skip
    """Of each prompt in turn its continuations, the best first, as soon as its batch is done. They depend on the
    prompt, the options and the seed, not on the batch. Raises as `generate`."""
    write = TextWriter(prepared(model, compute_type, device), options_for(options))
    if isinstance(prompts, str | bytes):
        raise TextError(f"prompts: expected several texts ({shown(prompts)})")
    several = iter(prompts)
    return (
        found
        for batch in iter(lambda: list(islice(several, batch_size)), [])
        for found in write(list(map(write.ids, batch)))
    )


def stream(
    prompt: str, model: str | Path | Checkpoint, *, compute_type: str = "auto",
    device: str | torch.device | None = None, **options: Any,
) -> Iterator[str]:  # fmt: skip
    """What `generate` gives, in parts as they come: whole letters, and nothing that a later token could take back.
    Raises as `generate`, and UsageError for a beam search, which knows its text at the end."""
    return TextWriter(prepared(model, compute_type, device), options_for(options)).stream(prompt)


def prepared(model: str | Path | Checkpoint, compute_type: str, device: str | torch.device | None) -> Checkpoint:
    """The checkpoint as it computes. Raises UsageError, CheckpointError."""
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    network = checkpoint.model
    decoder = network.decoder if isinstance(network, TextToText) else network
    if not isinstance(decoder, TextTransformer) or decoder.config.tied is None or not decoder.config.causal:
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, generation needs a language model")
    if decoder is not network and checkpoint.tokenizer is not None and checkpoint.tokenizer.language_ids:
        raise UsageError(f"model {checkpoint.source}: needs a language to write in; that is what translate is for")
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
    return prepare_for_inference(checkpoint, compute_type, device or decoder.device)


class TextWriter:
    """A language model with its options; called with prompts it gives the continuations of each, the best first."""

    def __init__(self, checkpoint: Checkpoint, options: GenerateOptions):
        self.checkpoint, self.options, self.tokenizer = checkpoint, options, checkpoint.tokenizer
        network = checkpoint.model
        self.encoder = network if isinstance(network, TextToText) else None
        self.decoder: TextTransformer = network if self.encoder is None else network.decoder
        self.eos = -1 if self.tokenizer.eos_id is None else self.tokenizer.eos_id
        # the positions that a prompt takes: an answer to a source has its own
        config = self.decoder.config if self.encoder is None else self.encoder.config.encoder
        self.limit, self.context = config.limit, config.context

    def ids(self, prompt: str, name: str = "prompt") -> list[int]:
        """A prompt as the model is to read it; see `GenerateOptions.on_long`. Warns of one that is cut or leaves the
        context, raises TextError for one that cannot be used; both call it by its `name`."""
        head, ids, tail = self._parts(prompt, name)
        if not head + ids + tail:
            raise TextError(f"{name}: is empty, and this vocabulary has no token for the begin or end of a text")
        most = self.limit or (self.context if self.options.on_long == "cut" else math.inf)
        count = len(head + ids + tail)
        if count > most:
            if self.options.on_long == "error":
                raise TextError(f"{name}: has {count} tokens, the model's context is {most} (on_long cut cuts it)")
            # room for what is asked for, but at least half of the context for the prompt
            room = most - (min(self.options.max_tokens - 1, most // 2) if self.encoder is None else 0)
            kept = max(room - len(head + tail), 1)
            warnings.warn(f"{name}: {len(ids) - kept} of {count} tokens are cut from the left", stacklevel=2)
            ids = ids[-kept:]
        elif count > self.context:
            made = f"the model is made for {self.context}"
            warnings.warn(f"{name}: has {count} tokens, {made}: what follows may make no sense", stacklevel=2)
        return head + ids + tail

    def _parts(self, prompt: str, name: str) -> tuple[list[int], list[int], list[int]]:
        """The ids of a text and the control ids before and after it."""
        begin, end = self.tokenizer.bos_id, self.tokenizer.eos_id if self.encoder is not None else None
        try:
            ids = self.tokenizer.encode(prompt)
        except TextError as error:
            raise TextError(f"{name}: {error}") from None
        if not ids and begin is None and end is None:
            begin = self.tokenizer.eos_id
        return [] if begin is None else [begin], ids, [] if end is None else [end]

    def fits(self, prompt: str) -> bool:
        """Whether prompt and continuation are within the context that the model is made for."""
        count = sum(map(len, self._parts(prompt, "prompt")))
        return count + (self.options.max_tokens - 1 if self.encoder is None else 0) <= self.context

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow."""
        limit = self.decoder.config.limit
        begun = len(prompt) if self.encoder is None else 1
        return self.options.max_tokens if limit is None else min(self.options.max_tokens, limit - begun + 1)

    def started(
        self, prompts: list[list[int]], most: int | None = None
    ) -> tuple[Step, Cache, Int[Tensor, "B T"]]:  # fmt: skip
        """A step, its cache and the ids that it begins with; `most` new tokens, or None where the step shall take
        several at once and give the logits of all."""
        device = self.decoder.device
        source = valid = None
        if self.encoder is None:
            ids, start = left_padded(prompts, device)
        else:
            lengths = torch.tensor([len(prompt) for prompt in prompts])
            valid = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
            rows = [prompt + [0] * (valid.shape[1] - len(prompt)) for prompt in prompts]
            source = self.encoder.encode(torch.tensor(rows, device=device), valid)
            ids, start = torch.full((len(prompts), 1), self.encoder.config.start_id, device=device), None
        if most is None:
            return partial(self._plain, source, valid), self.decoder.new_cache(start), ids
        return *fast_step(self.decoder, source, start, ids.shape[1] + most, valid, last=1), ids

    def _plain(
        self, source: Tensor | None, valid: Tensor | None, ids: Int[Tensor, "B T"], cache: Cache
    ) -> Float[Tensor, "B N V"]:
        return self.decoder(ids, source, valid, cache=cache, last=None if cache.length else 1)

    @torch.inference_mode()
    def __call__(self, rows: list[list[int]]) -> list[list[Continuation]]:
        """Of prompts as `ids` gives them."""
        if not rows:
            return []
        options = self.options
        limits = [self.room(row) for row in rows]
        step, cache, ids = self.started(rows, max(limits))
        common = {"eos": self.eos, "max_new": limits, "rules": self._rules(ids.shape[1])}
        if options.temperature > 0:
            chance = [torch.Generator().manual_seed(options.seed) for _ in rows]
            found = sample(step, ids, cache, temperature=options.temperature, generators=chance,
                           copies=options.num_return, narrow=self._narrowed, **common)  # fmt: skip
        elif options.beam_size > 1:
            found = beam(step, ids, cache, beams=options.beam_size, keep=options.num_return, early_stopping=False,
                         length_penalty=per_token(options.length_penalty), **common)  # fmt: skip
        else:
            found = greedy(step, ids, cache, **common)
        each, made = options.num_return, list(zip(*found, strict=True))
        return [
            self._ranked(row, made[at * each : (at + 1) * each], limit)
            for at, (row, limit) in enumerate(zip(rows, limits, strict=True))
        ]

    def stream(self, prompt: str) -> Iterator[str]:
        """What is written for the prompt, in parts."""
        if self.options.beam_size > 1 or self.options.num_return > 1:
            raise UsageError("stream: is for one text, which no beam search chooses at the end")
        row = self.ids(prompt)
        return self._streamed(row, self.room(row))

    @torch.inference_mode()
    def _streamed(self, row: list[int], limit: int) -> Iterator[str]:
        step, cache, ids = self.started([row], limit)
        steps = streamed(step, ids, cache, eos=self.eos, max_new=limit, rules=self._rules(ids.shape[1]),
                         choose=self._choice())  # fmt: skip
        growing = Growing(self.tokenizer, self._before(row), self.options.stop)
        while True:
            try:
                token = int(next(steps))
            except StopIteration as end:
                found: Decoded = end.value
                break
            if token != self.eos and (text := growing.add(token)):
                yield text
        done = self._continuation(row, found.ids[0], found.logprobs[0], limit)
        if text := growing.end(done.stopped in ("end", "stop")):
            yield text

    def _choice(self) -> Choice | None:
        options = self.options
        if options.temperature == 0:
            return None
        return drawing(options.temperature, [torch.Generator().manual_seed(options.seed)], narrow=self._narrowed)

    def _rules(self, start: int) -> list[Rule]:
        options, found = self.options, []
        if options.repetition_penalty != 1:
            found.append(rules.repetition_penalty(options.repetition_penalty))
        if options.no_repeat_ngram:
            found.append(rules.no_repeat(options.no_repeat_ngram))
        if self.eos < 0:
            return found
        if options.min_tokens:
            found.append(rules.at_least(options.min_tokens, self.eos, start))
        found += [rules.or_end(self.eos)] if found else []
        return found + ([ends_at(options.stop, self.tokenizer, start)] if options.stop else [])

    def _narrowed(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        self.check(not logits.isnan().any())  # which no draw survives
        return rules.narrowed(self.options.top_k, self.options.top_p, self.options.min_p)(logits)

    def check(self, finite: bool) -> None:
        """Raises CheckpointError."""
        if not finite:
            raise CheckpointError(f"model {self.checkpoint.source}: gives logits that are not finite")

    def _before(self, row: list[int]) -> list[int]:
        """The ids that a text goes on from."""
        return row if self.encoder is None else []

    def _ranked(self, row: list[int], found: list[tuple[list[int], float]], limit: int) -> list[Continuation]:
        found = [one for one in found if one[1] > -math.inf] or found
        self.check(all(math.isfinite(logprob) for _, logprob in found))
        made = [self._continuation(row, *one, limit) for one in found]
        return sorted(made, key=lambda one: -one.score)

    def _continuation(self, row: list[int], ids: list[int], logprob: float, limit: int) -> Continuation:
        ended = len(ids) < limit
        text, stop = cut_at(continuation(self.tokenizer, self._before(row), ids), self.options.stop)
        stopped = "stop" if stop else "end" if ended else "context" if limit < self.options.max_tokens else "max_tokens"
        if stopped == "context":
            context = self.decoder.config.limit
            warnings.warn(f"text: ends after {limit} tokens, as the model's context is {context}", stacklevel=3)
        elif self.encoder is None and self.limit is None and len(row) <= self.context < len(row) + len(ids) - 1:
            warnings.warn(f"text: goes on beyond the {self.context} tokens that the model is made for", stacklevel=3)
        text = text if ended or stop else text.rstrip(HALF)  # half a letter
        tokens = len(ids) + ended
        return Continuation(text, logprob / float(tokens) ** self.options.length_penalty, logprob, tokens, stopped)
