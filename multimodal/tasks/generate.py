"""Text that continues a prompt, by a language model checkpoint."""

from pathlib import Path

import torch

from multimodal import rules
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.models.text import TextTransformer
from multimodal.search import greedy, sample
from multimodal.tasks.caption_options import checked
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def generate(
    prompt: str, model: str | Path | Checkpoint, max_tokens: int = 100, temperature: float = 0.0, seed: int = 0, *,
    top_k: int = 0, top_p: float = 1.0, repetition_penalty: float = 1.0, no_repeat_ngram: int = 0,
) -> str:  # fmt: skip
    """The continuation alone, up to the end-of-text token, `max_tokens` or the model's context.

    Temperature 0 is greedy; above it tokens are drawn with this seed, the same on every run, from the `top_k` (0: all)
    most probable and of these from those with `top_p` of the probability. `repetition_penalty`, `no_repeat_ngram`: as
    those of captions. Raises UsageError, TextError for a prompt that leaves no room, CheckpointError."""
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    network, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not isinstance(network, TextTransformer) or network.config.tied is None or not network.config.causal:
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, generation needs a language model")
    if tokenizer is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
    if temperature < 0:
        raise UsageError(f"temperature: below 0 ({temperature})")
    checked({"temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty,
             "no_repeat_ngram": no_repeat_ngram})  # fmt: skip
    if temperature == 0 and (top_k or top_p < 1):
        raise UsageError(f"top_k {top_k}, top_p {top_p}: are for drawing, and temperature 0 does not draw")
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = start + tokenizer.encode(prompt)
    if not ids:
        raise TextError("prompt: is empty, and this vocabulary has no beginning-of-text token")
    room = network.config.context - len(ids)
    if room < 1:
        raise TextError(f"prompt: has {len(ids)} tokens, the model's context is {network.config.context}")
    found = [rules.repetition_penalty(repetition_penalty)] if repetition_penalty != 1 else []
    found += [rules.no_repeat(no_repeat_ngram)] if no_repeat_ngram else []
    found += [rules.or_end(tokenizer.eos_id)] if found else []
    options = {"eos": tokenizer.eos_id, "max_new": min(max_tokens, room), "rules": found}
    rows, cache = torch.tensor([ids]), network.new_cache()

    def step(new: torch.Tensor, held: object) -> torch.Tensor:
        return network(new, cache=held)

    if temperature == 0:
        return tokenizer.decode(greedy(step, rows, cache, **options).ids[0])
    generator = torch.Generator().manual_seed(seed)
    drawn = sample(step, rows, cache, temperature=temperature, generators=[generator],
                   narrow=rules.narrowed(top_k, top_p), **options)  # fmt: skip
    return tokenizer.decode(drawn.ids[0])
