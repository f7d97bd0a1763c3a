"""Checkpoints whose encoders are those of shipped models."""

import copy
from dataclasses import replace

import pytest
import torch

from multimodal import load
from multimodal.errors import CheckpointError
from multimodal.system import assets
from multimodal.train.objectives.any_to_text_model import AnySettings, begin
from multimodal.weights.files.shared import SharedPart
from multimodal.weights.folder import Checkpoint, load_folder, save_folder

SHARED = (SharedPart("image", "clip-vit-16", "image"),)


@pytest.fixture(scope="module")
def made() -> Checkpoint:
    known = begin(load("clip-vit-16"), None, ["a dog", "a cat"], AnySettings(300, 16, 1, 2, 64))
    return replace(known, shared=SHARED)


@pytest.mark.ci
def test_a_shared_encoder_is_loaded_from_the_shipped_model_and_takes_no_room(made, tmp_path):
    save_folder(made, tmp_path / "any", "float16")
    assert (tmp_path / "any" / "model.safetensors").stat().st_size < 100_000
    again = load_folder(tmp_path / "any")
    assert again.shared == SHARED
    expected = load("clip-vit-16").model.image.state_dict()
    assert all(torch.equal(again.model.image.state_dict()[name], tensor) for name, tensor in expected.items())
    save_folder(again, tmp_path / "again", "float16")
    assert all(
        (tmp_path / "any" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        for name in ("config.json", "model.safetensors")
    )


def test_what_differs_is_not_shared(made, tmp_path):
    own = replace(made, model=copy.deepcopy(made.model))
    own.model.image.embed.weight.data[0] += 1
    with pytest.raises(CheckpointError, match=r"image\..* differs from that of the shipped model"):
        save_folder(own, tmp_path / "any")
    with pytest.raises(CheckpointError, match="image is that of 'none', which does not ship"):
        save_folder(replace(made, shared=(SharedPart("image", "none", ""),)), tmp_path / "any")
    with pytest.raises(CheckpointError, match="clip-vit-16 has no part 'vision'"):
        save_folder(replace(made, shared=(SharedPart("image", "clip-vit-16", "vision"),)), tmp_path / "any")


def test_another_version_of_the_shipped_model_is_refused(made, tmp_path, monkeypatch):
    save_folder(made, tmp_path / "any")
    known = assets.shipped()
    monkeypatch.setattr("multimodal.weights.files.shared.shipped", lambda: {"clip-vit-16": known["captioner-mini"]})
    with pytest.raises(CheckpointError, match="image is of another version of clip-vit-16 than the shipped one"):
        load_folder(tmp_path / "any")
