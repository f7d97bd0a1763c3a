"""Each mask against its definition, a pair of positions at a time, with as many queries as keys and fewer."""

import pytest
import torch

from multimodal.blocks import masks

RULES = {
    "causal": (masks.causal, lambda q, k: k <= q),
    "prefix": (lambda t, s: masks.prefix(t, s, 3), lambda q, k: k <= q or k < 3),
    "window": (lambda t, s: masks.window(t, s, 2), lambda q, k: q - 2 <= k <= q),
    "two-sided": (lambda t, s: masks.window(t, s, 1, 2), lambda q, k: q - 1 <= k <= q + 2),
    "blocks": (lambda t, s: masks.blocks(t, s, 3), lambda q, k: k // 3 <= q // 3),
    "dilated": (lambda t, s: masks.dense(masks.strided(2, 2), t, s), lambda q, k: k in (q, q - 2, q - 4)),
    "causal-global": (
        lambda t, s: masks.dense(masks.all_of(masks.before, masks.any_of(masks.near(1), masks.first(2))), t, s),
        lambda q, k: k <= q and (q - k <= 1 or k < 2),
    ),
}


@pytest.mark.parametrize("queries", [8, 3, 1])
@pytest.mark.parametrize("name", RULES)
def test_mask_equals_its_definition(name, queries):
    make, rule = RULES[name]
    keys = 8
    expected = [[rule(q, k) for k in range(keys)] for q in range(keys - queries, keys)]
    assert make(queries, keys).tolist() == expected


def test_padding_marks_the_first_positions():
    valid = masks.padding(torch.tensor([3, 0, 1]), 3)
    assert valid.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert masks.key_mask(valid).shape == (3, 1, 1, 3)


def test_documents_see_only_themselves():
    ids = torch.tensor([[4, 4, 7], [1, 2, 1]])
    seen = masks.documents(ids)
    assert seen.shape == (2, 1, 3, 3)
    for b in range(2):
        for q in range(3):
            for k in range(3):
                assert seen[b, 0, q, k] == (ids[b, q] == ids[b, k])


def test_merge_keeps_the_bias_where_attending_is_allowed():
    bias, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])
    assert masks.merge(None, None) is None
    assert masks.merge(mask, None) is mask
    assert masks.merge(None, bias) is bias
    assert masks.merge(mask, bias).tolist() == [[1.0, -torch.inf]]
    assert masks.merge(bias, bias).tolist() == [[2.0, 4.0]]


def test_random_blocks_are_as_many_as_asked_and_the_own_one():
    rule = masks.random_blocks(24, 4, 2, torch.Generator().manual_seed(3))
    seen = masks.dense(rule, 24, 24)
    each = seen.unflatten(0, (6, 4)).unflatten(2, (6, 4))
    whole = each.all(dim=3).all(dim=1)
    assert torch.equal(whole, each.any(dim=3).any(dim=1))  # blocks are seen whole or not at all
    assert whole.diagonal().all()
    assert set(whole.sum(1).tolist()) <= {2, 3}
    assert not torch.equal(whole, whole[0].expand(6, 6))
