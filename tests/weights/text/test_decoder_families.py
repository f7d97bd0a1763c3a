"""Parity with transformers of every family of `weights/text/decoders`: tiny random models, float32."""

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.text import TextTransformer
from multimodal.weights.family import Family
from multimodal.weights.folder import Checkpoint, build
from multimodal.weights.load import families, recognize
from tests.helpers.parity import idle, record
from tests.helpers.references.causal import CASES, CONTEXT, VOCABULARY, case
from tests.helpers.references.released import RELEASED
from tests.helpers.spread import firsts, spread, thin

TOLERANCE = 1e-5
BATCH, LENGTH = 3, 11
PADDED = (0, 3, 5)  # of each row
every_case = pytest.mark.parametrize("name", CASES)
some_cases = pytest.mark.parametrize("name", spread(CASES, 3, pytest.mark.slow, pytest.mark.ci))


def load(name: str, tensors: dict[str, Tensor] | None = None) -> TextTransformer:
    made = case(name)
    return families()[made.family].load(made.tensors if tensors is None else tensors, made.config, "file").model


def texts(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(7))


def left_padded() -> tuple[Tensor, Tensor]:
    """Which ids are real, and the position of each."""
    valid = torch.arange(LENGTH) >= torch.tensor(PADDED)[:, None]
    return valid, (valid.cumsum(1) - 1).clamp(min=0)


def worst(name: str, model: TextTransformer, ids: Tensor) -> dict[str, float]:
    """Largest difference of each state and of the logits."""
    held: list[Tensor] = []
    logits = model.logits(model.states(ids, states=held))
    if model.narrow is not None:  # the reference's last states are narrow
        held[-1] = model.narrow(held[-1])
    reference = case(name).reference(ids, output_hidden_states=True)
    pairs = zip([*held, logits], [*reference.hidden_states, reference.logits], strict=True)
    names = [*(f"states {i}" for i in range(len(held))), "logits"]
    return {key: float((mine - other).abs().max()) for key, (mine, other) in zip(names, pairs, strict=True)}


@firsts(pytest.mark.ci)
@every_case
@torch.no_grad()
def test_states_and_logits_equal_the_references_and_depend_on_every_tensor(name):
    ids = texts(CONTEXT)  # beyond windows and switches
    for length in (LENGTH, CONTEXT):
        found = worst(name, load(name), ids[:, :length])
        for output, difference in found.items():
            record(name, "states" if "state" in output else output, difference)
        assert max(found.values()) <= TOLERANCE, found
    model = load(name)
    found = idle(model, lambda: model(ids))
    assert [own for own in found if not own.endswith("key.bias")] == []  # which shifts a row's scores alike


@thin(2, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@every_case
@torch.no_grad()
def test_padded_and_cached_logits_equal_the_reference(name):
    model, ids, (valid, places), reference = load(name), texts(), left_padded(), case(name).reference
    mine, cache = [], model.new_cache()
    for start, end in pairwise([0, 4, 6, *range(7, LENGTH + 1)]):
        mine.append(model(ids[:, start:end], cache=cache))
    alone = reference(ids).logits
    assert (torch.cat(mine, 1) - alone).abs().max() <= TOLERANCE
    steps = min(6, (model.config.limit_from(LENGTH) or CONTEXT) - LENGTH)
    grown, cache, new = ids, model.new_cache(), ids
    for _ in range(steps):
        new = model(new, cache=cache, last=1).argmax(-1)
        grown = torch.cat([grown, new], 1)
    told = reference.generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, eos_token_id=None)
    assert grown.tolist() == told.tolist()
    # each row alone in the reference, which needs no masks there
    cache, first = model.new_cache(start=torch.tensor(PADDED)), ids[:, :7]
    padded = torch.cat([model(part, cache=cache) for part in (first, *ids[:, 7:].split(1, 1))], 1)
    once = model.logits(model.states(ids, valid=valid, positions=places))
    for row, gone in enumerate(PADDED):
        expected = reference(ids[row : row + 1, gone:]).logits[0]
        assert (padded[row, gone:] - expected).abs().max() <= TOLERANCE
        assert (once[row, gone:] - expected).abs().max() <= TOLERANCE


@some_cases
@torch.no_grad()
def test_a_file_is_recognized_with_and_without_its_head_and_exported_exactly(name):
    made = case(name)
    family = recognize(made.tensors, made.config, "file")
    assert family.name == made.family
    exported = family.export(load(name))
    assert exported.keys() == made.held.keys()
    assert all(exported[key].equal(value) for key, value in made.held.items())
    prefix = "model." if made.family == "opt" else made.reference.base_model_prefix + "."
    bare = {key.removeprefix(prefix): value for key, value in made.tensors.items() if key.startswith(prefix)}
    config = made.config | {"architectures": ["Model"]}
    other = recognize(bare, config, "file")
    assert other.name == f"{made.family}-model"
    model = other.load(bare, config, "file").model
    assert model.config.tied is None
    assert torch.equal(model.states(texts()), load(name).states(texts()))
    assert other.export(model).keys() == bare.keys()


