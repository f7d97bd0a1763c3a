"""Preprocessing and GELU of bare weights files: required by name, never guessed."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from multimodal.errors import CheckpointError, UsageError
from multimodal.tokens.image.preprocessing import IMAGENET_MEAN, IMAGENET_STD, OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.weights import load as loading
from multimodal.weights.convert import convert
from multimodal.weights.load import load
from tests.helpers.commands import one_line, run

VISION = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
NAME = "tiny-clip"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    from open_clip.model import CLIP

    torch.manual_seed(0)
    return CLIP(16, VISION, TEXT).state_dict()


@pytest.fixture(autouse=True)
def tiny_architecture(monkeypatch):
    """An architecture of a few thousand weights in the place of OpenCLIP's."""
    known = lambda name: {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT,
                          "quick_gelu": name.endswith("-quickgelu")}  # fmt: skip
    monkeypatch.setattr(loading, "architecture_config", known)


@pytest.fixture
def bare(tensors, tmp_path):
    save_file(tensors, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_unknown_preprocessing_is_refused_and_the_flag_is_named(capsys, bare, images):
    common = ["classify", images, "--labels", "red,blue", "-m", bare, "--architecture", NAME]
    code, out, err = run(capsys, *common)
    assert (code, out) == (1, "")
    line = one_line(err)
    assert "--preprocessing is needed: " in line
    assert "does not state its own (openai, imagenet, inception, siglip, or a JSON file)" in line
    actual = {name: run(capsys, *common, "--preprocessing", name) for name in ("openai", "siglip")}
    assert all(code == 0 and err == "" for code, _, err in actual.values())
    assert actual["openai"][1] != actual["siglip"][1]


def test_conventions_are_those_of_the_references(bare):
    expected = {
        "openai": Preprocessing((32, 32), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0),
        "imagenet": Preprocessing((32, 32), "shortest", "bicubic", IMAGENET_MEAN, IMAGENET_STD, 0, 0.875),
        "inception": Preprocessing((32, 32), "shortest", "bicubic", (0.5,) * 3, (0.5,) * 3, 0, 0.9),
        "siglip": Preprocessing((32, 32), "squash", "bicubic", (0.5,) * 3, (0.5,) * 3, 0, 1.0),
    }
    for name, record in expected.items():
        actual = load(bare, NAME, name)
        assert actual.preprocessing == record
        assert name in actual.card["preprocessing_from"]


def test_a_file_and_a_record_are_taken_and_what_does_not_fit_is_refused(bare, tmp_path):
    record = Preprocessing((32, 32), "squash", "bilinear", OPENAI_MEAN, OPENAI_STD, 7, 1.0)
    path = tmp_path / "preprocessing.json"
    path.write_text(json.dumps(record.to_dict()))
    assert load(bare, NAME, path).preprocessing == load(bare, NAME, record).preprocessing == record
    with pytest.raises(UsageError, match="preprocessing opneai: neither a file nor one of openai, imagenet"):
        load(bare, NAME, "opneai")
    path.write_text(json.dumps(record.to_dict() | {"sise": 3}))
    with pytest.raises(CheckpointError, match=r"preprocessing\.json: unknown key 'sise'"):
        load(bare, NAME, path)
    with pytest.raises(UsageError, match="must be a multiple of the patch"):
        load(bare, NAME, record.replace(size=(40, 40)))
    with pytest.warns(UserWarning, match="the model was trained with"):
        load(bare, NAME, record.replace(size=(48, 48)))


@pytest.mark.ci
def test_convert_keeps_what_was_asked_for_and_another_is_said(capsys, bare, images, tmp_path):
    assert run(capsys, "convert", bare, tmp_path / "ours", "--architecture", NAME, "--preprocessing", "openai")[0] == 0
    ours = load(tmp_path / "ours")
    assert ours.preprocessing == load(bare, NAME, "openai").preprocessing
    assert ours.card["preprocessing_from"] == "preprocessing openai: not stated by the checkpoint"
    assert "openai: not stated" in run(capsys, "info", tmp_path / "ours")[1]
    with pytest.raises(UsageError, match="preprocessing is for a checkpoint folder, not for openclip, which holds"):
        convert(bare, tmp_path / "out.safetensors", NAME, "openclip", preprocessing="openai")
    with warnings.catch_warnings(action="error"):
        load(tmp_path / "ours", preprocessing="openai")
    with pytest.warns(UserWarning, match="preprocessing siglip: replaces that of"):
        load(tmp_path / "ours", preprocessing="siglip")


def test_a_model_that_takes_no_images_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is for image models, .* is a joint_conformer"):
        load("asr-conformer-en", preprocessing="openai")


def test_openais_archive_under_an_architecture_without_its_activation_is_refused(tensors, tmp_path):
    """Three numbers beside the weights show OpenAI's own file; plain GELU would cost points without a sign."""
    numbers = {"input_resolution": 32, "context_length": 77, "vocab_size": 49408}
    save_file(tensors | {name: torch.tensor(value) for name, value in numbers.items()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="trained with quick-GELU, which this architecture lacks"):
        load(tmp_path / "a.safetensors", NAME)
    for architecture in (None, f"{NAME}-quickgelu"):
        assert load(tmp_path / "a.safetensors", architecture).model.config.text.stack.block.activation == "quick_gelu"


@pytest.mark.parametrize(
    ("name", "word"),
    [("ViT-B-32-openai", "openai"), ("vit_b_32-quickgelu-laion400m_e32", "quickgelu"), ("b32_metaclip", "metaclip"),
     ("laion2b_s34b_b79k", None)],
)  # fmt: skip
def test_a_name_that_speaks_of_quick_gelu_is_a_warning(tensors, tmp_path, name, word):
    save_file(tensors, tmp_path / f"{name}.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path / f"{name}.safetensors", NAME)
        load(tmp_path / f"{name}.safetensors", f"{NAME}-quickgelu")
    assert [f"{word!r} in its name" in str(w.message) for w in caught] == ([True] if word else [])
