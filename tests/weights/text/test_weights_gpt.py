"""Parity of GPT-2 and Llama with transformers: tiny random models, float32, all outputs."""

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.train.losses import token_loss
from multimodal.weights.load import recognize
from multimodal.weights.text import gpt2, llama
from tests.helpers.parity import idle, record
from tests.helpers.references.decoders import CASES, CONTEXT, VOCABULARY, case, slow_llama
from tests.helpers.spread import firsts, thin

TOLERANCE = 1e-5
BATCH, LENGTH = 3, 11
PADDED = (0, 3, 5)  # of each row
TIED = ("Llama, tied, biased", "Llama, Meta's, tied", "Qwen2, tied, window")
every_case = pytest.mark.parametrize("name", CASES)
with_head = pytest.mark.parametrize("name", [name for name in CASES if name != "GPT-2, no head"])


def load(name: str, tensors: dict[str, Tensor] | None = None) -> TextTransformer:
    made = case(name)
    return made.family.load(made.tensors if tensors is None else tensors, made.config, "file").model


def texts() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(7))


def left_padded() -> tuple[Tensor, Tensor]:
    """Which ids are real, and the position of each."""
    valid = torch.arange(LENGTH) >= torch.tensor(PADDED)[:, None]
    return valid, (valid.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def ours(model: TextTransformer, ids: Tensor) -> dict[str, Tensor]:
    held: list[Tensor] = []
    states = model.states(ids, states=held)
    made = {f"states {i}": state for i, state in enumerate(held)} | {"last state": states}
    if model.config.tied is None:
        return made
    logits = model.logits(states)
    every = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    return made | {"logits": logits, "loss": token_loss(logits[:, :-1], ids[:, 1:], every) / every.sum()}


@torch.no_grad()
def theirs(name: str, ids: Tensor) -> dict[str, Tensor]:
    model = case(name).reference
    if name == "GPT-2, no head":
        actual = model(ids, output_hidden_states=True)
        last = actual.last_hidden_state
    else:
        actual = model(ids, labels=ids, output_hidden_states=True)
        last = actual.hidden_states[-1]
    made = {f"states {i}": state for i, state in enumerate(actual.hidden_states)} | {"last state": last}
    return made | {key: actual[key] for key in ("logits", "loss") if key in actual}


def differences(name: str, model: TextTransformer) -> dict[str, float]:
    mine, reference = ours(model, texts()), theirs(name, texts())
    assert mine.keys() == reference.keys()
    return {key: (mine[key] - reference[key]).abs().max().item() for key in mine}


@every_case
def test_outputs_equal_the_reference(name):
    actual = differences(name, load(name))
    for output, difference in actual.items():
        record(name, "states" if "state" in output else output, difference)
    assert len(actual) >= 5
    assert max(actual.values()) <= TOLERANCE, actual


@thin(3, pytest.mark.ci)
@every_case
def test_outputs_depend_on_every_tensor(name):
    model = load(name)
    found = idle(model, lambda: model.states(texts()) if model.config.tied is None else model(texts()))
    assert [own for own in found if not own.endswith("key.bias")] == []  # which shifts a row's scores alike


@firsts(pytest.mark.ci)
@with_head
@torch.no_grad()
def test_steps_with_a_cache_equal_the_references(name):
    """Pieces of several lengths, then token by token; both with their caches."""
    model, ids, reference = load(name), texts(), case(name).reference
    cache, past, mine, other = model.new_cache(), None, [], []
    for start, end in pairwise([0, 4, 6, *range(7, LENGTH + 1)]):
        mine.append(model(ids[:, start:end], cache=cache))
        actual = reference(ids[:, start:end], past_key_values=past, use_cache=True)
        past = actual.past_key_values
        other.append(actual.logits)
    difference = (torch.cat(mine, 1) - torch.cat(other, 1)).abs().max().item()
    record(name, "cached logits", difference)
    assert difference <= TOLERANCE
    assert (torch.cat(mine, 1) - model(ids)).abs().max() <= TOLERANCE


@firsts(pytest.mark.ci)
@with_head
@torch.no_grad()
def test_padding_on_the_right_equals_the_reference(name):
    model, ids = load(name), texts()
    valid = torch.arange(LENGTH) < LENGTH - torch.tensor(PADDED)[:, None]
    reference = case(name).reference(ids, attention_mask=valid.long()).logits
    difference = (model.logits(model.states(ids, valid=valid)) - reference)[valid].abs().max().item()
    record(name, "logits, padded right", difference)
    assert difference <= TOLERANCE


@thin(3, pytest.mark.ci)
@with_head
@torch.no_grad()
def test_padding_on_the_left_equals_the_reference(name):
    """In one call, and with a cache."""
    model, ids, (valid, places) = load(name), texts(), left_padded()
    reference = case(name).reference(ids, attention_mask=valid.long(), position_ids=places).logits
    once = model.logits(model.states(ids, valid=valid, positions=places))
    cache = model.new_cache(start=torch.tensor(PADDED))
    first, *steps = ids[:, :7], *ids[:, 7:].split(1, 1)
    cached = torch.cat([model(part, cache=cache) for part in (first, *steps)], 1)
    for mine, what in ((once, "once"), (cached, "cached")):
        difference = (mine - reference)[valid].abs().max().item()
        record(name, f"logits, padded left, {what}", difference)
        assert difference <= TOLERANCE, what


def test_the_released_gpt2_has_no_prefix_and_no_head_and_holds_masks():
    """Its logits are those of the model with a head."""
    tensors = {key.removeprefix("transformer."): value for key, value in case("GPT-2").tensors.items()}
    del tensors["lm_head.weight"]
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    config = {key: case("GPT-2").config[key] for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    model = recognize(tensors, config, "file").load(tensors, config, "file").model
    assert max(differences("GPT-2", model).values()) <= TOLERANCE
    assert not any(key.endswith(".attn.bias") for key in gpt2.BARE.export(model))


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_may_be_left_out_but_not_differ(name):
    head = "output.weight" if "Meta" in name else "lm_head.weight"
    tensors = case(name).tensors
    shorter = {key: value for key, value in tensors.items() if key != head}
    assert max(differences(name, load(name, shorter)).values()) <= TOLERANCE
    with pytest.raises(CheckpointError, match=f"tensor '{head}' differs from the embedding"):
        load(name, tensors | {head: tensors[head] + 1})


@torch.no_grad()
def test_metas_names_compute_what_a_slow_loop_does():
    made, ids = case("Llama, Meta's"), texts()
    slow = torch.stack([slow_llama(made.held, made.config, row) for row in ids[:, :5].tolist()])
    assert (load("Llama, Meta's")(ids[:, :5]) - slow).abs().max() <= TOLERANCE


def test_the_two_conventions_of_turning_are_told_apart():
    """Meta's weights, taken for Hugging Face's, give other logits: the rows are not in the same order."""
    mine, other = case("Llama, Meta's"), load("Llama, Meta's")
    other = TextTransformer(load("Llama").config)
    other.load_state_dict(load("Llama, Meta's").state_dict())
    with torch.no_grad():
        assert (other.eval()(texts()) - mine.reference(texts()).logits).abs().max() > 1e-2


def test_old_files_of_meta_tell_the_base_by_the_rates():
    made = case("Llama, Meta's")
    params = {key: value for key, value in made.config.items() if key != "rope_theta"}
    rates = 10000.0 ** (-torch.arange(0, 4, 2).float() / 4)
    kept = llama.LLAMA.load(made.tensors | {"rope.freqs": rates.bfloat16().float()}, params, "file").model
    assert kept.config.positions.theta == 10000
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        llama.LLAMA.load(made.tensors, params, "file")
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        llama.LLAMA.load(made.tensors | {"rope.freqs": rates * 2}, params, "file")


REFUSED = [
    ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("GPT-2", {"add_cross_attention": True}, "add_cross_attention"),
    ("GPT-2", {"activation_function": "mish"}, "'mish'"),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked_attention"] * 3},
     "layer_types"),
    ("Llama", {"hidden_act": "gelu"}, "'gelu'"),
    ("Llama", {"head_dim": 5}, "5 numbers must be even"),
    ("Llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("Llama", {"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, "'mrope'"),
    ("Llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 0.5}}, "below 1"),
    ("Llama", {"rope_parameters": {"rope_type": "linear"}}, "lacks 'factor'"),
    ("Llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "partial_rotary"),
    ("Llama, Meta's", {"use_scaled_rope": True}, "use_scaled_rope"),
    ("Llama, Meta's", {"moe": {}}, "unknown key 'moe'"),
    ("Llama, Meta's", {"norm_eps": "small"}, "invalid llama configuration"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "named"), REFUSED)
def test_what_the_blocks_cannot_express_is_refused_by_name(name, changed, named):
    made = case(name)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        made.family.load(made.tensors, made.config | changed, "file")


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Llama, Meta's"])
def test_a_size_that_is_missing_is_not_guessed(name):
    made = case(name)
    sizes = [key for key in ("n_positions", "n_head", "num_attention_heads", "rms_norm_eps", "max_seq_len", "n_heads")
             if key in made.config]  # fmt: skip
    for key in sizes:
        with pytest.raises(CheckpointError, match=key):
            made.family.load(made.tensors, {k: v for k, v in made.config.items() if k != key}, "file")
    with pytest.raises(CheckpointError, match=r"without (config|params)\.json"):
        made.family.load(made.tensors, {}, "file")


def test_files_of_transformers_4_have_the_scaling_beside_the_base():
    made = case("Llama, linear")
    old = {key: value for key, value in made.config.items() if key != "rope_parameters"}
    old |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert made.family.load(made.tensors, old, "file").model.config == load("Llama, linear").config
