"""Mixture of experts: routing against its formula, Mixtral against transformers, and sizes at the edges."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks.experts import Experts, ExpertsConfig, balance_loss, router_logits
from multimodal.errors import CheckpointError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.tasks.inspect.cost import counts
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load, load_foreign
from tests.helpers.references.vision import randomized
from tests.helpers.tiny import text

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, output_router_logits=True)
    model = randomized(transformers.MixtralForCausalLM(config))
    folder = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(folder)
    return folder, model


def test_a_token_gets_the_weighted_sum_of_its_experts():
    torch.manual_seed(0)
    module = Experts(ExpertsConfig(4, 2), 6, 8, "silu", gated=True)
    x = torch.randn(3, 5, 6)
    made, chances = module(x), module.router(x).softmax(-1)
    for row in range(3):
        for place in range(5):
            values, chosen = chances[row, place].topk(2)
            parts = [
                module.experts[int(i)](x[row, place]) * v / values.sum() for v, i in zip(values, chosen, strict=True)
            ]
            assert_close(made[row, place], sum(parts), atol=1e-6, rtol=1e-5)
    whole = Experts(ExpertsConfig(3, 3), 6, 8, "gelu")
    every = torch.stack([expert(x) for expert in whole.experts], -1)
    assert_close(whole(x), (every * whole.router(x).softmax(-1)[..., None, :]).sum(-1), atol=1e-6, rtol=1e-5)


def test_more_experts_than_tokens_work_and_unused_ones_get_no_gradient():
    module = Experts(ExpertsConfig(8, 1), 6, 8, "gelu")
    module(torch.randn(1, 2, 6)).sum().backward()
    used = sum(expert.up.weight.grad is not None for expert in module.experts)
    assert 1 <= used <= 2
    assert module(torch.zeros(1, 0, 6)).shape == (1, 0, 6)
    with pytest.raises(ValueError, match=r"must be 1 to 2, the number of experts \(got 3\)"):
        ExpertsConfig(2, 3)


@torch.inference_mode()
def test_mixtral_equals_transformers_with_its_balance_loss(mixtral):
    folder, theirs = mixtral
    made = load(folder).model
    ids = torch.randint(3, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    valid = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    other = theirs(ids, attention_mask=valid.long())
    with router_logits() as logits:
        mine = made(ids, valid=valid)
    assert (other.logits - mine)[valid].abs().max() <= 1e-5
    assert_close(balance_loss(logits, 2, valid.flatten()), other.aux_loss, atol=1e-5, rtol=0)
    with router_logits() as logits:
        made(ids)
    assert_close(balance_loss(logits, 2), theirs(ids).aux_loss, atol=1e-5, rtol=0)
    cache, parts = made.new_cache(), []
    for at in range(0, 12, 4):
        parts.append(made(ids[:, at : at + 4], cache=cache))
    assert_close(torch.cat(parts, 1), theirs(ids).logits, atol=1e-5, rtol=0)


def test_mixtral_goes_back_to_the_bit_and_a_corrupted_expert_shows(mixtral):
    from safetensors.torch import load_file

    from multimodal.weights.text.decoders.mixtral import FAMILY

    folder, theirs = mixtral
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    checkpoint = load_foreign(tensors, config, "file")
    assert checkpoint.card["format"] == "mixtral"
    again = FAMILY.export(checkpoint.model)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in again)
    name, ids = "model.layers.1.block_sparse_moe.experts.3.w3.weight", torch.arange(3, 30)[None]
    broken = load_foreign(tensors | {name: tensors[name] + 0.3}, config, "file").model
    with torch.inference_mode():
        assert (broken(ids) - theirs(ids).logits).abs().max() > 1e-4
    for change, cause in (
        ({"num_experts_per_tok": 6}, "6 of num_local_experts 5"),
        ({"num_local_experts": 6}, "missing"),
    ):
        with pytest.raises(CheckpointError, match=cause):
            load_foreign(tensors, config | change, "file")


@torch.inference_mode()
def test_prepared_copies_equal_transformers(mixtral):
    folder, theirs = mixtral
    checkpoint = load(folder)
    ids = torch.arange(3, 20)[None]
    prepared = prepare_for_inference(Checkpoint(copy.deepcopy(checkpoint.model)), "float32").model
    assert (prepared(ids) - theirs(ids).logits).abs().max() <= 1e-5
    cache = prepared.new_cache()
    prepared(ids[:, :-1], cache=cache)
    assert (prepared(ids[:, -1:], cache=cache)[:, -1] - theirs(ids).logits[:, -1]).abs().max() <= 1e-5


@pytest.mark.ci
def test_operations_grow_with_the_experts_of_a_token_alone():
    base = text(tied=True, context=32)

    def flops(count: int, top: int) -> float:
        block = replace(base.stack.block, experts=ExpertsConfig(count, top))
        found = counts(replace(base, stack=replace(base.stack, block=block)), length=32, batch=1)["flops"]
        return sum(part["forward"] for part in found.values())

    assert flops(8, 2) == pytest.approx(flops(4, 2), rel=0.05)
    assert flops(4, 2) > 1.2 * flops(4, 1)
