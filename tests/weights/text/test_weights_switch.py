"""Switch Transformer: dropped tokens as in transformers, at any spacing of sparse blocks, alone as in a batch."""

import copy

import pytest
import torch
from torch.testing import assert_close

from multimodal.blocks.experts import Router
from multimodal.decoding.sampling import cross_attention_step, greedy
from multimodal.errors import CheckpointError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.text_packing import encode_ragged
from multimodal.weights.folder import Checkpoint
from tests.helpers.references.seq2seq import VOCABULARY, case, switch_case
from tests.helpers.spread import thin

NAME = "Hugging Face Switch Transformer"
SOURCE = torch.randint(3, VOCABULARY, (3, 14), generator=torch.Generator().manual_seed(1))
ANSWER = torch.randint(3, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(2))
VALID = torch.arange(14) < torch.tensor([14, 9, 5])[:, None]


def load(made, **change):
    return made.family.load(made.tensors, made.config | change, "file").model


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("sparse", [(1, 1), (3, 2)])
@torch.inference_mode()
def test_tokens_beyond_the_capacity_are_dropped_as_in_transformers(sparse):
    encoder, decoder = sparse
    made = switch_case(expert_capacity=2, num_sparse_encoder_layers=encoder, num_sparse_decoder_layers=decoder)
    model = load(made)
    exact = copy.deepcopy(made.reference).double()  # in float32 the rounding of both comes near 1e-5
    theirs = exact(input_ids=SOURCE, attention_mask=VALID.long(), decoder_input_ids=ANSWER).logits
    mine = copy.deepcopy(model).double()(SOURCE, ANSWER, VALID)
    assert (mine - theirs).abs().max() <= 1e-5
    assert (load(made, expert_capacity=64)(SOURCE, ANSWER, VALID) - theirs).abs().max() > 1e-3  # some were dropped
    expected = made.reference.generate(
        input_ids=SOURCE, attention_mask=VALID.long(), max_new_tokens=8, eos_token_id=2, decoder_start_token_id=0,
    )[:, 1:].tolist()  # fmt: skip
    step = cross_attention_step(model.decode, model.encode(SOURCE, VALID), VALID)
    actual = greedy(step, torch.zeros(3, 1, dtype=torch.long), model.decoder.new_cache(), eos=2, max_new=8).ids
    assert actual == [row[: row.index(2)] if 2 in row else row for row in expected]


@torch.inference_mode()
def test_a_row_gets_the_same_experts_alone_padded_and_packed():
    model = load(switch_case(expert_capacity=2))
    states = model.encode(SOURCE, VALID)
    rows = [row[real].tolist() for row, real in zip(SOURCE, VALID, strict=True)]
    packed = encode_ragged(model.encoder, rows, table=model.decoder.embed)
    for alone, own in zip(packed, states, strict=True):
        assert_close(own[: len(alone)], alone, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_routers_compute_in_float32_in_any_copy():
    model = load(case(NAME))
    router = next(part for part in model.modules() if isinstance(part, Router))
    x = torch.randn(5, router.in_features)
    expected = router(x)
    assert_close(copy.deepcopy(router).bfloat16()(x), expected, atol=0.02, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x), expected)
    prepared = prepare_for_inference(Checkpoint(model), "float32").model
    theirs = case(NAME).reference(input_ids=SOURCE, decoder_input_ids=ANSWER).logits
    assert (prepared(SOURCE, ANSWER) - theirs).abs().max() <= 1e-5
    for kind in ("bfloat16", "int8"):
        assert prepare_for_inference(Checkpoint(model), kind).model(SOURCE, ANSWER).isfinite().all()


def test_only_ties_say_if_states_are_scaled_before_the_head():
    assert load(case(NAME), scale_decoder_outputs=False).config == load(case(NAME)).config


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"num_experts": 0}, "num_experts must be 1 to 1024 (got 0)"),
        ({"num_experts": 4}, ".mlp.experts.expert_3."),
        ({"expert_capacity": 0}, "expert_capacity must be 1 to any number (got 0)"),
        ({"num_sparse_encoder_layers": 4}, "num_sparse_encoder_layers must be 1 to 3 (got 4)"),
        ({"num_sparse_decoder_layers": 2}, "is missing"),
        ({"router_bias": True}, "router_bias True, router_dtype 'float32' is not supported"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_in_one_line(change, cause):
    with pytest.raises(CheckpointError) as error:
        load(case(NAME), **change)
    assert str(error.value).startswith("file: ")
    assert cause in str(error.value)
