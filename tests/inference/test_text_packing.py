"""Texts of different length together are each as alone."""

import pytest
import torch
from torch.testing import assert_close

from multimodal.inference import text_packing
from multimodal.inference.text_packing import encode_ragged, pool_ragged
from tests.helpers.spread import thin
from tests.helpers.tiny import ALL, made

LENGTHS = (3, 1, 12, 5, 2, 7, 12, 4, 4, 1, 6)
ROWS = [torch.randint(1, 23, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
TEXTS = sorted(name for name in ALL if name.startswith("text-") and "to-text" not in name)
TEXTS.remove("text-linear")  # which has no masks of what sees what


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("tokens", [15, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_together_are_each_alone(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_packing, "WIDTHS", (14, 24))
    model = made(name)
    kinds = [[at % 2 for at in range(len(row))] for row in ROWS] if model.segments is not None else None
    found = encode_ragged(model, ROWS, kinds, tokens=tokens)
    for number, (row, states) in enumerate(zip(ROWS, found, strict=True)):
        own = None if kinds is None else torch.tensor([kinds[number]])
        with torch.inference_mode():
            assert_close(states, model.states(torch.tensor([row]), segments=own)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pool", ["mean", "first", "last"])
def test_one_vector_a_text(pool: str):
    model = made("text-encoder")
    states = encode_ragged(model, ROWS)
    right = {"mean": lambda x: x.mean(0), "first": lambda x: x[0], "last": lambda x: x[-1]}[pool]
    assert_close(pool_ragged(model, ROWS, pool), torch.stack([right(x) for x in states]), atol=1e-6, rtol=0)
    assert pool_ragged(model, [], pool).shape == (0, model.config.width)
    model.dropout.p = 0.5
    assert_close(pool_ragged(model.train(), ROWS, pool), torch.stack([right(x) for x in states]), atol=1e-6, rtol=0)
    assert_close(encode_ragged(model, ROWS), states)


def test_an_encoder_whose_embedding_lies_elsewhere():
    model = made("text-to-text")
    found = encode_ragged(model.encoder, ROWS, table=model.decoder.embed)
    with torch.inference_mode():
        right = [model.encode(torch.tensor([row]))[0] for row in ROWS]
    for one, other in zip(found, right, strict=True):
        assert_close(one, other, atol=1e-5, rtol=0)


def test_next_to_no_padding_and_no_batch_above_its_tokens():
    lengths = [5 + 7 * n % 43 for n in range(300)] + [500, 700]
    batches = list(text_packing._batches(lengths, 600))
    assert sorted(number for batch in batches for number in batch.numbers) == list(range(302))
    sums = [sum(lengths[number] for number in batch.numbers) for batch in batches]
    assert all(total <= 600 or len(batch.numbers) == 1 for total, batch in zip(sums, batches, strict=True))
    assert sum(batch.rows * batch.width for batch in batches) <= 1.05 * sum(lengths)
    # a row of 100 alone would be rather empty: that text waits, the shorter one has found a place
    assert [batch.numbers for batch in text_packing._batches([500, 430, 100, 60], 2000)] == [[0, 1, 3], [2]]


def test_refusals():
    model = made("text-encoder")
    for rows, kinds, message in (
        ([[1], []], None, "text 1 has no ids"),
        ([[1] * 13], None, "text 0 of 13 tokens is longer than the context 12"),
        ([[1, 2]], [[0]], "text 0 has 2 ids and 1 segments"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_ragged(model, rows, kinds)
    with pytest.raises(ValueError, match="pool 'most': none of mean, max, first, last"):
        pool_ragged(model, [[1]], "most")
