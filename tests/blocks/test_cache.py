"""Caches of a window and of fixed shape against the cache that holds all, for every kind of text model."""

from dataclasses import replace

import pytest
import torch

from multimodal.blocks.cache import Cache, WindowCache
from multimodal.decoding import sampling
from multimodal.inference import cuda_graphs
from multimodal.models.text import TextTransformer
from tests.helpers.spread import thin
from tests.helpers.tiny import TEXTS, VOCABULARY, made, randomized

TOLERANCE = 2e-6
WINDOWED = {
    name: replace(TEXTS[name], window=4, context=60) for name in ("learned", "rotary", "alibi", "bucket", "shaw")
}


def ids(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def full(model: TextTransformer, start: torch.Tensor | None = None) -> Cache:
    """The cache that holds all positions, which the window's mask hides."""
    cache = Cache(model.config.stack.layers, start)
    cache.context = model.config.limit
    return cache


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("start", [None, [0, 5, 2]])
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_a_window_cache_equals_the_full_one(name, start):
    """Prompts longer and shorter than the window, single ids and chunks, rows that change places."""
    model, tokens = randomized(TextTransformer(WINDOWED[name])), ids(3, 50)
    begun = None if start is None else torch.tensor(start)
    for sizes in ([9, 1, 1, 5, 1, *[1] * 20, 2], [6, 1, 3, 1, 12, 1, 1]):
        pair, at = (model.new_cache(begun), full(model, begun)), 0
        assert isinstance(pair[0], WindowCache)
        for number, size in enumerate(sizes):
            made, expected = (model(tokens[:, at : at + size], cache=cache) for cache in pair)
            assert (made - expected).abs().max() < TOLERANCE
            at += size
            assert pair[0].length == pair[1].length == at
            assert pair[0].cached == min(at, 3)
            if number == 3:
                for cache in pair:
                    cache.reorder(torch.tensor([2, 0, 0]))


def test_a_window_cache_takes_no_more_memory_as_a_text_goes_on():
    model = made("text-window")
    cache, sizes = model.new_cache(), set()
    with torch.no_grad():
        model(ids(1, 200), cache=cache)
        for token in ids(1, 100, 1)[0]:
            model(token[None, None], cache=cache)
            sizes.add(sum(layer._key.untyped_storage().nbytes() for layer in cache.self_attention))
    assert len(sizes) == 1
    assert sizes.pop() < 2 * 40 * 16 * 4 + 1
    assert (cache.length, cache.cached) == (300, 2)


@torch.no_grad()
def test_a_window_cache_goes_back_only_to_what_it_holds():
    model, tokens = randomized(TextTransformer(WINDOWED["rotary"])), ids(2, 9)
    cache = model.new_cache()
    model(tokens[:, :3], cache=cache)
    cache.cut(1)
    assert (cache.length, cache.cached) == (1, 1)
    assert (model(tokens[:, 1:], cache=cache) - model(tokens)[:, 1:]).abs().max() < TOLERANCE
    with pytest.raises(ValueError, match="a window of 4 cannot go back from 9 positions to 8"):
        cache.cut(8)
    cache.cut(9)
    cache.cut(0)
    assert (model(tokens, cache=cache) - model(tokens)).abs().max() < TOLERANCE
    with pytest.raises(ValueError, match="window cache cannot join"):
        cache.join([cache], 9, torch.tensor([0]))


PROMPTS, LIMITS = [[1], [2, 3, 4, 5, 6], [3, 4], [6, 5, 4, 3]], [7, 5, 9, 3]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", [*TEXTS, "learned, windowed"])
def test_static_steps_of_every_kind_find_what_dynamic_ones_find(name):
    model = made(f"text-{name}") if name in TEXTS else randomized(TextTransformer(WINDOWED["learned"]))
    prompt, start = sampling.left_pad(PROMPTS)
    found, logits = [], []
    for step, cache in (
        (lambda new, held: model(new, cache=held), model.new_cache(start)),
        cuda_graphs.static_step(cuda_graphs.GraphDecoder(model), None, start, 14, last=1),
    ):
        seen = []

        def recorded(new, held, step=step, seen=seen):
            seen.append(step(new, held)[:, -1].clone())
            return seen[-1][:, None]

        found.append(sampling.greedy(recorded, prompt, cache, eos=0, max_new=LIMITS).ids)
        logits.append(seen)
    assert found[0] == found[1]
    for one, other in zip(*logits, strict=True):
        assert (one - other).abs().max() < TOLERANCE


@pytest.mark.ci
def test_positions_without_a_table_go_on_beyond_the_context():
    """A static step too, as far as its capacity goes."""
    for config in TEXTS.values():
        if config.limit is None:
            model, tokens = randomized(TextTransformer(config)), ids(1, 30)
            step, cache = cuda_graphs.static_step(cuda_graphs.GraphDecoder(model), None, None, 30)
            with torch.no_grad():
                expected = model(tokens)[:, -1]
                for token in tokens[0]:
                    last = step(token[None, None], cache)
            assert (last[:, -1] - expected).abs().max() < TOLERANCE
