"""Blocks and the stack against torch's encoder layer and the formulas of the papers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from multimodal.blocks import masks
from multimodal.blocks.cache import Cache
from multimodal.blocks.layers import ACTIVATIONS, DropPath, FeedForward, make_norm
from multimodal.blocks.stack import Block, Stack, transformer
from tests.helpers.references.attention import torch_attention
from tests.helpers.tiny import randomized

B, T, D, H, HIDDEN = 3, 6, 16, 4, 24


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config(**options):
    return transformer(D, 3, H, HIDDEN, **options)


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_block_equals_torchs_encoder_layer(post_norm, activation):
    block = randomized(Block(replace(config(activation=activation).block, post_norm=post_norm)))
    theirs = nn.TransformerEncoderLayer(D, H, HIDDEN, 0.0, activation, batch_first=True, norm_first=not post_norm)
    theirs.self_attn = torch_attention(block.attention)
    for other, ours in (
        (theirs.linear1, block.feed.up),
        (theirs.linear2, block.feed.down),
        (theirs.norm1, block.attention_branch.norm),
        (theirs.norm2, block.feed_branch.norm),
    ):
        other.load_state_dict(ours.state_dict())
    x, causal = noise(B, T, D), masks.causal(T, T)
    assert_close(block(x, mask=causal), theirs(x, src_mask=~causal), atol=1e-5, rtol=0)


def test_decoder_block_equals_torchs_decoder_layer():
    block = randomized(Block(config(source_width=D).block))
    theirs = nn.TransformerDecoderLayer(D, H, HIDDEN, 0.0, "gelu", batch_first=True, norm_first=True)
    theirs.self_attn, theirs.multihead_attn = torch_attention(block.attention), torch_attention(block.cross)
    for other, ours in (
        (theirs.linear1, block.feed.up),
        (theirs.linear2, block.feed.down),
        (theirs.norm1, block.attention_branch.norm),
        (theirs.norm2, block.cross_branch.norm),
        (theirs.norm3, block.feed_branch.norm),
    ):
        other.load_state_dict(ours.state_dict())
    x, source, causal = noise(B, T, D), noise(B, 5, D, seed=1), masks.causal(T, T)
    valid = masks.padding(torch.tensor([5, 2, 1]), 5)
    expected = theirs(x, source, tgt_mask=~causal, memory_key_padding_mask=~valid)
    assert_close(block(x, source, causal, masks.key_mask(valid)), expected, atol=1e-5, rtol=0)


def test_states_are_each_blocks_input_and_then_the_output():
    stack, x, states = randomized(Stack(config())), noise(B, T, D), []
    out = stack(x, states=states)
    assert len(states) == 4
    assert torch.equal(states[0], x)
    for i, block in enumerate(stack.blocks):
        after = block(states[i])
        assert torch.equal(after if i < 2 else stack.norm(after), states[i + 1])
    assert torch.equal(out, states[-1])
    assert torch.equal(stack(x), out)


@pytest.mark.parametrize("cached", [False, True])
def test_rows_in_a_row_may_share_a_source(cached):
    stack, source = randomized(Stack(config(source_width=5))), noise(2, 7, 5, seed=1)
    x, mask = noise(6, T, D), masks.key_mask(masks.padding(torch.tensor([7, 4]), 7))
    caches = [Cache(3), Cache(3)] if cached else [None, None]
    for part in (x[:, :4], x[:, 4:]) if cached else (x,):
        shared = stack(part, source, source_mask=mask, cache=caches[0])
        full = stack(part, source.repeat_interleave(3, 0), source_mask=mask.repeat_interleave(3, 0), cache=caches[1])
        assert_close(shared, full, atol=1e-5, rtol=0)
    if cached:
        assert len(caches[0].cross_attention[0].key) == 2


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_blocks_are_reused_in_turn(shared):
    stack, x = randomized(Stack(replace(config(), shared=shared, final_norm=False))), noise(B, T, D)
    alone = Stack(config())
    size = sum(p.numel() for p in alone.blocks[0].parameters())
    assert sum(p.numel() for p in stack.parameters()) == shared * size
    expected = x
    for layer in range(3):
        expected = stack.blocks[layer % shared](expected)
    assert torch.equal(stack(x), expected)


def test_drop_path_keeps_the_mean_and_drops_whole_samples():
    torch.manual_seed(0)
    drop, x = DropPath(0.3), torch.ones(20000, 2, 2)
    out = drop(x)
    assert_close(out.mean(), torch.tensor(1.0), atol=0.02, rtol=0)
    assert out.flatten(1).unique(dim=0).tolist() == [[0.0] * 4, pytest.approx([1 / 0.7] * 4)]
    assert torch.equal(drop.eval()(x), x)


def test_drop_path_rises_with_depth_and_is_off_in_eval():
    stack, x = Stack(config(drop_path=0.4)), noise(B, T, D)
    assert [block.feed_branch.drop[1].rate for block in stack.blocks] == [0.0, 0.2, 0.4]
    plain = Stack(config())
    plain.load_state_dict(stack.state_dict())
    assert torch.equal(stack.eval()(x), plain.eval()(x))
    torch.manual_seed(0)
    assert not torch.equal(stack.train()(x), plain(x))


def test_dropout_acts_in_training_only():
    stack, x = Stack(config(dropout=0.5)), noise(B, T, D)
    assert torch.equal(stack.eval()(x), stack(x))
    assert not torch.equal(stack.train()(x), stack(x))
    for part in stack.eval().modules():  # Monte Carlo dropout
        part.training = isinstance(part, nn.Dropout)
    assert not torch.equal(stack(x), stack(x))


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_checkpointing_gives_the_same_gradients(drop_path):
    gradients = []
    for checkpointing in (False, True):
        stack = randomized(Stack(config(checkpointing=checkpointing, drop_path=drop_path, source_width=5))).train()
        x = noise(B, T, D).requires_grad_()
        torch.manual_seed(1)
        stack(x, noise(B, 4, 5), mask=masks.causal(T, T)).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in stack.parameters())])
    assert_close(gradients[0], gradients[1], atol=0, rtol=0)


def test_layer_scale_is_a_gain_on_each_branch():
    stack, x = Stack(config(layer_scale=True)).eval(), noise(B, T, D)
    for block in stack.blocks:
        for branch in (block.attention_branch, block.feed_branch):
            nn.init.zeros_(branch.scale.gain)
    assert torch.equal(stack(x), stack.norm(x))


def test_norms_equal_their_formulas():
    x = noise(B, T, D) * 3 + 1
    layer, rms = randomized(make_norm("layer", D, 1e-3)), randomized(make_norm("rms", D, 1e-3))
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight + layer.bias
    assert_close(layer(x), expected, atol=1e-5, rtol=0)
    assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * rms.weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_equals_its_formula(activation):
    x, act = noise(B, T, D), ACTIVATIONS[activation]
    plain = randomized(FeedForward(D, HIDDEN, activation))
    gated = randomized(FeedForward(D, HIDDEN, activation, gated=True, bias=False))
    up = F.linear(x, plain.up.weight, plain.up.bias)
    assert_close(plain(x), F.linear(act(up), plain.down.weight, plain.down.bias))
    assert_close(gated(x), (act(x @ gated.gate.weight.T) * (x @ gated.up.weight.T)) @ gated.down.weight.T)
    assert [name for name, _ in gated.named_parameters()] == ["up.weight", "gate.weight", "down.weight"]


def test_activations_equal_their_formulas():
    x = noise(100) * 3
    cubic = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert_close(ACTIVATIONS["gelu"](x), x * 0.5 * (1 + torch.erf(x / 2**0.5)))
    assert_close(ACTIVATIONS["gelu_tanh"](x), cubic, atol=1e-6, rtol=1e-5)
    assert_close(ACTIVATIONS["quick_gelu"](x), x / (1 + torch.exp(-1.702 * x)))
    assert_close(ACTIVATIONS["silu"](x), x / (1 + torch.exp(-x)))


def test_key_bias_and_final_norm_can_be_left_out():
    names = Stack(config(key_bias=False, final_norm=False)).state_dict()
    assert not [name for name in names if name.endswith("key.bias") or name.startswith("norm.")]
