"""Folders of timm's models beside timm's own loader: options, pixels, and the names of the classes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import multimodal
from multimodal.errors import CheckpointError
from multimodal.tokens.image.preprocessing import preprocess
from multimodal.weights.load import load
from tests.helpers.references.vision import randomized
from tests.helpers.spread import thin

VIT, CLIP = "vit_tiny_patch16_224", "vit_base_patch16_clip_quickgelu_224"
ARGS = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 64}
PIXELS = {"input_size": [3, 64, 64], "interpolation": "bilinear", "crop_pct": 0.7, "crop_mode": "center",
          "mean": [0.4, 0.5, 0.6], "std": [0.3, 0.2, 0.1]}  # fmt: skip


def saved(folder: Path, architecture: str, args: dict[str, Any], config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = timm.models.model_entrypoint(architecture)(pretrained=False, num_classes=5, **args)
    save_file({name: tensor.contiguous() for name, tensor in randomized(model).state_dict().items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"architecture": architecture, "num_classes": 5} | config))


def check(folder: Path) -> None:
    """Pixels and logits equal those of the model that timm loads."""
    reference, own = timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), load(folder)
    image = Image.effect_mandelbrot((131, 83), (-2, -1, 1, 1), 40).convert("RGB")
    pixels = timm.data.create_transform(**timm.data.resolve_model_data_config(reference))(image)
    assert preprocess(image, own.preprocessing).equal(pixels)
    with torch.no_grad():
        assert (own.model(pixels[None]) - reference(pixels[None])).abs().max() <= 1e-5


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("eva02_tiny_patch14_224", {"ref_feat_shape": None, "img_size": 56}),
     ("beit_base_patch16_224", {"init_values": None}), ("deit3_small_patch16_224", {"init_values": None}),
     (CLIP, {"act_layer": None}), (CLIP, {"norm_layer": None}), (VIT, {"img_size": 70}), (VIT, {})],
)  # fmt: skip
def test_options_of_the_model_count_as_stated_null_included(architecture, options, tmp_path):
    args = ARGS | options
    pixels = PIXELS | {"input_size": [3, args["img_size"], args["img_size"]]}
    saved(tmp_path, architecture, args, {"model_args": args, "pretrained_cfg": pixels})
    check(tmp_path)


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(
    "changed",
    [{"mean": 0.5}, {"std": [0.5]}, {"mean": None, "std": None}, {"crop_pct": None}, {"interpolation": ""},
     {"input_size": [3, 96, 96], "fixed_input_size": True}, *({key: ...} for key in PIXELS if key != "input_size")],
    ids=str,
)  # fmt: skip
def test_values_of_the_preprocessing_are_timms(changed, tmp_path):
    pixels = {key: value for key, value in (PIXELS | changed).items() if value is not ...}
    saved(tmp_path, VIT, ARGS, {"model_args": ARGS, "pretrained_cfg": pixels, "global_pool": None})
    check(tmp_path)


@pytest.mark.parametrize("changed", [{"input_size": [3, 96, 96]}, {"input_size": None}], ids=str)
def test_images_have_the_size_of_a_model_that_takes_no_other(changed, tmp_path):
    saved(tmp_path, VIT, ARGS, {"model_args": ARGS, "pretrained_cfg": PIXELS | changed})
    with pytest.raises(CheckpointError, match=r"input_size \[\d+, \d+\], where the .* takes \(64, 64\) alone"):
        load(tmp_path)
    args = ARGS | {"dynamic_img_size": True}
    saved(tmp_path, VIT, args, {"model_args": args, "pretrained_cfg": PIXELS | changed})
    check(tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("architecture", ["test_vit", "test_vit.r160_in1k", VIT])
def test_older_files_state_the_preprocessing_beside_the_architecture(architecture, tmp_path):
    args = {"img_size": 96} if architecture == VIT else {}
    side = 96 if architecture == VIT else 160
    fixed = {"fixed_input_size": True, "input_size": [3, side, side], "labels": [*"abcde"]}
    saved(tmp_path, architecture, args, PIXELS | fixed)
    check(tmp_path)
    assert load(tmp_path).card["labels"] == [*"abcde"]


@pytest.mark.parametrize("names", ["abc", "abcdef"])
def test_names_for_another_number_of_classes_are_ignored_with_a_warning(names, tmp_path):
    saved(tmp_path, VIT, ARGS, {"model_args": ARGS, **PIXELS, "label_names": [*names]})
    with pytest.warns(UserWarning, match=rf"label_names: {len(names)} for 5 classes; they are ignored"):
        assert load(tmp_path).card["labels"] == [f"LABEL_{number}" for number in range(5)]


@pytest.mark.parametrize("name", ["TimmWrapperForImageClassification", "TimmWrapperModel"])
@pytest.mark.parametrize("architecture", [VIT, "eva02_tiny_patch14_224"])
def test_folders_of_transformers_load_too(name, architecture, tmp_path):
    import transformers

    args = ARGS | {"img_size": 56}
    config = transformers.TimmWrapperConfig.from_dict({
        "architecture": architecture, "num_classes": 3, "model_args": args, "label_names": ["a cat", "a dog", "ox"],
        "pretrained_cfg": PIXELS | {"input_size": [3, 56, 56], "pool_size": None, "first_conv": "patch_embed.proj",
                                    "classifier": "head", "fixed_input_size": True},
    })  # fmt: skip
    reference = randomized(getattr(transformers, name)(config))
    reference.save_pretrained(tmp_path)
    own, image = load(tmp_path), Image.effect_mandelbrot((131, 83), (-2, -1, 1, 1), 40).convert("RGB")
    pixels = transformers.AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
    assert preprocess(image, own.preprocessing).equal(pixels[0])
    with torch.no_grad():
        made = reference(pixels)
        theirs = made.pooler_output if name == "TimmWrapperModel" else made.logits
        assert (own.model(pixels) - theirs).abs().max() <= 1e-5
    assert own.card.get("labels") == (None if name == "TimmWrapperModel" else ["a cat", "a dog", "ox"])


@pytest.mark.parametrize(("classes", "problem"), [(1, None), (3, "multi_label_classification")])
def test_scores_of_one_class_or_of_several_labels_are_those_of_transformers_pipeline(classes, problem, tmp_path):
    import transformers

    config = transformers.TimmWrapperConfig.from_dict({
        "architecture": VIT, "num_classes": classes, "model_args": ARGS, "problem_type": problem,
        "pretrained_cfg": PIXELS | {"input_size": [3, 64, 64], "pool_size": None, "fixed_input_size": True},
    })  # fmt: skip
    randomized(transformers.TimmWrapperForImageClassification(config)).save_pretrained(tmp_path)
    image = Image.effect_mandelbrot((31, 83), (-2, -1, 1, 1), 40).convert("RGB")
    expected = transformers.pipeline("image-classification", str(tmp_path), device="cpu")(image)
    found = multimodal.classify(image, model=tmp_path)[0]["scores"]
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], abs=1e-5)
    record = json.loads((tmp_path / "config.json").read_text()) | {"problem_type": "regression"}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="problem_type 'regression' is not supported"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "options", "named"),
    [("naflexvit_base_patch16_siglip", {"depth": 1, "embed_dim": 32, "num_heads": 2},
      "is not a plain ViT (class NaFlexVit)"),
     ("test_convnext", {}, "is not a plain ViT (class ConvNeXt)"),
     ("aimv2_large_patch14_224", ARGS, "is not a plain ViT (proj_bias False or a gate of attention)"),
     ("vit_base_patch16_xp_224", ARGS, "is not a plain ViT (blocks of class ParallelScalingBlock)"),
     ("eva02_base_patch14_224", ARGS | {"qkv_fused": True},
      "timm's model with these tensors is not supported (eva02_base_patch14_224; ")],
)  # fmt: skip
def test_architectures_that_are_not_supported_are_refused_with_the_part_that_differs(
    architecture, options, named, tmp_path
):
    saved(tmp_path, architecture, options, {"model_args": options, **PIXELS})
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path))}: .*{re.escape(named)}"):
        load(tmp_path)


REFUSED = [
    ({"label_names": "abcde"}, "label_names: expected 5 names, or a name for each number from 0 on (got 'abcde')"),
    ({"label_names": ["", *"bcde"]}, "label_names: expected 5 names"),
    ({"label_names": {"0": "a", "1": "b", "2": "c", "3": "d", "7": "e"}}, "label_names: expected 5 names"),
    ({"label_names": {"0": "", "1": "b"}}, "label_names: expected 5 names"),
    ({"label_names": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}}, "label_names: expected 5 names"),
    ({"label_names": [*"abcde"], "label_descriptions": ["q"]}, "label_descriptions: expected an object"),
    ({"mean": [0.5, 0.5]}, "mean: expected three numbers (got [0.5, 0.5])"),
    ({"std": "0.5"}, "std: expected three numbers (got '0.5')"),
    ({"model_args": ARGS | {"global_pool": "max"}}, "is not a plain ViT (global_pool 'max')"),
    ({"model_args": ARGS | {"global_pool": "avg", "pool_include_prefix": True}}, "(pool_include_prefix True with"),
    ({"model_args": ARGS | {"in_chans": 1}}, "is not a plain ViT (in_chans 1)"),
    ({"model_args": ARGS | {"patch_size": [8, 16]}}, "is not a plain ViT (PatchEmbed, patch (8, 16))"),
    ({"model_args": ARGS | {"img_size": 70, "dynamic_img_pad": True}}, "(dynamic_img_pad True with images of (70, 70)"),
]


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("changed", "named"), REFUSED)
def test_what_is_wrong_or_not_supported_is_named(changed, named, tmp_path):
    saved(tmp_path, VIT, ARGS, {"model_args": ARGS, **PIXELS, **changed})
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path))}: .*{re.escape(named)}"):
        load(tmp_path)
