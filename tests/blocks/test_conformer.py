"""Convolutions: Whisper's stem, and that padding never reaches a real frame."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import (
    ConformerBlock,
    ConformerConfig,
    ConformerConvolution,
    MaskedGroupNorm,
    zero_padding,
)
from multimodal.blocks.masks import key_mask, padding
from multimodal.blocks.subsample import Subsample
from multimodal.models.whisper import FrameStem
from tests.helpers.tiny import randomized

WIDTH, LENGTHS = 16, torch.tensor([21, 13, 6, 1])
JUNK = [1e4, float("nan")]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padded_with(junk: float, width: int) -> torch.Tensor:
    x = noise(len(LENGTHS), 21, width)
    x[~padding(LENGTHS, 21)] = junk
    return x


def test_frame_stem_equals_whispers():
    from whisper.model import AudioEncoder

    stem, theirs = randomized(FrameStem(8, WIDTH)), AudioEncoder(8, 15, WIDTH, 2, 0)
    theirs.conv1.load_state_dict(stem.first.state_dict())
    theirs.conv2.load_state_dict(stem.second.state_dict())
    nn.init.zeros_(theirs.positional_embedding)
    mel = noise(2, 8, 30)
    assert_close(theirs.ln_post(stem(mel)), theirs(mel), atol=1e-5, rtol=0)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_subsample_of_a_batch_is_that_of_each_alone(factor, junk):
    stem = randomized(Subsample(11, WIDTH, factor, 4))
    out, lengths = stem(padded_with(junk, 11), LENGTHS)
    assert lengths.tolist() == [-(-n // factor) for n in LENGTHS.tolist()]
    for row, (own, kept) in enumerate(zip(LENGTHS.tolist(), lengths.tolist(), strict=True)):
        alone, _ = stem(padded_with(junk, 11)[row : row + 1, :own], LENGTHS[row : row + 1])
        assert alone.shape == (1, kept, WIDTH)
        assert_close(out[row, :kept], alone[0], atol=1e-5, rtol=0)


def test_subsample_of_two_is_a_convolution_and_a_projection():
    stem, x = randomized(Subsample(8, WIDTH, 2, 4)), noise(2, 9, 8)
    frames = stem.first(x[:, None]).relu()  # B C T M
    expected = torch.stack([stem.project(frames[:, :, t].flatten(1)) for t in range(5)], 1)
    assert_close(stem(x, torch.tensor([9, 9]))[0], expected, atol=1e-5, rtol=0)


def test_masked_group_norm_leaves_padding_out():
    norm, valid, x = randomized(MaskedGroupNorm(1, WIDTH)), padding(LENGTHS, 21), padded_with(1e4, WIDTH)
    out = norm.masked(x, valid)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = norm(x[row : row + 1, :length].mT).mT  # torch's own group norm
        assert_close(out[row, :length], alone[0], atol=1e-5, rtol=0)
    assert_close(norm.masked(x[:1], None), out[:1], atol=1e-5, rtol=0)


def test_zero_padded_clears_nan():
    valid = padding(LENGTHS, 21)
    cleared = zero_padding(padded_with(float("nan"), 3), valid)
    assert (cleared[~valid] == 0).all()
    assert torch.equal(cleared[valid], noise(len(LENGTHS), 21, 3)[valid])


def config(**options) -> ConformerConfig:
    return ConformerConfig(AttentionConfig(WIDTH, 2, relative=True), 24, **({"kernel": 7} | options))


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("norm", ["layer", "batch", "group"])
@pytest.mark.parametrize("kernel", [7, 32])
def test_convolution_of_a_batch_is_that_of_each_alone(kernel, norm, junk):
    module, x = randomized(ConformerConvolution(config(kernel=kernel, conv_norm=norm))), padded_with(junk, WIDTH)
    out = module(x, padding(LENGTHS, 21))
    assert out.shape == x.shape
    for row, length in enumerate(LENGTHS.tolist()):
        assert_close(out[row, :length], module(x[row : row + 1, :length])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kernel", "causal", "seen"), [
    (5, False, (-2, 2)), (4, False, (-2, 1)), (1, False, (0, 0)), (5, True, (-4, 0)), (4, True, (-3, 0)),
])  # fmt: skip
def test_convolution_keeps_the_length_and_sees_its_kernel(kernel, causal, seen):
    module = randomized(ConformerConvolution(config(kernel=kernel, conv_causal=causal)))
    x = noise(1, 20, WIDTH).requires_grad_()
    out = module(x)
    assert out.shape == x.shape
    out[0, 10].sum().backward()
    reached = x.grad[0].abs().sum(-1).nonzero().flatten()
    assert (reached.min() - 10, reached.max() - 10) == seen


def test_convolution_equals_the_papers_figure():
    module, x = randomized(ConformerConvolution(config(kernel=3, conv_bias=False))), noise(2, 9, WIDTH)
    value, gate = module.expand(module.before(x)).chunk(2, -1)
    mixed = nn.functional.pad(value * torch.sigmoid(gate), (0, 0, 1, 1))
    taps = module.depthwise.weight[:, 0]  # D kernel
    mixed = sum(mixed[:, i : i + 9] * taps[:, i] for i in range(3))
    assert_close(module(x), module.project(nn.functional.silu(module.norm(mixed))), atol=1e-5, rtol=0)


@pytest.mark.parametrize("conv_first", [False, True])
def test_block_is_the_macaron(conv_first):
    block, x = randomized(ConformerBlock(config(conv_first=conv_first))), noise(2, 9, WIDTH)
    steps = [lambda h: h + block.attention(block.attention_norm(h)), lambda h: h + block.convolution(h)]
    h = x + block.feed_before(block.feed_before_norm(x)) / 2
    for step in reversed(steps) if conv_first else steps:
        h = step(h)
    h = h + block.feed_after(block.feed_after_norm(h)) / 2
    valid = padding(torch.tensor([9, 9]), 9)
    assert_close(block(x, key_mask(valid), valid), block.norm(h), atol=1e-5, rtol=0)
