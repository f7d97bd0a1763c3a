"""Mixtures: shares by weight, each source in its own order, the same rows from any epoch on, tables and refusals."""

import math
from collections import Counter

import pytest

from multimodal.data.datasets.text import Packed, TextCorpus, Windows
from multimodal.data.mixture import Mixture, direction_repeats, mixture_weights, temperature_weights
from multimodal.errors import UsageError
from multimodal.tokens.text.characters import CharacterTokenizer

TOKENIZER = CharacterTokenizer("abcdefghij ")


def mixture(weights=(0.7, 0.2, 0.1)) -> Mixture:
    corpora = [TextCorpus.of(["abcdefghij " * size], TOKENIZER) for size in (40, 10, 20)]
    sources = [Windows(corpora[0], 8), Windows(corpora[1], 8), Packed(corpora[2], 8)]
    return Mixture(sources, weights, ["long", "short", "packed"])


def test_shares_follow_the_weights_and_a_source_gives_each_row_once_an_epoch():
    mixed = mixture()
    plan, alone = mixed.plan(4, seed=3), mixed.sources[1].plan(1, 3 + 1 + 1)
    epochs = [plan(epoch) for epoch in range(40)]
    rows = [key for epoch in epochs for batch in epoch for key in batch]
    assert {len(batch) for epoch in epochs for batch in epoch} == {4}
    shares = Counter(number for number, _ in rows)
    for number, weight in enumerate((0.7, 0.2, 0.1)):
        assert shares[number] / len(rows) == pytest.approx(weight, abs=0.03)
    own = [key for number, key in rows if number == 1]
    wanted = [key for epoch in range(60) for batch in alone(epoch) for key in batch]
    assert own == wanted[: len(own)]
    assert len(own) > 3 * len(alone(0))
    for number, key in rows[:20]:
        assert mixed.read((number, key))[0].equal(mixed.sources[number].read(key)[0])
        assert mixed.name((number, key)).startswith(mixed.names[number] + ": ")


def test_any_epoch_is_the_same_without_those_before_it():
    mixed = mixture()
    whole = mixed.plan(4, seed=0)
    expected = [whole(epoch) for epoch in range(8)]
    for epoch in (7, 2, 5, 0):
        assert mixture().plan(4, seed=0)(epoch) == expected[epoch]
        assert whole(epoch) == expected[epoch]
    assert mixture().plan(4, seed=1)(0) != expected[0]


def test_the_table_is_gpt_3s():
    """Table 2.2: weights of 60 % and 3 % of 300 B tokens are 0.44 epochs of 410 B and 3.4 (rounded) of 3 B."""
    mixed = mixture((60, 22, 3))
    sizes = [len(source.plan(1, 0)(0)) for source in mixed.sources]
    rows = mixed.table(1000)
    assert [row.rows for row in rows] == sizes
    assert [row.epochs for row in rows] == pytest.approx([w / 85 * 1000 / n for w, n in zip((60, 22, 3), sizes,
                                                                                           strict=True)])  # fmt: skip
    assert sum(row.weight for row in rows) == pytest.approx(1)


def test_temperature_lifts_what_is_small():
    assert temperature_weights([90, 10], 1) == pytest.approx([0.9, 0.1])
    low = 10**0.2 / (90**0.2 + 10**0.2)
    assert temperature_weights([90, 10], 5) == pytest.approx([1 - low, low])
    assert temperature_weights([90, 10], math.inf) == pytest.approx([0.5, 0.5])


def test_sinkhorns_shares_are_alike_as_source_and_target():
    pairs = {("en", "de"): 900, ("de", "en"): 900, ("en", "cs"): 300, ("cs", "en"): 300, ("de", "cs"): 30,
             ("cs", "de"): 30, ("en", "fr"): 0}  # fmt: skip
    repeats = direction_repeats(pairs, 5)
    counts = {pair: repeats[pair] * pairs[pair] for pair in repeats}
    assert ("en", "fr") not in repeats
    assert sum(counts.values()) == pytest.approx(sum(pairs.values()))
    sizes = {language: sum(n for pair, n in pairs.items() if language in pair) for language in ("en", "de", "cs")}
    wanted = dict(zip(sizes, temperature_weights(list(sizes.values()), 5), strict=True))
    for side in (0, 1):
        for language, share in wanted.items():
            own = sum(n for pair, n in counts.items() if pair[side] == language)
            assert own / sum(counts.values()) == pytest.approx(share, abs=1e-3)
    assert repeats["cs", "de"] > 5 > 1 > repeats["en", "de"]


def test_equal_directions_are_repeated_alike_where_others_are_missing():
    pairs = {way: count for other, count in (("de", 1000), ("fr", 500), ("cs", 20))
             for way in (("en", other), (other, "en"))}  # fmt: skip
    repeats = direction_repeats(pairs, 5)
    for other in ("de", "fr", "cs"):
        assert repeats["en", other] == pytest.approx(repeats[other, "en"])
    assert sum(repeats[pair] * pairs[pair] for pair in pairs) == pytest.approx(sum(pairs.values()))
    assert repeats["en", "cs"] > 5 > 1 > repeats["en", "de"]


@pytest.mark.parametrize("weights", [(0, 0, 0), (1, -1, 3), (1, math.nan, 1), (1, math.inf, 1), (1, 2)])
def test_weights_that_cannot_be_drawn_from_are_refused(weights):
    with pytest.raises(UsageError, match="weights"):
        mixture(weights)


def test_a_sum_of_0_is_named():
    with pytest.raises(UsageError, match=r"^epochs \[0, 0\]: sum to 0"):
        mixture_weights([0, 0], "epochs")
