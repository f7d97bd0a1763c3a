"""Induction heads: attention to the token that followed last time (Olsson et al. 2022)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.capture import capture_attention
from multimodal.blocks.layers import PlusRMSNorm
from multimodal.errors import UsageError
from multimodal.models.text import TextTransformer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.encode import evaluating

AT_ONCE = 2**27  # attention weights in memory
MOST = 2**15  # tokens of a row for unlimited positions: attention is quadratic


class Induction(NamedTuple):
    """`prefix_matching`: mean attention from a token of the second copy to the token after its first occurrence (Olsson
    et al. 2022, "prefix matching score"). `previous`: mean attention to the previous token. `losses`: nats per token of
    the first and of the second copy, without the unpredictable first tokens; None for a model without logits."""

    prefix_matching: Float[Tensor, "L H"]
    previous: Float[Tensor, "L H"]
    losses: tuple[float, float] | None


@torch.no_grad()
def induction(
    model: nn.Module, vocabulary: int | Sequence[int], length: int = 50, rows: int = 16, seed: int = 0,
    begin: int | None = None,
) -> Induction:  # fmt: skip
    """Score the heads of a causal TextTransformer on random sequences of `length` tokens, each repeated once.

    `vocabulary`: ids to draw from, or their number; leave out control ids (`usable_ids`). Tokens of one copy are
    distinct if there are enough. `begin`: id before each row. Runs in eval mode and restores the mode. Raises
    UsageError for another model or an invalid length."""
    if not isinstance(model, TextTransformer) or not model.config.causal:
        raise UsageError(f"induction: expected a causal language model, got {type(model).__name__}")
    first = int(begin is not None)
    most = MOST if model.config.limit is None else model.config.limit
    if length < 2 or 2 * length + first > most:
        raise UsageError(f"length must be at least 2 and two copies fit into the context of {most} tokens "
                         f"(got {length}: {2 * length + first} tokens)")  # fmt: skip
    ids = _repeated(vocabulary, length, rows, seed)
    ids = F.pad(ids, (first, 0), value=begin or 0).to(model.device)
    block = model.config.stack
    each = block.layers * block.block.attention.heads * ids.shape[1] ** 2
    with evaluating(model):
        parts = [_scores(model, part, length) for part in ids.split(max(1, AT_ONCE // each))]
    matching, previous, losses = (torch.cat(one).mean(0) for one in zip(*parts, strict=True))
    return Induction(matching, previous, None if model.config.tied is None else tuple(losses.tolist()))


def usable_ids(tokenizer: Tokenizer) -> list[int]:
    """All ids except control tokens."""
    control = tokenizer.control | {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id}
    return [number for number in range(tokenizer.vocab_size) if number not in control]


@torch.no_grad()
def copying(
    model: TextTransformer, vocabulary: int | Sequence[int], length: int = 25, rows: int = 16, seed: int = 0
) -> Float[Tensor, "L H"]:
    """Copying score of each head, in -1..1 (after Olsson et al. 2022, "copying score"): on random tokens, the share of
    its attention on tokens whose own logit it raises above the mean of all logits, times 2, minus 1. Chance is 0.

    The effect of a head is the direct one: its output for a token, through the gain of the last norm and the output
    matrix. Runs in eval mode and restores the mode; the model must have logits."""
    ids = _repeated(vocabulary, length, rows, seed)[:, :length].to(model.device)
    attentions = [model.stack.blocks[i % len(model.stack.blocks)].attention for i in range(model.config.stack.layers)]
    inputs: list[Tensor] = []
    hooks = [module.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for module in {*attentions}]
    try:
        with evaluating(model), capture_attention() as captured:
            model.states(ids)
        nothing = model.logits(torch.zeros(1, 1, model.config.width, device=model.device))
        norm = model.stack.norm
        gain = 1.0 if norm is None else norm.gain if isinstance(norm, PlusRMSNorm) else norm.weight
        scores = []
        for module, x, (_, weights) in zip(attentions, inputs, captured, strict=True):
            values = module.split(module.value(x)).repeat_interleave(module.heads // module.kv_heads, 1)
            maps = module.out.weight.unflatten(1, (module.heads, -1))  # [D H E]
            for head in range(module.heads):
                raised = model.logits(values[:, head] @ maps[:, head].T * gain) - nothing
                own = raised.gather(-1, ids[..., None])[..., 0] > raised.mean(-1)  # [B S]
                scores.append(2 * (weights[:, head] * own[:, None]).sum(-1).mean() - 1)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(scores).view(len(attentions), -1).cpu()


@contextmanager
def ablated(model: TextTransformer, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Zero the output of these (layer, head) inside."""
    chosen: dict[nn.Module, list[int]] = defaultdict(list)
    for layer, head in heads:
        chosen[model.stack.blocks[layer % len(model.stack.blocks)].attention].append(head)

    def hook(module: nn.Module, own: list[int]) -> Any:
        def zero(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            parts = given[0].unflatten(-1, (module.heads, -1)).clone()
            parts[..., own, :] = 0
            return (parts.flatten(-2),)

        return module.out.register_forward_pre_hook(zero)

    hooks = [hook(module, own) for module, own in chosen.items()]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _repeated(vocabulary: int | Sequence[int], length: int, rows: int, seed: int) -> Int[Tensor, "B T"]:
    """Rows of random ids, repeated once."""
    usable = torch.arange(vocabulary) if isinstance(vocabulary, int) else torch.tensor(vocabulary)
    if len(usable) < 2 or rows < 1:
        raise UsageError(f"{len(usable)} usable ids and {rows} rows: induction needs at least 2 ids and 1 row")
    generator = torch.Generator().manual_seed(seed)
    chances = torch.ones(rows, len(usable))
    drawn = torch.multinomial(chances, length, replacement=len(usable) < length, generator=generator)
    return usable[drawn].repeat(1, 2)


def _scores(
    model: TextTransformer, ids: Int[Tensor, "B T"], length: int
) -> tuple[Float[Tensor, "B L H"], Float[Tensor, "B L H"], Float[Tensor, "B 2"]]:
    with capture_attention() as captured:
        states = model.states(ids)
    if len(captured) != model.config.stack.layers:
        raise UsageError("induction: attention without weights (linear attention)")
    start = ids.shape[1] - length  # of the second copy
    matching = _mean_diagonals(captured, length - 1, start)
    previous = _mean_diagonals(captured, 1, ids.shape[1] - 2 * length + 1)
    if model.config.tied is None:
        return matching, previous, ids.new_zeros(len(ids), 2, dtype=torch.float)
    nats = F.cross_entropy(model.logits(states)[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")
    losses = torch.stack([nats[:, start - length : start - 1].mean(1), nats[:, start:].mean(1)], 1)
    return matching, previous, losses.cpu()


def _mean_diagonals(captured: list[tuple[nn.Module, Tensor]], back: int, first: int) -> Float[Tensor, "B L H"]:
    """Mean attention of the queries from `first` on to the key `back` positions earlier."""
    found = [weights.diagonal(-back, -2, -1)[..., first - back :].float().mean(-1) for _, weights in captured]
    return torch.stack(found, 1).cpu()
