"""Text that continues a prompt, by a language model checkpoint."""

from pathlib import Path

import torch

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.models.text import TextTransformer
from multimodal.search import greedy, sample
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def generate(
    prompt: str, model: str | Path | Checkpoint, max_tokens: int = 100, temperature: float = 0.0, seed: int = 0
) -> str:
    """The continuation alone, up to the end-of-text token, `max_tokens` or the model's context.

    Temperature 0 is greedy; above it tokens are drawn with this seed, the same on every run.
    Raises UsageError, TextError for a prompt that leaves no room, CheckpointError."""
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    network, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not isinstance(network, TextTransformer) or network.config.tied is None or not network.config.causal:
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, generation needs a language model")
    if tokenizer is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
    if temperature < 0:
        raise UsageError(f"temperature: below 0 ({temperature})")
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = start + tokenizer.encode(prompt)
    if not ids:
        raise TextError("prompt: is empty, and this vocabulary has no beginning-of-text token")
    room = network.config.context - len(ids)
    if room < 1:
        raise TextError(f"prompt: has {len(ids)} tokens, the model's context is {network.config.context}")
    options = {"eos": tokenizer.eos_id, "max_new": min(max_tokens, room)}
    rows, cache = torch.tensor([ids]), network.new_cache()

    def step(new: torch.Tensor, held: object) -> torch.Tensor:
        return network(new, cache=held)

    if temperature == 0:
        return tokenizer.decode(greedy(step, rows, cache, **options).ids[0])
    generator = torch.Generator().manual_seed(seed)
    found = sample(step, rows, cache, temperature=temperature, generators=[generator], **options)
    return tokenizer.decode(found.ids[0])
