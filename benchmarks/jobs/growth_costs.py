"""Minimal work of a run from sizes alone: operations (multiply-adds × 2) and bytes of float32 weights to read. With a
machine's roofline they give a lower bound of its time."""

import math
from typing import NamedTuple

FLOAT32 = 4


class Cost(NamedTuple):
    operations: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(self.operations + other.operations, self.bytes + other.bytes)

    def times(self, count: float, read: float = 1) -> "Cost":
        """`count` times the operations, with the weights read `read` times."""
        return Cost(count * self.operations, read * self.bytes)


def maps(weights: float, positions: float) -> Cost:
    """Linear maps with `weights` in total, at each position."""
    return Cost(2 * weights * positions, FLOAT32 * weights)


def attention(width: int, queries: float, keys: float, causal: bool = False) -> Cost:
    """Products of queries with keys and of weights with values; causal attention needs half."""
    return Cost(4 * width * queries * keys * (0.5 if causal else 1), 0)


def stack(width: int, layers: int, positions: float, causal: bool = False) -> Cost:
    """Blocks of four attention maps and a feed-forward of four times the width."""
    return (maps(12 * width**2, positions) + attention(width, positions, positions, causal)).times(layers, layers)


def vit(width: int, layers: int, patch: int, out: int, size: int = 224) -> Cost:
    """An image, with a class token."""
    patches = (size // patch) ** 2
    return maps(3 * patch**2 * width, patches) + stack(width, layers, patches + 1) + maps(width * out, 1)


def gpt2(length: int, width: int, layers: int, vocabulary: int) -> Cost:
    """A prompt, with the logits of its last position."""
    return stack(width, layers, length, causal=True) + maps(width * vocabulary, 1)


def llama(length: int, width: int, hidden: int, layers: int, vocabulary: int) -> Cost:
    block = maps(4 * width**2 + 3 * width * hidden, length) + attention(width, length, length, causal=True)
    return block.times(layers, layers) + maps(width * vocabulary, 1)


def whisper_encoder(width: int, layers: int, bands: int = 80) -> Cost:
    """A window of 30 s."""
    return maps(3 * bands * width, 3000) + maps(3 * width**2, 1500) + stack(width, layers, 1500)


def whisper(seconds: float, tokens: int, width: int, layers: int, vocabulary: int) -> Cost:
    """Windows of 30 s with `tokens` each; every token reads the decoder, and each window projects keys and values of
    the audio once."""
    token = maps(14 * width**2, 1) + attention(width, 1, 1500)
    token = token.times(layers, layers) + maps(width * vocabulary, 1)
    window = whisper_encoder(width, layers) + maps(2 * width**2 * layers, 1500) + token.times(tokens, tokens)
    windows = math.ceil(seconds / 30)
    return window.times(windows, windows)
