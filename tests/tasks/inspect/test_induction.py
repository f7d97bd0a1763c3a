"""Induction scores: a circuit built by hand has them, a random model has chance."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.capture import capture_attention
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import UsageError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tasks.inspect.induction import ablated, copying, induction, usable_ids
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from tests.helpers.tiny import ENCODER, TEXTS, VOCABULARY, made, randomized, text

WORDS, PLACES, LENGTH = 20, 24, 10
SHARP = 60.0  # of queries, so that a softmax takes one key


@torch.no_grad()
def circuit() -> TextTransformer:
    """Elhage et al.'s (2021) two layers: the first copies the token before, the second looks for its own token there.
    States are [token | place | token before | token that came next], each one-hot."""
    width = 3 * WORDS + PLACES
    block = BlockConfig(AttentionConfig(width, 1, bias=False), 1, norm="rms")
    model = TextTransformer(TextConfig(WORDS, PLACES, StackConfig(block, 2), causal=True, tied=False))
    for parameter in model.stack.blocks.parameters():
        parameter.zero_()
    for block in model.stack.blocks:
        block.attention_branch.norm.weight.fill_(1)
    token, place, before, after = torch.eye(width).split((WORDS, PLACES, WORDS, WORDS))
    model.embed.weight.copy_(token)
    model.positions.copy_(place)
    first, second = (block.attention for block in model.stack.blocks)
    first.query.weight.copy_(SHARP * place[:-1].T @ place[1:])  # a place asks for the one before
    first.key.weight.copy_(place.T @ place)
    first.value.weight.copy_(before.T @ token)
    first.out.weight.copy_(torch.eye(width))
    second.query.weight.copy_(SHARP * token.T @ token)
    second.key.weight.copy_(token.T @ before)
    second.value.weight.copy_(after.T @ token)
    second.out.weight.copy_(torch.eye(width))
    model.stack.norm.weight.fill_(1)
    model.head.weight.copy_(after * SHARP)
    return model.eval()


def test_a_circuit_by_hand_is_found():
    found = induction(circuit(), range(1, WORDS), LENGTH, rows=4, begin=0)
    assert found.prefix_matching[1, 0] > 0.99
    assert found.previous[0, 0] > 0.99
    assert found.prefix_matching[0, 0] < 0.01
    assert found.previous[1, 0] < 0.2
    first, second = found.losses
    assert second < 0.1 < first


def test_without_the_first_layer_nothing_is_found():
    model = circuit()
    nn.init.zeros_(model.stack.blocks[0].attention.out.weight)
    assert induction(model, range(1, WORDS), LENGTH, begin=0).prefix_matching.max() < 0.2


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "linear"])
def test_scores_are_what_the_captured_weights_say(name):
    config = replace(TEXTS[name], context=17)
    model = randomized(TextTransformer(config))
    asked = []
    model.stack.register_forward_pre_hook(lambda *_: asked.append(1))
    found = induction(model, VOCABULARY, 8, rows=3, seed=1, begin=2)
    assert len(asked) == 1
    heads = config.stack.block.attention.heads
    assert found.prefix_matching.shape == found.previous.shape == (2, heads)
    ids = []
    handle = model.embed.register_forward_pre_hook(lambda _, inputs: ids.append(inputs[0]))
    induction(model, VOCABULARY, 8, rows=3, seed=1, begin=2)
    handle.remove()
    (ids,) = ids
    assert (ids[:, 0] == 2).all()
    assert (ids[:, 1:9] == ids[:, 9:]).all()
    assert all(len(set(row)) == 8 for row in ids[:, 1:9].tolist())
    with capture_attention() as seen, torch.no_grad():
        logits = model(ids)
    for layer, (_, weights) in enumerate(seen):
        for head in range(heads):
            looked = [float(weights[r, head, i, i - 7]) for r in range(3) for i in range(9, 17)]
            assert found.prefix_matching[layer, head] == pytest.approx(sum(looked) / len(looked), abs=1e-6)
            before = [float(weights[r, head, i, i - 1]) for r in range(3) for i in range(2, 17)]
            assert found.previous[layer, head] == pytest.approx(sum(before) / len(before), abs=1e-6)
    nats = -logits.log_softmax(-1)
    second = [float(nats[r, i, ids[r, i + 1]]) for r in range(3) for i in range(9, 16)]
    assert found.losses[1] == pytest.approx(sum(second) / len(second), rel=1e-5)


def test_a_model_that_attends_evenly_has_chance():
    model = made("text-rotary")
    for block in model.stack.blocks:
        nn.init.zeros_(block.attention.query.weight)
        nn.init.zeros_(block.attention.query.bias)
    chance = sum(1 / (i + 1) for i in range(20, 40)) / 20
    assert induction(model, VOCABULARY, 20).prefix_matching.flatten().tolist() == pytest.approx([chance] * 4)


def test_the_mode_stays_and_chunks_change_nothing(monkeypatch):
    model = made("text-rotary").train()
    whole = induction(model, VOCABULARY, 6, rows=5)
    assert model.training
    monkeypatch.setattr("multimodal.tasks.inspect.induction.AT_ONCE", 1)
    parts = induction(model, VOCABULARY, 6, rows=5)
    torch.testing.assert_close(whole.prefix_matching, parts.prefix_matching)
    assert whole.losses == pytest.approx(parts.losses, rel=1e-5)


def test_few_ids_come_twice():
    assert induction(made("text-rotary"), [3, 4, 5], 9).prefix_matching.shape == (2, 2)


def test_control_ids_are_not_drawn():
    tokenizer = ByteTokenizer()
    usable = usable_ids(tokenizer)
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(usable)
    assert len(usable) >= 256


def test_what_cannot_be_looked_at_is_refused():
    with pytest.raises(UsageError, match="expected a causal language model"):
        induction(randomized(TextTransformer(ENCODER)), VOCABULARY, 4)
    with pytest.raises(UsageError, match=r"context of 12 tokens \(got 50: 100 tokens\)"):
        induction(made("text-learned"), VOCABULARY)
    with pytest.raises(UsageError, match="the context of 32768"):
        induction(made("text-rotary"), VOCABULARY, 10**20)
    with pytest.raises(UsageError, match="attention without weights"):
        induction(made("text-linear"), VOCABULARY, 4)
    with pytest.raises(UsageError, match="1 usable ids"):
        induction(randomized(TextTransformer(replace(text(tied=True), positions=PositionConfig("none")))), [3], 4)


def test_the_circuits_second_head_copies_and_the_first_does_not():
    scores = copying(circuit(), range(1, WORDS), LENGTH, rows=4)
    assert scores.shape == (2, 1)
    assert scores[1, 0] > 0.99
    assert scores[0, 0] < 0.5


def test_ablated_heads_give_nothing_and_come_back():
    model = circuit()
    before = induction(model, range(1, WORDS), LENGTH, rows=4, begin=0)
    for head in ((0, 0), (1, 0)):
        with ablated(model, [head]):
            without = induction(model, range(1, WORDS), LENGTH, rows=4, begin=0)
        assert without.losses[1] > 10 * before.losses[1]
    assert torch.equal(induction(model, range(1, WORDS), LENGTH, rows=4, begin=0).prefix_matching,
                       before.prefix_matching)  # fmt: skip


def test_one_of_several_heads_is_ablated():
    model = made("text-rotary")
    ids = torch.tensor([[3, 5, 7]])
    out = model.stack.blocks[0].attention.out
    with ablated(model, [(0, 1)]):
        found = model.states(ids)
    width = model.stack.blocks[0].attention.head_width
    with torch.no_grad():
        out.weight[:, width : 2 * width] = 0
    assert torch.equal(found, model.states(ids))
