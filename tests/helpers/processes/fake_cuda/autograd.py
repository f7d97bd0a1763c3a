"""Backward through a graph of fake tensors: torch's own engine asks the driver for a stream."""

from collections import Counter, defaultdict

import torch
from torch import Tensor


def backward(root: Tensor, gradient: Tensor | None = None, *_, **__) -> None:
    """Add gradients to the leaves, as `Tensor.backward` does. Raises AssertionError for one that does not fit."""
    assert root.grad_fn is not None, "backward of a tensor without a graph"
    with torch.autocast("cuda", enabled=False):
        _walk(root, torch.ones_like(root) if gradient is None else gradient)


def _walk(root: Tensor, gradient: Tensor) -> None:
    """Visit each node once all that follow it have been."""
    uses, start = _uses(root.grad_fn), root.grad_fn
    given: dict = defaultdict(dict)
    given[start][root.output_nr] = gradient
    ready = [start]
    while ready:
        node = ready.pop()
        own = given.pop(node, {})
        if hasattr(node, "variable"):
            _accumulate(node.variable, own.get(0))
            continue
        made = _apply(node, own) if any(one is not None for one in own.values()) else ()
        for number, (following, place) in enumerate(node.next_functions):
            if following is None:
                continue
            if number < len(made) and made[number] is not None:
                one, before = _fitted(made[number], following, place), given[following].get(place)
                given[following][place] = one if before is None else before + one
            uses[following] -= 1
            if not uses[following]:
                ready.append(following)


def _uses(start) -> Counter:
    """Number of uses of each node's result."""
    uses, seen, stack = Counter(), {start}, [start]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                uses[following] += 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    return uses


def _accumulate(leaf: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    gradient = _summed(gradient.detach(), leaf.shape)
    assert gradient.device == leaf.device, f"gradient on {gradient.device} of a parameter on {leaf.device}"
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _apply(node, given: dict[int, Tensor]) -> tuple:
    known = getattr(node, "_input_metadata", None) or []
    count = len(known) or max(given) + 1
    inputs = [given.get(place) for place in range(count)]
    custom = hasattr(node, "apply")  # an autograd.Function, which gets zeros in place of None
    for place, one in enumerate(known):
        if inputs[place] is None and custom:
            inputs[place] = torch.zeros(tuple(one.shape), dtype=one.dtype, device=one.device)
        elif inputs[place] is not None and inputs[place].dtype != one.dtype:
            inputs[place] = inputs[place].to(one.dtype)
    with torch.no_grad():
        made = node.apply(*inputs) if custom else node(*inputs)
    return made if isinstance(made, tuple) else (made,)


def _fitted(gradient: Tensor, node, place: int) -> Tensor:
    known = getattr(node, "_input_metadata", None) or []
    return _summed(gradient, tuple(known[place].shape)) if place < len(known) else gradient


def _summed(gradient: Tensor, shape) -> Tensor:
    """Sum over what was broadcast."""
    return gradient if tuple(gradient.shape) == tuple(shape) else gradient.sum_to_size(shape)
