"""Text generation: continue a prompt, or answer it, with a language model."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import padding
from multimodal.decoding import logits as processors
from multimodal.decoding.beam_search import beam_search, per_token
from multimodal.decoding.sampling import (
    LogitsProcessor,
    MultinomialSampler,
    SampledTokens,
    Sampler,
    Step,
    StopRule,
    generate_steps,
    greedy,
    left_pad,
    sample,
)
from multimodal.errors import CheckpointError, MultimodalError, TextError, UsageError
from multimodal.inference.cuda_graphs import fast_step
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.tasks.encode.arguments import GeneratorArguments, PromptArguments
from multimodal.tasks.encode.loaded import Items, LoadedModel, Model, answered, device_of, loaded
from multimodal.tasks.encode.search_defaults import (
    FORCED,
    banned_tokens,
    forced_token,
    search_defaults,
    search_settings,
    source_ngram,
    warn_of_search,
)
from multimodal.tasks.text.detokenize import HALF, IncrementalDetokenizer, continuation, cut_at, stop_rule
from multimodal.tasks.text.options import GenerateOptions, PromptOptions, prompt_options
from multimodal.tokens.chat.messages import read_messages
from multimodal.weights.folder import Checkpoint


class Continuation(NamedTuple):
    """`logprob`: sum over the tokens including the end; `score`: `logprob` / tokens^`length_penalty`. `stopped`: "end",
    "stop", "max_new_tokens" or "context". `ids`: the tokens without the end; those of a stop string are among them."""

    text: str
    score: float
    logprob: float
    tokens: int
    stopped: str
    ids: Sequence[int] = ()


class Generator(LoadedModel):
    """Text generator: loads a language model, or an encoder-decoder that answers, once.

    `options`: see `PromptOptions`. `device`: `auto` is a GPU if there is one; `compute_type`: see
    `prepare_for_inference`. Raises UsageError, CheckpointError."""

    def __init__(
        self, model: Model | None = None, *, device: str | torch.device | None = "auto", compute_type: str = "auto",
        **options: Unpack[PromptArguments],
    ):  # fmt: skip
        checkpoint = prepared(model, compute_type, device)
        self.writer = TextWriter(checkpoint, prompt_options(search_defaults(checkpoint, options, GenerateOptions)))
        warn_of_search(checkpoint, options, GenerateOptions)

    def __call__(self, prompt: str) -> str:
        """The continuation of a prompt, or an encoder-decoder's answer, up to the end-of-text token, `max_new_tokens`
        or the model's context.

        An empty prompt starts with the begin-of-text token, or end-of-text in vocabularies without one. Raises
        TextError for a prompt that fills the context or has no token."""
        with self._lock:
            ((best, *_),) = self.writer([self.writer.ids(prompt)])
        return best.text

    def many(self, prompts: Iterable[str]) -> Iterator[list[Continuation] | MultimodalError]:
        """Yield the continuations of each prompt, best first, batch by batch; a prompt that fails gives its error.
        Continuations do not depend on the batch."""
        items, write = Items(prompts, keyed=False, paths=False, name="prompts"), self.writer
        read = lambda item: write.ids(item.source, f"prompt {item.position + 1}")
        return self._queued(answered(items, write.options.batch_size, read, write))

    def stream(self, prompt: str) -> Iterator[str]:
        """Yield the text piece by piece: whole characters, and nothing that a later token could retract. Raises
        UsageError for a beam search, whose text is known only at the end. Any thread may take the next piece; other
        calls take turns with the pieces."""
        return self._queued(self.writer.stream(prompt))


def generate(prompt: str, model: Model | None = None, **options: Unpack[GeneratorArguments]) -> str:
    """Continue a prompt with a new `Generator`, whose options it takes. Each call loads the model."""
    return Generator(model, **options)(prompt)


def generate_many(
    prompts: Iterable[str], model: Model | None = None, **options: Unpack[GeneratorArguments]
) -> Iterator[list[Continuation] | MultimodalError]:
    """`Generator.many` of a new `Generator`."""
    return Generator(model, **options).many(prompts)


def prepared(model: Model | None, compute_type: str, device: str | torch.device | None) -> Checkpoint:
    """Load and check a language model and prepare it for inference. Raises UsageError, CheckpointError."""
    checkpoint = loaded(model, "generate")
    network = checkpoint.model
    decoder = network.decoder if isinstance(network, EncoderDecoder) else network
    if not isinstance(decoder, TextTransformer) or decoder.config.tied is None or not decoder.config.causal:
        raise UsageError(f"model {checkpoint.source}: expected a language model, got {checkpoint.kind}")
    if decoder is not network and checkpoint.tokenizer is not None and checkpoint.tokenizer.language_ids:
        raise UsageError(f"model {checkpoint.source}: needs a target language: use translate")
    checkpoint.required_tokenizer()
    return prepare_for_inference(checkpoint, compute_type, device_of(device, checkpoint))


def end_ids(checkpoint: Checkpoint) -> list[int]:
    """Ids that end a text of the model, that of a chat first."""
    tokenizer, further = checkpoint.required_tokenizer(), search_settings(checkpoint).get("eos_token_id", [])
    own = [*([] if tokenizer.eos_id is None else [tokenizer.eos_id]), *tokenizer.end_ids, *further]
    return list(dict.fromkeys([*(checkpoint.chat.end_ids(tokenizer) if checkpoint.chat else []), *own]))


class TextWriter:
    """Language model with options; called with encoded prompts, it returns the continuations of each, best first."""

    def __init__(self, checkpoint: Checkpoint, options: GenerateOptions):
        self.checkpoint, self.options, self.tokenizer = checkpoint, options, checkpoint.tokenizer
        self.chats = isinstance(options, PromptOptions) and options.chat
        if self.chats and checkpoint.chat is None:
            raise UsageError(f"needs a model with a chat template ({checkpoint.source} has none)", argument="chat")
        network = checkpoint.model
        self.encoder = network if isinstance(network, EncoderDecoder) else None
        self.decoder: TextTransformer = getattr(network, "decoder", network)
        self.penalties: processors.Penalties | None = None
        self.interrupt: Callable[[], None] | None = None  # called before each step; what it raises ends the call
        self.seeds: Sequence[int] = ()  # of each prompt of a call; (): the options' for all
        self.prefix = self.encoder is None and checkpoint.card.get("objective") == "prefix"
        self.source_ngram = source_ngram(checkpoint)
        self.first: int | None = None  # of an encoder-decoder's text, where the checkpoint forces no other
        self.ends = end_ids(checkpoint)
        # context of the prompt: an encoder-decoder's answer has its own
        config = self.decoder.config if self.encoder is None else self.encoder.config.encoder
        self.limit, self.context = config.limit, config.context

    def ids(self, prompt: str, name: str = "prompt") -> list[int]:
        """Encode a prompt, cut as in `GenerateOptions.on_long`. Warns of one that is cut or exceeds the context, raises
        TextError for an unusable one, naming it `name`."""
        head, ids, tail = self._parts(prompt, name)
        if not head + ids + tail:
            raise TextError(f"{name}: is empty, and the vocabulary has no begin-of-text or end-of-text token")
        most = self.limit or (self.context if self.options.on_long == "cut" else math.inf)
        count = len(head + ids + tail)
        if count > most:
            if self.options.on_long == "error" or self.chats:
                raise TextError(f"{name}: has {count} tokens, the model's context is {most} (on_long cut cuts it)")
            # leave room for max_new_tokens, but at least half of the context for the prompt
            capacity = most - (min(self.options.max_new_tokens - 1, most // 2) if self.encoder is None else 0)
            kept = max(capacity - len(head + tail), 1)
            warnings.warn(f"{name}: {len(ids) - kept} of {count} tokens are cut from the left", stacklevel=2)
            ids = ids[-kept:]
        elif count > self.context:
            trained = f"the model was trained on {self.context}"
            warnings.warn(f"{name}: has {count} tokens, {trained}: the text may be meaningless", stacklevel=2)
        return head + ids + tail

    def _parts(self, prompt: str, name: str) -> tuple[list[int], list[int], list[int]]:
        """(control ids before a text, its ids, control ids after it); a chat's are all before."""
        if self.chats:
            return self._chat(prompt, name), [], []
        begin, end = self.tokenizer.bos_id, self.tokenizer.eos_id if self.encoder is not None else None
        try:
            ids = self.tokenizer.encode(prompt)
        except TextError as error:
            raise TextError(f"{name}: {error}") from None
        if not ids and begin is None and end is None:
            begin = self.tokenizer.eos_id
        return [] if begin is None else [begin], ids, [] if end is None else [end]

    def _chat(self, prompt: str, name: str) -> list[int]:
        """Ids of a conversation that the prompt begins."""
        system = [] if self.options.system is None else [{"role": "system", "content": self.options.system}]
        messages = read_messages([*system, {"role": "user", "content": prompt}])
        where = f"model {self.checkpoint.source}: chat template"
        try:
            return self.checkpoint.chat.ids(messages, [], self.tokenizer, where)[0]
        except TextError as error:
            raise TextError(f"{name}: {error}") from None

    def fits(self, prompt: str) -> bool:
        """Return True if prompt and continuation fit the context that the model was trained on."""
        count = sum(map(len, self._parts(prompt, "prompt")))
        return count + (self.options.max_new_tokens - 1 if self.encoder is None else 0) <= self.context

    def max_new(self, prompt: Sequence[int]) -> int:
        """Maximum number of new tokens."""
        begun = len(prompt) if self.encoder is None else 1
        limit = self.decoder.config.limit_from(begun)
        return self.options.max_new_tokens if limit is None else min(self.options.max_new_tokens, limit - begun + 1)

    def start(
        self, prompts: list[list[int]], most: int | None = None
    ) -> tuple[Step, Cache, Int[Tensor, "B T"]]:  # fmt: skip
        """(step, cache, first ids) for up to `most` new tokens; None for a step that takes several tokens at once and
        returns the logits of all."""
        device = self.decoder.device
        source = valid = None
        if self.encoder is None:
            ids, start = left_pad(prompts, device)
        else:
            rows = pad_sequence([torch.tensor(one, device="cpu") for one in prompts], batch_first=True).to(device)
            valid = padding(torch.tensor(list(map(len, prompts)), device=device), rows.shape[1])
            source = self.encoder.encode(rows, valid)
            ids, start = torch.full((len(prompts), 1), self.encoder.config.start_id, device=device), None
        if most is None:
            step, cache = partial(self._plain, source, valid), self.decoder.new_cache(start)
        else:
            step, cache = fast_step(self.decoder, source, start, ids.shape[1] + most, valid, last=1)
        return partial(self._prefixed, step) if self.prefix else step, cache, ids

    def _prefixed(self, step: Step, ids: Int[Tensor, "B T"], cache: Cache) -> Float[Tensor, "B N V"]:
        """A step of a prefix language model, whose prompt is seen by all of it."""
        if cache.length:
            return step(ids, cache)
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
        return self.decoder.logits(self.decoder.states(ids, cache=cache, mask=seen)[:, -1:])

    @inference_mode()
    def logits(self, prompt: Any, ids: Sequence[int]) -> Float[Tensor, "N V"]:
        """Logits of each of these tokens after an encoded prompt, without the options' processors."""
        step, cache, first = self.start([prompt])
        begin = step(first, cache)[:, -1:]
        rest = [step(torch.tensor([ids[:-1]], device=first.device), cache)] if len(ids) > 1 else []
        return torch.cat([begin, *rest], 1)[0, : len(ids)].float()

    def _plain(
        self, source: Tensor | None, valid: Tensor | None, ids: Int[Tensor, "B T"], cache: Cache
    ) -> Float[Tensor, "B N V"]:
        return self.decoder(ids, source, valid, cache=cache, last=None if cache.length else 1)

    @inference_mode()
    def __call__(self, rows: list[list[int]]) -> list[list[Continuation]]:
        """Generate from prompts encoded by `ids`."""
        if not rows:
            return []
        if len(rows) > 1 and self.source_ngram:  # a ban of each source
            return [self([row])[0] for row in rows]
        options = self.options
        limits = [self.max_new(row) for row in rows]
        step, cache, ids = self.start(rows, max(limits))
        common = {
            "eos": self.ends, "max_new": limits, "processors": self._processors(ids.shape[1], max(limits), rows[0]),
            "stops": self._stops(ids.shape[1]), "interrupt": self.interrupt,
        }  # fmt: skip
        if options.temperature > 0:
            seeds = self.seeds or [options.seed] * len(rows)
            generators = [torch.Generator(ids.device).manual_seed(seed) for seed in seeds]
            decoded = sample(step, ids, cache, temperature=options.temperature, generators=generators,
                           copies=options.num_return, narrow=self.narrow, **common)  # fmt: skip
        elif options.beam_size > 1:
            decoded = beam_search(step, ids, cache, beams=options.beam_size, keep=options.num_return,
                                early_stopping=options.early_stopping,
                                length_penalty=per_token(options.length_penalty), **common)  # fmt: skip
        else:
            decoded = greedy(step, ids, cache, **common)
        each, results = options.num_return, list(zip(*decoded, strict=True))
        return [
            self._ranked(row, results[i * each : (i + 1) * each], limit)
            for i, (row, limit) in enumerate(zip(rows, limits, strict=True))
        ]

    def stream(self, prompt: str) -> Iterator[str]:
        """Yield the continuation piece by piece."""
        self.check_stream()
        return self.pieces(self.ids(prompt))

    def pieces(self, prompt: list[int]) -> Iterator[str]:
        """A generator of the pieces of an encoded prompt's continuation, which returns the whole `Continuation`. Raises
        UsageError for a beam search or several answers."""
        self.check_stream()
        return self._streamed(prompt, self.max_new(prompt))

    def check_stream(self) -> None:
        """Raise UsageError for options whose text is known only at the end."""
        if self.options.beam_size > 1 or self.options.num_return > 1:
            got = f"{self.options.beam_size} and {self.options.num_return}"
            raise UsageError(f"stream: expected beam_size 1 and num_return 1 (got {got})")

    @inference_mode()
    def _streamed(self, row: list[int], limit: int) -> Iterator[str]:
        step, cache, ids = self.start([row], limit)
        chosen = self._processors(ids.shape[1], limit, row)
        steps = generate_steps(step, ids, cache, eos=self.ends, max_new=limit, processors=chosen, choose=self._choice(),
                               stops=self._stops(ids.shape[1]))  # fmt: skip
        detokenizer = IncrementalDetokenizer(self.tokenizer, self.before(row), self.options.stop)
        while True:
            try:
                token = int(next(steps))
            except StopIteration as end:
                decoded: SampledTokens = end.value
                break
            if token not in self.ends and (text := detokenizer.add(token)):
                yield text
        self.check(math.isfinite(decoded.logprobs[0]))
        result = self._continuation(row, decoded.ids[0], decoded.logprobs[0], limit)
        if text := detokenizer.end(result.stopped in ("end", "stop")):
            yield text
        return result

    def _choice(self) -> Sampler | None:
        options = self.options
        if options.temperature == 0:
            return None
        generator = torch.Generator(self.decoder.device).manual_seed(options.seed)
        return MultinomialSampler(options.temperature, [generator], narrow=self.narrow)

    def _processors(self, start: int, limit: int, source: Sequence[int] = ()) -> list[LogitsProcessor]:
        options, asked = self.options, partial(banned_tokens, self.checkpoint)
        chosen: list[LogitsProcessor] = [] if self.penalties is None else [self.penalties.processor(start)]
        free = len(chosen)  # these forbid nothing
        if options.repetition_penalty != 1:
            chosen.append(processors.repetition_penalty(options.repetition_penalty))
        if options.no_repeat_ngram:
            chosen.append(processors.no_repeat_ngram(options.no_repeat_ngram))
        if self.source_ngram and source:
            chosen.append(processors.no_ngram_of(source, self.source_ngram))
        if never := [*asked("suppress_tokens"), *({*asked("bad_words_ids")} - {*self.ends})]:
            chosen.append(processors.suppress(never))
        if first := asked("begin_suppress_tokens"):
            chosen.append(processors.suppress_first(first, start + (self._begun() is not None)))
        if not self.ends:
            return chosen
        if options.min_tokens:
            chosen.append(processors.suppress_first(self.ends, start, options.min_tokens))
        chosen += self._forced(start, limit)
        return chosen + ([processors.end_if_all_forbidden(self.ends[0])] if len(chosen) > free else [])

    def _stops(self, start: int) -> StopRule | None:
        return stop_rule(self.options.stop, self.tokenizer, start) if self.options.stop else None

    def _forced(self, start: int, limit: int) -> list[LogitsProcessor]:
        """The first and last token that an encoder-decoder asks for, such as BART for summaries. Its answers have one
        limit, whatever their prompts."""
        if self.encoder is None:
            return []
        places = ((self._begun(), start), (forced_token(self.checkpoint, FORCED[1]), start + limit - 1))
        return [processors.force([token], at) for token, at in places if token is not None]

    def _begun(self) -> int | None:
        """The first token of an encoder-decoder's text, if it is forced."""
        asked = None if self.encoder is None else forced_token(self.checkpoint, FORCED[0])
        return self.first if asked is None else asked

    @property
    def narrow(self) -> processors.SamplingFilter:
        return processors.SamplingFilter(self.options.top_k, self.options.top_p, self.options.min_p)

    def check(self, finite: bool) -> None:
        """Raises CheckpointError for logits that are not finite."""
        if not finite:
            raise CheckpointError(f"model {self.checkpoint.source}: logits are not finite")

    def before(self, row: list[int]) -> list[int]:
        """The ids that a continuation follows."""
        return row if self.encoder is None else []

    def _ranked(self, row: list[int], results: list[tuple[list[int], float]], limit: int) -> list[Continuation]:
        results = [one for one in results if one[1] != -math.inf] or results
        self.check(all(math.isfinite(logprob) for _, logprob in results))
        continuations = [self._continuation(row, *one, limit) for one in results]
        return sorted(continuations, key=lambda one: -one.score)

    def _continuation(self, row: list[int], ids: list[int], logprob: float, limit: int) -> Continuation:
        ended = len(ids) < limit
        text, stop = cut_at(continuation(self.tokenizer, self.before(row), ids), self.options.stop)
        cut = "context" if limit < self.options.max_new_tokens else "max_new_tokens"
        stopped = "stop" if stop else "end" if ended else cut
        if stopped == "context":
            context = self.decoder.config.limit_from(len(row))
            warnings.warn(f"text: ends after {limit} tokens at the model's context of {context}", stacklevel=3)
        elif self.encoder is None and self.limit is None and len(row) <= self.context < len(row) + len(ids) - 1:
            warnings.warn(f"text: exceeds the {self.context} tokens that the model was trained on", stacklevel=3)
        text = text if ended or stop else text.rstrip(HALF)  # an incomplete character
        tokens = len(ids) + (stopped == "end")
        return Continuation(text, logprob / float(tokens) ** self.options.length_penalty, logprob, tokens, stopped, ids)
