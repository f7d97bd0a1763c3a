"""Linear attention against its formula as a loop, and what it cannot take."""

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks import masks
from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.cache import LayerCache
from multimodal.blocks.linear_attention import CHUNK, LinearAttention, feature
from multimodal.blocks.positions import rotary
from tests.helpers.tiny import randomized


def made(kind: str, **options) -> LinearAttention:
    return randomized(LinearAttention(AttentionConfig(16, 4, linear=kind, **options)))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow(module: LinearAttention, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Weights φ(q)·φ(k) over the keys that are seen, normalized."""
    split = lambda y: y.unflatten(-1, (-1, 4)).transpose(1, 2)
    query, key, value = (split(part(x)) for part in (module.query, module.key, module.value))
    key, value = (part.repeat_interleave(4 // module.kv_heads, 1) for part in (key, value))
    weights = (feature(query) @ feature(key).transpose(-1, -2)) * seen
    return module.out((weights / weights.sum(-1, keepdim=True) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_it_is_its_formula(length, kv_heads):
    x = noise(2, length, 16)
    for kind, seen in (("causal", masks.causal(length, length)), ("full", torch.ones(length, length))):
        module = made(kind, kv_heads=kv_heads)
        assert_close(module(x), slow(module, x, seen), atol=1e-4, rtol=0)


def test_a_cache_and_padding_change_nothing():
    module, x = made("causal"), noise(2, 9, 16)
    cache, parts = LayerCache(), []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        parts.append(module(x[:, start:end], cache=cache))
    assert_close(torch.cat(parts, 1), module(x), atol=1e-5, rtol=0)
    both = made("full")
    valid = masks.key_mask(masks.padding(torch.tensor([9, 4]), 9))
    assert_close(both(x, mask=valid)[1:, :4], both(x[1:, :4]), atol=1e-5, rtol=0)


def test_what_needs_weights_is_refused():
    module, x = made("causal"), noise(1, 4, 16)
    for options in ({"mask": masks.causal(4, 4)}, {"mask": torch.zeros(1, 1, 1, 4)},
                    {"rotate": rotary(torch.arange(4), 4)}):  # fmt: skip
        with pytest.raises(ValueError, match="linear attention supports masks over keys"):
            module(x, **options)
