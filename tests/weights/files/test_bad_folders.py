"""Hugging Face folders that are wrong: each fault in one line that names what to mend."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from multimodal.errors import CheckpointError
from multimodal.weights.load import load, recognize
from tests.helpers.references import speech
from tests.helpers.references.causal import case
from tests.helpers.spread import thin

INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    """Two shards of a tiny Qwen3."""
    made, inner = case("Qwen3"), tmp_path / "model"
    inner.mkdir()
    names = sorted(made.tensors)
    places = {name: f"{i % 2}.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        save_file({name: made.tensors[name] for name in names if places[name] == place}, inner / place)
    (inner / INDEX).write_text(json.dumps({"weight_map": places}))
    (inner / "config.json").write_text(json.dumps(made.config))
    assert load(inner).model.config.stack.layers == 3
    return inner


CONFIGS = [
    ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, r"BartForCausalLM is not supported \(bart; 36 tens"),
    ({"model_type": "qwen4"}, r"unknown format \(qwen4; .*\); near: qwen3"),
    ({"model_type": "unispeech"}, r"unknown format \(unispeech; [^;]*\)$"),  # no model of another task is near
    (
        {"model_type": "llava", "vision_config": {"model_type": "pixtral"}},  # Pixtral as transformers saves it
        r"unknown format \(llava with vision_config of kind 'pixtral'; ",
    ),
    (
        {"model_type": "phi", "auto_map": {"AutoModel": "own.Model"}},
        r"near: phi3.*; auto_map names code, which is never",
    ),
    ({"num_hidden_layers": 10**9, "layer_types": None}, "layers: 1000000000, more than 1000"),
    (
        {"num_hidden_layers": 999, "layer_types": None},
        "layers: 999 in all, more than the 36 tensors of the file can fill",
    ),
    ({"hidden_size": 48}, r"has shape \[.*\], not \[.*\], as the configuration says"),
    (
        {"num_hidden_layers": 2, "layer_types": None, "architectures": ["Qwen3ForCausalLM"]},
        r"unexpected tensor 'model\.layers\.2\..*' of Qwen3ForCausalLM$",
    ),
    ({"head_dim": 7}, "7 numbers must be even"),
]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("changed", "cause"), CONFIGS)
def test_a_configuration_that_contradicts_its_tensors_or_is_unknown(folder, changed, cause):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError, match=cause) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("parakeet-ctc", "lasr_ctc"), ("parakeet-rnnt", "nemotron_asr_streaming"), ("hubert", "hubert-other"),
     ("moonshine", "moonshine_streaming")],
)  # fmt: skip
def test_a_speech_model_of_another_kind_is_unknown_not_damaged(name, kind):
    made = speech.case(name)
    with pytest.raises(CheckpointError, match=rf"^file: unknown format \({kind}; "):
        recognize(made.tensors, made.config | {"model_type": kind}, "file")


def test_a_speech_encoder_without_a_head_is_named():
    made = speech.case("hubert")
    tensors = {name: tensor for name, tensor in made.tensors.items() if not name.startswith("lm_head")}
    with pytest.raises(CheckpointError, match=r"^file: HubertModel is not supported \(hubert; [^;]*\)$"):
        recognize(tensors, made.config | {"architectures": ["HubertModel"]}, "file")


def test_code_that_a_configuration_names_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "own.Model"}}))
    (folder / "own.py").write_text("raise SystemExit(7)")
    with pytest.warns(UserWarning, match="auto_map of config.json is ignored"):
        assert load(folder).model.config.vocabulary == 53


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("outside", r"weight_map: '\.\./x\.safetensors' names no file in"), ("missing", r"1\.safetensors: no such file"),
     ("doubled", r"2 of its files hold tensor '.*'"), ("unlisted", r"tensor '.*' is missing, though .* lists it")],
)  # fmt: skip
def test_shards_that_are_outside_missing_or_doubled(folder, fault, cause):
    index = json.loads((folder / INDEX).read_text())
    places = index["weight_map"]
    if fault == "outside":
        save_file({EMBEDDING: torch.zeros(53, 24)}, folder.parent / "x.safetensors")
        places[EMBEDDING] = "../x.safetensors"
    elif fault == "missing":
        (folder / "1.safetensors").unlink()
    elif fault == "unlisted":
        places[EMBEDDING] = f"{1 - int(places[EMBEDDING][0])}.safetensors"
    else:
        tensors = case("Qwen3").tensors
        save_file({name: tensors[name] for name in tensors if places[name][0] == "1" or name == EMBEDDING},
                  folder / "1.safetensors")  # fmt: skip
        save_file({name: tensors[name] for name in tensors if places[name][0] == "0" or name == EMBEDDING},
                  folder / "0.safetensors")  # fmt: skip
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=cause) as caught:
        load(folder)
    assert re.fullmatch(r"[^\n]+", str(caught.value))
