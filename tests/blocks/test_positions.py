"""Positions against published implementations and against their formulas written as loops."""

import math

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks.positions import (
    BucketBias,
    GridRotary,
    RelativeTerm,
    Rotation,
    alibi,
    computed_on_cpu,
    interpolate_grid,
    relative_distances,
    rotary,
    sinusoids,
)
from tests.helpers.tiny import randomized


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_table_of_any_size_costs_nothing_on_the_meta_device():
    with torch.device("meta"):
        table = computed_on_cpu((1 << 40, 1 << 20), lambda: pytest.fail("computed"))
    assert table.shape == (1 << 40, 1 << 20)
    assert computed_on_cpu((2, 3), lambda: torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2


def test_sinusoids_equal_whispers():
    from whisper.model import sinusoids as whispers

    assert_close(sinusoids(torch.arange(1500), 384), whispers(1500, 384), atol=1e-6, rtol=0)


def test_sinusoids_equal_vaswanis_formula():
    table = sinusoids(torch.arange(50), 12, offset=0)
    for position in (0, 1, 49):
        for i in range(6):
            angle = position / 10000 ** (2 * i / 12)
            assert_close(table[position, i].item(), math.sin(angle), atol=1e-5, rtol=0)
            assert_close(table[position, 6 + i].item(), math.cos(angle), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bucket_bias_equals_t5s(bidirectional):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(num_heads=4, d_model=8, d_kv=2, is_decoder=not bidirectional)
    theirs = T5Attention(config, has_relative_attention_bias=True)
    ours = BucketBias(4, bidirectional=bidirectional)
    ours.table.load_state_dict(theirs.relative_attention_bias.state_dict())
    distance = relative_distances(300, 300)
    assert torch.equal(ours.bucket(distance), theirs._relative_position_bucket(distance, bidirectional, 32, 128))
    assert torch.equal(ours(distance), theirs.compute_bias(300, 300)[0])
    assert torch.equal(ours(relative_distances(2, 300)), ours(distance)[:, -2:])  # the last queries, as with a cache


@pytest.mark.parametrize(("bidirectional", "furthest"), [(False, 16), (True, 8)])
def test_buckets_that_reach_no_further_than_single_distances_are_refused(bidirectional, furthest):
    with pytest.raises(ValueError, match=f"furthest {furthest} is too small for 32 buckets"):
        BucketBias(4, furthest=furthest, bidirectional=bidirectional)
    assert BucketBias(4, furthest=furthest + 1, bidirectional=bidirectional).bucket(torch.tensor([[-500]])) < 32


def test_alibi_slopes_are_the_published_ones():
    published = {8: [1 / 2**i for i in range(1, 9)]}
    published[12] = published[8] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    for heads, slopes in published.items():
        bias = alibi(heads, relative_distances(2, 5))
        for head, slope in enumerate(slopes):
            expected = torch.tensor([[-3, -2, -1, 0, -1], [-4, -3, -2, -1, 0]]) * slope
            assert_close(bias[head], expected, atol=1e-6, rtol=0)


def test_rotary_equals_llamas():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    query, key = noise(2, 4, 9, 8), noise(2, 2, 9, 8, seed=1)
    positions = torch.stack([torch.arange(9), torch.arange(9) + 100])
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    expected = apply_rotary_pos_emb(query, key, *LlamaRotaryEmbedding(config)(query, positions))
    turn = rotary(positions, 8)
    assert_close((turn(query), turn(key)), expected, atol=1e-5, rtol=0)
    assert_close(rotary(positions[1], 8)(query)[1], expected[0][1], atol=1e-5, rtol=0)
    wide = query.double()
    assert_close(3 * turn(wide / 3), turn(wide), atol=1e-12, rtol=0)  # in float64 throughout


def test_interleaved_rotary_is_complex_multiplication():
    x, positions, theta = noise(2, 3, 5, 8), torch.arange(5) + 7, 500.0
    rates = theta ** (-torch.arange(4) / 4)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones(5, 4), positions[:, None] * rates)
    ours = rotary(positions, 8, theta, interleaved=True)(x)
    assert_close(ours, torch.view_as_real(turned).flatten(-2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_scores_depend_on_the_distance_alone(interleaved):
    query, key = noise(8), noise(8, seed=1)

    def score(i: int, j: int, scale: float = 1.0) -> torch.Tensor:
        turns = [rotary(torch.tensor([p]), 8, 100.0, scale, interleaved) for p in (i, j)]
        return (turns[0](query.expand(1, 1, 1, 8)) * turns[1](key.expand(1, 1, 1, 8))).sum()

    assert_close(score(3, 1), score(52, 50), atol=1e-4, rtol=0)
    assert (score(3, 1) - score(3, 2)).abs() > 0.05
    assert_close(score(12, 4, scale=0.25), score(3, 1), atol=1e-5, rtol=0)  # four times the trained length


def test_grid_rotary_scores_depend_on_the_offset_alone():
    rows, columns, width = 4, 5, 16
    turn = Rotation(GridRotary().angles((rows, columns), width), interleaved=False)
    query, key = noise(width), noise(width, seed=1)
    scores = (turn(query.expand(1, 1, 20, -1)) @ turn(key.expand(1, 1, 20, -1)).mT)[0, 0]
    scores = scores.unflatten(0, (rows, columns)).unflatten(2, (rows, columns))
    by_offset: dict[tuple[int, int], list[float]] = {}
    for r in range(rows):
        for c in range(columns):
            for s in range(rows):
                for d in range(columns):
                    by_offset.setdefault((r - s, c - d), []).append(scores[r, c, s, d].item())
    for values in by_offset.values():
        assert max(values) - min(values) < 1e-4
    for offset in ((0, 1), (1, 0), (0, -1), (-1, 0), (1, 1)):
        assert abs(by_offset[offset][0] - by_offset[0, 0][0]) > 0.01


@pytest.mark.parametrize("new", [(6, 6), (3, 8), (9, 5), (4, 6), (7, 1), (1, 9)])
def test_interpolated_grid_equals_timms(new):
    from timm.layers import resample_abs_pos_embed

    table = noise(24, 8)
    expected = resample_abs_pos_embed(table[None], list(new), [4, 6], num_prefix_tokens=0)[0]
    assert_close(interpolate_grid(table, (4, 6), new), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("old", "new"), [(4, (2, 3)), (4, (8, 4)), (19, (19, 25)), (7, (1, 41))])
def test_buckets_of_positions_are_transformers(old, new):
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    module = Idefics3VisionEmbeddings(Idefics3VisionConfig(hidden_size=8, image_size=old, patch_size=1))
    pixels, mask = torch.zeros(1, 3, *new), torch.ones(1, *new, dtype=torch.bool)
    expected = (module(pixels, mask) - module.patch_embedding.bias)[0]
    table = module.position_embedding.weight
    assert_close(interpolate_grid(table, (old, old), new, mode="bucket"), expected, atol=1e-6, rtol=0)


def test_a_grid_of_the_same_size_stays_as_it_is():
    table = noise(24, 8)
    assert interpolate_grid(table, (4, 6), (4, 6)) is table


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 7), (1, 4)])
def test_relative_term_equals_the_loop(queries, keys):
    term, query, scale = randomized(RelativeTerm(12, 3, 4)), noise(2, 3, queries, 4), 0.7
    moved, bias = term(query, keys, scale)
    assert_close(moved, query + term.content[:, None], atol=0, rtol=0)
    for i in range(queries):
        for j in range(keys):
            distance = torch.tensor([keys - queries + i - j])
            relation = term.project(sinusoids(distance, 12, offset=0))[0].unflatten(0, (3, 4))
            expected = ((query[:, :, i] + term.position) * relation).sum(-1) * scale
            assert_close(bias[:, :, i, j], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("new", [(7, 9), (3, 4), (4, 7)])
def test_dinos_interpolation_is_its_formula(new):
    """Bicubic of four points a side (a = -0.75) at (i + 0.5) · old / (new + 0.1) - 0.5, the edges repeated."""
    table = 0.2 * torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def kernel(x: float) -> float:
        x, a = abs(x), -0.75
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        return near if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0

    def weights(old: int, size: int) -> torch.Tensor:
        rows = torch.zeros(size, old, dtype=torch.float64)
        for i in range(size):
            at = (i + 0.5) * old / (size + 0.1) - 0.5
            for point in range(math.floor(at) - 1, math.floor(at) + 3):
                rows[i, min(max(point, 0), old - 1)] += kernel(at - point)
        return rows

    expected = torch.einsum("rh,cw,hwd->rcd", weights(4, new[0]), weights(6, new[1]), table.unflatten(0, (4, 6)))
    found = interpolate_grid(table.float(), (4, 6), new, offset=0.1)
    assert_close(found, expected.flatten(0, 1).float(), atol=1e-6, rtol=0)
    assert not torch.allclose(found, interpolate_grid(table.float(), (4, 6), new), atol=1e-3)
    assert interpolate_grid(table, (4, 6), (4, 6), offset=0.1) is table