@some_cases
@torch.no_grad()
def test_prepared_copies_take_the_family(name):
    """float32 decodes the same, int8 nearly."""
    model = load(name)
    ids = texts()
    expected = model(ids)
    for kind, limit in (("float32", 1e-5), ("int8", 0.35)):
        copy = prepare_for_inference(Checkpoint(model), kind).model
        cache = copy.new_cache(start=torch.tensor([0, 0, 0]))
        logits = torch.cat([copy(part, cache=cache) for part in ids.split(1, 1)], 1)
        assert (logits - expected).abs().max() <= limit * (expected.abs().max() if kind == "int8" else 1), kind


def family_of(config: dict) -> Family:
    kind = config["model_type"]
    return families()[{"qwen2": "llama-hf", "llama": "llama-hf", "mistral": "llama-hf"}.get(kind, kind)]


@pytest.mark.parametrize("name", spread(RELEASED, 3, pytest.mark.slow, pytest.mark.ci))
def test_released_configurations_build_models_of_their_size(name):
    config, count = RELEASED[name]
    family = family_of(config)
    ours = family.config_from(family.completed(config, {}), {})
    with torch.device("meta"):
        exported = family.export(build(TextTransformer, ours))
    heads = ("lm_head.weight", "embed_out.weight")
    own = [tensor for key, tensor in exported.items() if not (ours.tied and key in heads)]
    assert sum(tensor.numel() for tensor in own) == count


