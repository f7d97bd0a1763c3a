"""GPU code paths, as far as a CPU can check them."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from multimodal.blocks import masks, sdpa
from multimodal.blocks.stack import Stack, transformer
from multimodal.inference import prepare
from multimodal.models.conformer import ConformerCTC
from multimodal.train import losses
from tests.helpers import tiny

GPU = torch.device("cuda")


def test_cudnn_is_asked_for_first_where_it_runs_and_shapes_are_steady(monkeypatch):
    monkeypatch.setattr(sdpa, "has_cudnn_attention", lambda device: True)
    x = torch.zeros(1, 9, 8)
    assert isinstance(sdpa.preferred_kernels(x), nullcontext)
    with FakeTensorMode():
        x = torch.empty(1, 9, 8, device=GPU)
    query = torch.randn(1, 2, 9, 8)
    right = F.scaled_dot_product_attention(query, query, query)
    before = torch._C._get_sdp_priority_order()
    with sdpa.preferred_kernels(x):
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value
        assert sdpa.all_kernels_enabled()  # the others are there to fall back on
        assert_close(F.scaled_dot_product_attention(query, query, query), right)
    assert torch._C._get_sdp_priority_order() == before
    with sdpa_kernel(SDPBackend.MATH):
        assert isinstance(sdpa.preferred_kernels(x), nullcontext)
    for steady, found in ((False, True), (True, False)):
        monkeypatch.setattr(sdpa, "has_cudnn_attention", lambda device, found=found: found)
        with sdpa.preferred_kernels(x, steady):  # a plan for every new length, or none
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert_close(F.scaled_dot_product_attention(query, query, query), right)
    assert sdpa.all_kernels_enabled()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_recomputed_blocks_take_the_kernels_of_before(precision):
    """Short rows are trained by other kernels in bfloat16; recomputed outside of that they would keep other tensors."""
    stack = Stack(transformer(16, 2, 2, 32, checkpointing=True)).train()
    x = torch.randn(2, 5, 16, requires_grad=True)
    with torch.autocast("cpu", enabled=precision == torch.bfloat16):
        with sdpa.preferred_kernels(x):
            assert sdpa.all_kernels_enabled() == (precision == torch.float32)
            loss = stack(x).float().square().mean()
        assert sdpa.all_kernels_enabled()
    loss.backward()
    assert x.grad.isfinite().all()


def test_where_cudnn_cannot_attend_that_is_found_out():
    sdpa.has_cudnn_attention.cache_clear()
    assert not sdpa.has_cudnn_attention(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_that_a_gpu_compiles_is_the_vocabularys(dtype):
    torch.manual_seed(0)
    states, weight = (torch.randn(rows, 16).to(dtype).requires_grad_() for rows in (40, 50))
    targets = torch.randint(50, (40,))
    targets[[3, 7]] = -100
    right = losses.vocabulary_loss(states, weight, None, targets, 16)
    right.backward()
    loss, pull = losses.loss_and_pull((states @ weight.T).detach(), targets, torch.float32)
    assert_close(loss, right.detach())
    assert_close(pull @ weight.detach(), states.grad, rtol=1e-2, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_types_that_auto_takes_on_a_gpu():
    conformer = ConformerCTC(tiny.JOINT)
    assert prepare._types(conformer, "auto", GPU) == (torch.bfloat16, torch.float32)
    assert prepare._types(conformer, "auto", torch.device("cpu")) == (torch.float32, torch.float32)


def test_texts_of_a_clip_are_trained_without_a_written_mask(monkeypatch):
    model = tiny.made("clip-softmax").train()
    ids = torch.randint(1, 10, (3, 8))
    ids[:, -1] = model.config.eos_id
    right = model.encode_text(ids)
    seen, attend = [], masks.Causal.attend
    monkeypatch.setattr(masks.Causal, "attend", lambda self, *parts: seen.append(1) or attend(self, *parts))
    monkeypatch.setattr("multimodal.models.text.UNMASKED", ("cpu",))
    assert_close(model.encode_text(ids), right, atol=1e-5, rtol=0)
    assert seen
    with torch.no_grad():
        assert_close(model.encode_text(ids), right.detach(), atol=1e-5, rtol=0)
