"""What the least work of a run is: operations (multiply-adds × 2) and bytes of float32 weights that it must read, from
sizes alone. Beside the roofline of a machine they give the time below which nothing can come."""

import math
from typing import NamedTuple

FLOAT32 = 4


class Cost(NamedTuple):
    operations: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(self.operations + other.operations, self.bytes + other.bytes)

    def times(self, count: float, read: float = 1) -> "Cost":
        """So often, with the weights read `read` times."""
        return Cost(count * self.operations, read * self.bytes)


def maps(weights: float, positions: float) -> Cost:
    """Linear maps of so many weights in all, at each of the positions."""
    return Cost(2 * weights * positions, FLOAT32 * weights)


def attention(width: int, queries: float, keys: float, causal: bool = False) -> Cost:
    """Between queries and keys, and weights and values; a causal one needs half."""
    return Cost(4 * width * queries * keys * (0.5 if causal else 1), 0)


def stack(width: int, layers: int, positions: float, causal: bool = False) -> Cost:
    """Four maps of attention, two of four times the width inside."""
    return (maps(12 * width**2, positions) + attention(width, positions, positions, causal)).times(layers, layers)


def vit(width: int, layers: int, patch: int, out: int, size: int = 224) -> Cost:
    """A picture, with a class token."""
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
    """Windows of 30 s with so many tokens each; every token reads the decoder, whose keys and values of the sound are
    made once a window."""
    token = maps(14 * width**2, 1) + attention(width, 1, 1500)
    token = token.times(layers, layers) + maps(width * vocabulary, 1)
    window = whisper_encoder(width, layers) + maps(2 * width**2 * layers, 1500) + token.times(tokens, tokens)
    windows = math.ceil(seconds / 30)
    return window.times(windows, windows)