REFUSED = [
    ("StableLM", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
    ("OPT", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not supported"),
    ("OPT", {"word_embed_proj_dim": 12}, "'model.decoder.project_in.weight' is missing"),
    ("Falcon 40B", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3"),
    ("BLOOM", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm True"),
    ("SmolLM3", {"use_sliding_window": True}, "use_sliding_window True is not supported"),
    ("Granite", {"tie_word_embeddings": False}, "tie_word_embeddings False with a factor of logits"),
    ("Gemma 2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("Gemma 2", {"layer_types": ["full_attention"]}, "layer_types ['full_attention']: expected 3 of"),
    ("GPT-NeoX", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ("Qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("Qwen3, yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4, "bata_fast": 9}}, "bata_fast 9 of rope"),
    ("Qwen3", {"rope_parameters": {"rope_type": "mrope", "factor": 4}}, "kind 'mrope' is not supported (one of"),
    ("Phi-3, longrope", {"rope_parameters": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
     "short_factor and long_factor: expected 2 positive numbers each"),
    ("Qwen3, yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}},
     "beta_slow 32.0 to beta_fast 1.0"),
    ("Qwen3, yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
     "rope_parameters has rope_theta 500.0: put it in rope_scaling"),
    ("Qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor 0.5 is not supported: qwen3 turns whole heads"),
    ("Gemma 3", {"attn_logit_softcapping": 1.0}, "attn_logit_softcapping 1.0 is not supported"),
    ("Phi-3", {"is_causal": False}, "is_causal False with a window of 5 tokens is not supported"),
    ("Falcon 7B", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor 0.5 is not supported: falcon turns whole heads"),
    ("BLOOM", {"is_causal": False}, "is_causal False with ALiBi is not supported"),
    ("Gemma", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
    ("Qwen3", {"rms_norm_eps": "1e-6"}, "'1e-6'"),
    ("Qwen3", {"rms_norm_eps": -1}, "norm_eps must be above 0 (got -1)"),
    ("Qwen3", {"max_position_embeddings": -5}, "context must be above 0 (got -5)"),
    ("Granite", {"embedding_multiplier": "12"}, "'12'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "named"), REFUSED)
def test_options_that_are_not_supported_are_refused_by_name_and_value(name, changed, named):
    made = case(name)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        families()[made.family].load(made.tensors, made.config | changed, "file")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_quantized_weights_are_refused_and_plain_ones_beside_such_a_key_read(key):
    made = case("Qwen3")
    config, (name, one) = made.config | {key: {"quant_method": "fp8"}}, next(iter(made.tensors.items()))
    assert recognize(made.tensors, config, "file").name == made.family
    with pytest.raises(CheckpointError, match=f"^file: config.json: {key} .'quant_method': 'fp8'. is not supported"):
        recognize({**made.tensors, name: one.to(torch.float8_e4m3fn)}, config, "file")


def test_numbers_of_8_bits_without_a_scale_are_refused_by_name():
    made = case("Qwen3")
    name, one = next(iter(made.tensors.items()))
    with pytest.raises(CheckpointError, match=rf"^file: tensor '{name}' holds torch.float8_e4m3fn, not torch.float32"):
        families()["qwen3"].load({**made.tensors, name: one.to(torch.float8_e4m3fn)}, made.config, "file")


# of training, of ids that the tokenizer knows, of the library; read where `layer_types` or others are not
NEUTRAL = """
    _name_or_path architectures attention_dropout attention_probs_dropout_prob bos_token_id chunk_size_feed_forward
    classifier_dropout dropout dtype embd_pdrop embedding_dropout eos_token_id hidden_dropout id2label init_std
    initializer_range is_encoder_decoder label2id layerdrop max_position_embeddings output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type resid_pdrop residual_dropout return_dict
    transformers_version use_cache model_type
    max_window_layers use_sliding_window sliding_window _sliding_window_pattern original_max_position_embeddings
    num_kv_heads multi_query
"""


@every_case
def test_no_option_of_the_reference_is_ignored(name):
    """Each of its configuration's keys is read, or is neutral."""

    class Read(dict):
        def __getitem__(self, key):
            seen.add(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            seen.add(key)
            return super().get(key, default)

        def __or__(self, other):
            return Read(super().__or__(other))

    seen, made = set(NEUTRAL.split()), case(name)
    family = families()[made.family]
    family.config_from(Read(family.completed(made.config, {})), made.tensors)
    own = type(made.reference.config)().to_dict().keys() - {"n_layer", "n_head"}  # BLOOM's names of sizes
    assert not own - seen


@torch.no_grad()
def test_options_that_a_configuration_leaves_out_are_the_references():
    made = case("Gemma")
    assert made.config["hidden_act"] == "gelu_pytorch_tanh"
    left = {key: value for key, value in made.config.items() if key != "hidden_act"}
    own = [families()["gemma"].config_from(families()["gemma"].completed(config, made.tensors), made.tensors)
           for config in (made.config, left)]  # fmt: skip
    assert own[0] == own[1]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "SmolLM3", "Granite", "Olmo2",
                                  "Olmo3", "Gemma", "Gemma2", "Phi3", "StableLm", "Starcoder2", "GPTNeoX", "Falcon",
                                  "OPT"])  # fmt: skip
def test_the_longest_text_that_a_configuration_leaves_out_is_the_references(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(num_hidden_layers=2).to_dict()
    wanted, family = config.pop("max_position_embeddings"), family_of(config)
    assert family.config_from(family.completed(config, {}), {}).context == wanted


def test_rope_scaling_goes_before_rope_parameters():
    """As in transformers, whose folders have the latter: people add the former for YaRN."""
    made, family = case("Qwen3, yarn"), families()["qwen3"]
    plain = made.config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    both = plain | {"rope_scaling": made.config["rope_parameters"]}
    wanted, found = (family.load(made.tensors, config, "file").model.config for config in (made.config, both))
    assert found == wanted != family.load(made.tensors, plain, "file").model.config


def test_rope_is_stated_where_transformers_reads_it():
    """GPT-NeoX has names of its own, and beside ropes by kind of layer no other trained length counts."""
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    for name, plain, unread in (
        ("GPT-NeoX", {"rotary_pct": 0.5, "rotary_emb_base": 70}, {"partial_rotary_factor": 0.25, "rope_theta": 9.0}),
        ("Gemma 3", {**yarn, "rope_theta": 500.0}, {"original_max_position_embeddings": 8}),
    ):
        config = {key: value for key, value in case(name).config.items() if key != "rope_parameters"} | plain
        family, (told, found) = families()[case(name).family], ({**config, **unread}, config)
        made = [family.config_from(family.completed(one, {}), case(name).tensors).positions for one in (told, found)]
        theirs = type(case(name).reference.config)(**told).rope_parameters
        theirs = theirs.get("full_attention", theirs)
        assert made[0] == made[1]
        assert made[0].theta == theirs["rope_theta"]
        assert made[0].share == {"GPT-NeoX": 4}.get(name)


def test_a_text_does_not_grow_beyond_a_change_of_its_positions():
    model, ids = load("Phi-3, longrope"), texts(17)
    assert (model.config.limit_from(16), model.config.limit_from(17)) == (16, None)
    cache = model.new_cache()
    model(ids[:, :16], cache=cache)
    with pytest.raises(ValueError, match="cannot grow beyond 16"):
        model(ids[:, 16:], cache=cache)
