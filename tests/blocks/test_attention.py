"""Attention against plain loops and torch's own; masked rows, caches and captured weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks import masks
from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.cache import Cache, LayerCache
from multimodal.blocks.capture import capture_attention, capturing
from multimodal.blocks.positions import rotary
from multimodal.blocks.stack import Stack, transformer
from tests.helpers.references.attention import B, D, H, S, T, torch_attention
from tests.helpers.spread import thin
from tests.helpers.tiny import randomized

LENGTHS = torch.tensor([6, 3, 1])
MASKS = {
    "none": None,
    "causal": masks.causal(T, T),
    "prefix": masks.prefix(T, T, 2),
    "padding": masks.key_mask(masks.padding(LENGTHS, T)),
    "window": masks.window(T, T, 2, 1),
    "block": masks.blocks(T, T, 2),
    "documents": masks.documents(torch.tensor([[0, 0, 1, 1, 1, 2]] * B)),
    "bias": torch.randn(H, T, T, generator=torch.Generator().manual_seed(1)),
}
MASKS["causal+padding"] = MASKS["causal"] & MASKS["padding"]
MASKS["causal+bias"] = masks.merge(MASKS["causal"], MASKS["bias"])
MASKS["bias+bias"] = masks.merge(MASKS["bias"], MASKS["bias"][:1])


def attention(**options) -> Attention:
    return randomized(Attention(AttentionConfig(D, H, **options)))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(module: Attention, x, source=None, mask=None, turn=lambda x: x):
    """softmax(QKᵀ/√E + mask)V, a head at a time."""
    source = x if source is None else source
    width = module.head_width
    query, key, value = module.query(x), module.key(source), module.value(source)
    bias = torch.zeros(len(x), module.heads, x.shape[1], source.shape[1])
    if mask is not None:
        bias = bias + (torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask)
    heads = []
    for head in range(module.heads):
        shared = head // (module.heads // module.kv_heads)
        own, theirs = slice(head * width, (head + 1) * width), slice(shared * width, (shared + 1) * width)
        scores = turn(query[..., own]) @ turn(key[..., theirs]).mT / width**0.5 + bias[:, head]
        exponents = (scores - scores.amax(-1, keepdim=True)).exp()
        heads.append(exponents / exponents.sum(-1, keepdim=True) @ value[..., theirs])
    return module.out(torch.cat(heads, -1))


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("name", MASKS)
def test_self_attention_equals_the_formula(kv_heads, name):
    module, x = attention(kv_heads=kv_heads), noise(B, T, D)
    assert_close(module(x, mask=MASKS[name]), reference(module, x, mask=MASKS[name]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention_equals_the_formula(kv_heads, masked):
    module, x, source = attention(kv_heads=kv_heads, source_width=10, key_bias=False), noise(B, T, D), noise(B, S, 10)
    mask = masks.key_mask(masks.padding(torch.tensor([5, 2, 1]), S)) if masked else None
    assert module.key.bias is None
    assert_close(module(x, source, mask), reference(module, x, source, mask), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_rotation_turns_queries_and_keys_but_not_values(kv_heads):
    module, x, turn = attention(kv_heads=kv_heads), noise(B, T, D), rotary(torch.arange(T), D // H)
    expected = reference(module, x, mask=MASKS["causal"], turn=lambda part: turn(part[:, None])[:, 0])
    assert_close(module(x, mask=MASKS["causal"], rotate=turn), expected, atol=1e-5, rtol=0)


def test_head_width_and_scale_are_free():
    module, x = attention(head_width=6, scale=1.0), noise(B, T, D)
    scaled = attention(head_width=6)
    scaled.query.weight.data *= 6**0.5
    scaled.query.bias.data *= 6**0.5
    assert_close(module(x), reference(scaled, x), atol=1e-5, rtol=0)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="width 16 is not divisible by heads 3"):
        Attention(AttentionConfig(16, 3))
    with pytest.raises(ValueError, match="heads 4 is not divisible by kv_heads 3"):
        Attention(AttentionConfig(16, 4, kv_heads=3))
    with pytest.raises(ValueError, match="must be at least 1"):
        Attention(AttentionConfig(16, -4))


def test_multi_head_equals_torchs_module():
    module, x = attention(), noise(B, T, D)
    valid = masks.padding(LENGTHS, T)
    expected = torch_attention(module)(x, x, x, key_padding_mask=~valid, attn_mask=~MASKS["causal"])[0]
    assert_close(module(x, mask=masks.key_mask(valid) & MASKS["causal"]), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "float", "relative"])
def test_a_row_that_may_attend_to_nothing_gives_zeros_and_finite_gradients(kind):
    module, x = attention(relative=kind == "relative"), noise(B, T, D).requires_grad_()
    mask = torch.ones(B, 1, T, T, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    with capture_attention() as captured:
        out = module(x, mask=torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if kind == "float" else mask)
    assert_close(captured[0][1].sum(-1), mask.any(-1).float().expand(B, H, T))
    assert_close(out[0, 2], module.out.bias)
    assert_close(out[1], module.out.bias.expand(T, D))
    out.square().sum().backward()
    for tensor in (x, *module.parameters()):
        assert tensor.grad.isfinite().all()
    assert x.grad[2].abs().sum() > 0


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_capturing_changes_nothing_and_tells_the_truth(name, relative):
    module, x = attention(kv_heads=2, relative=relative), noise(B, T, D)
    plain = module(x, mask=MASKS[name])
    with capture_attention() as captured:
        watched = module(x, mask=MASKS[name])
    assert torch.equal(plain, watched)
    ((caught, weights),) = captured
    assert caught is module
    assert_close(weights.sum(-1), torch.ones(B, H, T))
    value = module.split(module.value(x)).repeat_interleave(2, 1)
    assert_close(module.out((weights @ value).transpose(1, 2).flatten(2)), plain, atol=1e-5, rtol=0)
    module(x)
    assert len(captured) == 1


def test_capturing_nests_ends_after_an_error_and_is_of_its_thread():
    module, x = attention(), noise(B, T, D)
    with capture_attention() as outer:
        with pytest.raises(RuntimeError), capture_attention() as inner:
            module(x, source=module(x)[..., :3])  # misshapen: the inner call alone is kept
        module(x)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(module, x).result()
            other = capture_attention()
            threads.submit(other.__enter__).result()
            module(x)
            module(x)
            threads.submit(other.__exit__, None, None, None).result()
    module(x)
    assert (len(outer), len(inner), capturing()) == (3, 1, False)


@pytest.mark.parametrize("steps", [[1] * 6, [3, 2, 1], [1, 5]])
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"relative": True}])
def test_cached_self_attention_equals_the_full_one(steps, options):
    module, x, cache, done, parts = attention(**options), noise(B, T, D), LayerCache(), 0, []
    for step in steps:
        end = done + step
        turn = rotary(torch.arange(done, end), D // H)
        parts.append(module(x[:, done:end], mask=masks.causal(step, end), rotate=turn, cache=cache))
        done = end
    full = module(x, mask=masks.causal(T, T), rotate=rotary(torch.arange(T), D // H))
    assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=0)


def test_a_long_cache_grows_by_doubling():
    module, x, cache, rooms = attention(kv_heads=1), noise(1, 100, D), LayerCache(), set()
    with torch.no_grad():
        parts = [module(x[:, i : i + 1], cache=cache) for i in range(100)]
        assert_close(torch.cat(parts, 1), module(x, mask=masks.causal(100, 100)), atol=1e-5, rtol=0)
        for i in range(100):
            cache.append(x[:, None, i : i + 1, :4], x[:, None, i : i + 1, :4])
            rooms.add(cache._key.shape[2])
    assert cache.length == 200
    assert len(rooms) <= 3


@pytest.mark.parametrize("first", [1, 3])
def test_a_cache_with_room_never_moves(first):
    cache, kept = LayerCache(capacity=20), noise(2, H, 20, 4)
    places = set()
    for begin, end in [(0, first), *((i, i + 1) for i in range(first, 20))]:
        key, value = cache.append(kept[:, :, begin:end], -kept[:, :, begin:end])
        places.add(key.data_ptr())
        assert torch.equal(key, kept[:, :, :end])
        assert torch.equal(value, -key)
    assert len(places) == 1


def test_cross_attention_projects_its_source_once():
    module, x, source, cache = attention(), noise(B, T, D), noise(B, S, D), LayerCache()
    parts = [module(x[:, :2], source, cache=cache), module(x[:, 2:], torch.zeros_like(source), cache=cache)]
    assert_close(torch.cat(parts, 1), module(x, source), atol=1e-5, rtol=0)
    assert cache.length == S


def decoder() -> Stack:
    return randomized(Stack(transformer(D, 2, H, 24, source_width=10)))


def run(stack: Stack, x, source, cache=None):
    past = cache.length if cache else 0
    return stack(x, source, masks.causal(x.shape[1], past + x.shape[1]), cache=cache)


def test_reordered_cache_continues_the_chosen_rows():
    stack, x, source, cache, rows = decoder(), noise(2, T, D), noise(2, S, 10), Cache(2), torch.tensor([1, 1, 0])
    run(stack, x[:, :4], source, cache)
    cache.reorder(rows)
    ends = noise(3, 2, D, seed=5)
    full = run(stack, torch.cat([x[rows, :4], ends], 1), source[rows])
    assert_close(run(stack, ends, source[rows], cache), full[:, 4:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_cut_cache_continues_from_the_cut(kept):
    stack, x, source, cache = decoder(), noise(2, T, D), noise(2, S, 10), Cache(2)
    with torch.no_grad():
        run(stack, x[:, :5], source, cache)
        cache.cut(kept)
        assert cache.length == kept
        for size in (2, 40):  # within the buffer, and beyond it
            ends = noise(2, size, D, seed=size)
            full = run(stack, torch.cat([x[:, :kept], ends], 1), source)
            assert_close(run(stack, ends, source, cache), full[:, kept:], atol=1e-5, rtol=0)
            cache.cut(kept)


@pytest.mark.parametrize("junk", [1e4, float("nan"), float("inf")])
def test_what_lies_in_the_padding_does_not_matter(junk):
    stack, x, valid = randomized(Stack(transformer(D, 2, H, 24))), noise(B, T, D), masks.padding(LENGTHS, T)
    x[~valid] = junk
    out = stack(x, mask=masks.key_mask(valid), valid=valid)
    for row, length in enumerate(LENGTHS.tolist()):
        assert_close(out[row, :length], stack(x[row : row + 1, :length])[0], atol=1e-5, rtol=0)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize(("left", "right"), [(40, 90), (200, 200), (0, 0), (900, 5)])
@torch.no_grad()
def test_a_local_mask_equals_its_matrix_a_block_at_a_time(relative, left, right):
    module, x = attention(relative=relative), noise(2, 700, D)
    local = masks.Local(left, right, masks.padding(torch.tensor([700, 431]), 700))
    made = module(x, mask=local)
    assert made.isfinite().all()
    assert (module(x, mask=local.dense()) - made)[local.valid].abs().max() <= 1e-5
    size = max(masks.LEAST_BLOCK, left + right)
    assert all(mask.numel() <= 2 * size * (size + left + right) for _, _, mask in local.blocks())
    with capture_attention() as captured:
        assert (module(x, mask=local) - made)[local.valid].abs().max() <= 1e-5
    assert captured[0][1].shape == (2, H, 700, 700)
