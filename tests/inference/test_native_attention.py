"""Compiled attention against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from multimodal.blocks.attention import Attention
from multimodal.inference import prepare
from multimodal.inference.native import attention
from multimodal.inference.native.attention import native_attention
from multimodal.inference.prepare import prepare_for_inference
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny

SHAPES = [
    (2, 4, 37, 53, 24),
    (1, 3, 197, 197, 64),
    (1, 1, 2, 1, 5),
    (3, 2, 16, 6, 80),
    (1, 2, 33, 700, 16),
]  # B H T S E


def drawn(batch: int, heads: int, count: int, keys: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(batch, heads, size, width) for size in (count, keys, keys))


def agrees(*given: Tensor, **options: object) -> None:
    double = {name: value.double() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
              for name, value in options.items()}  # fmt: skip
    right = F.scaled_dot_product_attention(*(part.double() for part in given), **double)
    assert_close(native_attention(*given, **options).double(), right, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_that_of_pytorch(shape: tuple[int, ...]):
    query, key, value = drawn(*shape)
    agrees(query, key, value)
    agrees(query, key, value, scale=0.3)
    agrees(query, key, value, is_causal=True)
    joined = torch.randn(2, 19, 3, 4, 24).permute(2, 0, 3, 1, 4)  # as one map for all three gives them
    agrees(*joined)
    agrees(*(part.mT.contiguous().mT for part in (query, key, value)))


@pytest.mark.usefixtures("compiled")
def test_masks_and_shared_keys():
    query, key, value = drawn(2, 4, 37, 53, 24)
    few = torch.ones(37, 53, dtype=torch.bool).tril_(3)
    for mask in (
        few, torch.rand(2, 1, 1, 53) > 0.4, torch.rand(2, 4, 37, 53) > 0.3, torch.randn(4, 37, 53),
        torch.randn(53, 37).t(), torch.zeros(2, 1, 37, 53).masked_fill_(~few, -torch.inf),
    ):  # fmt: skip
        agrees(query, key, value, attn_mask=mask)
    agrees(query, key[:, :2], value[:, :2], attn_mask=few, enable_gqa=True)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("mask", [torch.zeros(20, dtype=torch.bool), torch.full((20,), -torch.inf)])
def test_a_query_that_sees_no_key_gets_zeros(mask: Tensor):
    given = drawn(1, 2, 17, 20, 8)
    blind = torch.stack([mask if row == 4 else torch.ones_like(mask) for row in range(17)])
    made = native_attention(*given, attn_mask=blind)
    assert not made[:, :, 4].any()
    assert_close(made, F.scaled_dot_product_attention(*given, attn_mask=blind), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("compiled")
def test_a_query_has_the_same_bits_in_company_and_on_two_threads():
    query, key, value = drawn(3, 5, 100, 70, 24)
    query[2, 1, 7], key[1, 3, 9] = torch.nan, torch.inf
    whole = native_attention(query, key, value)
    assert whole[2, 1, 7].isnan().all()
    assert whole[1, 3].isnan().any(-1).all()
    assert whole[0].isfinite().all()
    torch.set_num_threads(2)
    try:
        assert_close(native_attention(query, key, value), whole, atol=0, rtol=0, equal_nan=True)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(native_attention(query[:1, :, 40:53], key[:1], value[:1]), whole[:1, :, 40:53])


@pytest.mark.usefixtures("compiled")
def test_what_it_does_not_compute_is_pytorchs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "library", lambda: pytest.fail("called"))
    given = drawn(1, 2, 5, 5, 8)
    for own in (
        [part.double() for part in given],
        [part.bfloat16() for part in given],
        [part[:, :, :1] for part in given],
    ):
        assert torch.equal(native_attention(*own), F.scaled_dot_product_attention(*own))
    given[1].requires_grad_()
    native_attention(*given).sum().backward()
    assert given[1].grad.any()
    assert native_attention(given[0], given[1][:, :, :0], given[2][:, :, :0]).shape == (1, 2, 5, 8)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["vit-token", "speech-to-text", "text-encoder", "joint"])
def test_prepared_models_attend_with_it(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "prefers_native_attention", lambda: True)
    model = tiny.made(name)
    made = prepare_for_inference(Checkpoint(model, source="tiny"), "float32").model
    assert {part.kernel for part in made.modules() if isinstance(part, Attention)} == {native_attention}
    assert all(part.kernel is not native_attention for part in model.modules() if isinstance(part, Attention))
