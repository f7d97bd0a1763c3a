"""Configurations, preprocessing and tokenizers of the vision families."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from multimodal.errors import CheckpointError, UsageError
from multimodal.models.presets import preset
from multimodal.tasks.classify.head import head_labels
from multimodal.tokens.image.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OPENAI_MEAN,
    OPENAI_STD,
    Preprocessing,
    preprocess,
)
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.weights.folder import build
from multimodal.weights.load import load, recognize
from multimodal.weights.table import export_tensors
from multimodal.weights.vision import clip_hf, clip_openai, open_clip_trunk, siglip, vit_timm
from multimodal.weights.vision.image_processor import preprocessing
from multimodal.weights.vision.open_clip import open_clip_architecture, open_clip_preprocessing
from tests.helpers.counting import undrawn
from tests.helpers.references.vision import case
from tests.helpers.spread import thin

CLIP_PIXELS = Preprocessing((24, 16), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)


def write(path: Path, record: dict) -> None:
    path.write_text(json.dumps(record), encoding="utf-8")


FAMILIES = {
    "open_clip": ["ViT-M-16-alt", "ViT-bigG-14", "ViT-H-14-CLIPA-336", "ViT-H-14-worldwide"],
    "open_clip-timm": ["ViT-SO400M-16-SigLIP-i18n-256", "ViT-gopt-16-SigLIP2-256", "PE-Core-T-16-384",
                       "MobileCLIP2-L-14"],
    "open_clip-timm-flat": ["vit_medium_patch16_gap_256"], "open_clip-timm-apart": ["EVA02-B-16"],
    "open_clip-resnet": ["RN50", "RN101-quickgelu", "RN50x4", "RN50x16", "RN50x64"],
    "open_clip-timm-flat-convnext": ["convnext_base_w", "convnext_large_d_320", "convnext_xxlarge"],
    "open_clip-timm-stem": ["MobileCLIP-B"],
    "open_clip-timm-fastvit": ["MobileCLIP2-S0", "MobileCLIP-S1", "MobileCLIP-S2", "MobileCLIP2-S3", "MobileCLIP2-S4"],
}  # fmt: skip
LARGE = {  # with a sister of the kind
    "RN50x4", "RN50x16", "RN50x64", "convnext_large_d_320", "convnext_xxlarge", "MobileCLIP-S1", "MobileCLIP-S2",
    "MobileCLIP2-S3", "MobileCLIP2-S4", "MobileCLIP2-L-14", "ViT-gopt-16-SigLIP2-256", "ViT-bigG-14",
}  # fmt: skip
CUSTOM = ("ViT-SO400M-16-SigLIP-i18n-256", "ViT-gopt-16-SigLIP2-256", "PE-Core-T-16-384", "EVA02-B-16", "Mobile")


@pytest.mark.parametrize(("family", "architecture"), [
    pytest.param(name, one, marks=pytest.mark.slow if one in LARGE else pytest.mark.ci)
    for name, some in FAMILIES.items() for one in some
])  # fmt: skip
def test_architectures_of_open_clip_have_its_names_and_shapes(family, architecture):
    import open_clip.model

    record = open_clip_architecture(architecture)
    kind = open_clip.model.CustomTextCLIP if architecture.startswith(CUSTOM) else open_clip.model.CLIP
    with undrawn():
        theirs = kind(**{key: value for key, value in record.items() if key != "custom_text"}).state_dict()
    made = recognize(theirs, record, "file")
    assert made.name == family
    config = made.config_from(record, theirs)
    ours = export_tensors(made.rows(config), build(made.model, config).state_dict())
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}


def test_the_configurations_of_b32_are_the_preset():
    from transformers import CLIPConfig

    expected = preset("clip_b32")
    assert clip_openai.FAMILY.config_from(open_clip_architecture("ViT-B-32-quickgelu"), {}) == expected
    assert clip_hf.config_from(CLIPConfig().to_dict(), {}) == expected
    assert clip_hf.config_from({"model_type": "clip"}, {}) == expected  # what is left out has the library's default
    old = {"text_config": {"hidden_act": "gelu"}, "text_config_dict": {"eos_token_id": 2}}
    assert clip_hf.config_from(old, {}) == expected  # the older key goes first; 2 means the highest id


def test_quickgelu_is_known_for_every_architecture_and_unknown_names_list_the_near():
    assert open_clip_architecture("ViT-S-16-quickgelu") == open_clip_architecture("ViT-S-16") | {"quick_gelu": True}
    assert "quick_gelu" not in open_clip_architecture("ViT-B-32")
    with pytest.raises(UsageError, match=r"'ViT-B32' is not one of OpenCLIP's; near: .*ViT-B-32"):
        open_clip_architecture("ViT-B32")


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("vision_cfg", "layers", [3, 4, 6, 3]), ("vision_cfg", "attentional_pool", True),
     ("vision_cfg", "timm_model_name", "convnext_base"), ("vision_cfg", "pool_type", "none"),
     ("vision_cfg", "norm_kwargs", {"bias": False}), ("vision_cfg", "scale_heads", True),
     ("text_cfg", "hf_model_name", "roberta-base"), ("text_cfg", "embed_cls", True), ("text_cfg", "pool_type", "first"),
     ("text_cfg", "act_kwargs", {"approximate": "fast"}), ("", "multimodal_cfg", {"width": 8}),
     ("vision_cfg", "patch_size", [16, 32])],
)  # fmt: skip
def test_what_open_clip_has_and_we_do_not_is_refused_by_key(part, key, value):
    record = {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {}}
    (record[part] if part else record)[key] = value
    with pytest.raises(CheckpointError, match=f"{key} .*is not supported|{key} .*has a ViT"):
        clip_openai.FAMILY.config_from({"model_cfg": record}, {})


@pytest.mark.parametrize("text", ["roberta-base", None])
def test_a_text_tower_of_hugging_face_is_named(text):
    config = {"model_cfg": {"vision_cfg": {"width": 8}, "text_cfg": {"hf_model_name": text}}}
    named = f"OpenCLIP with text_cfg.hf_model_name '{text}'" if text else "OpenCLIP"
    with pytest.raises(CheckpointError, match=rf"file: unknown format \({named}; 1 tensors such as text\.proj"):
        recognize({"text.proj.weight": torch.zeros(1)}, config, "file")


@pytest.mark.ci
def test_the_two_numbers_of_a_clip_may_have_an_axis():
    made = case("OpenCLIP SigLIP")
    tensors = {name: t[None] if name.startswith("logit_") else t for name, t in made.tensors.items()}
    record = made.config["model_cfg"] | {"nonscalar_logit_scale": True}
    model = made.family.load(tensors, {"model_cfg": record}, "file").model
    assert model.logit_scale.equal(made.reference.logit_scale)
    assert model.logit_bias.equal(made.reference.logit_bias)
    with pytest.raises(CheckpointError, match=r"tensor 'logit_scale' has shape \[2\], not \[\]"):
        made.family.load(tensors | {"logit_scale": torch.zeros(2)}, {"model_cfg": record}, "file")


@pytest.mark.parametrize(
    ("trunk", "cause"),
    [("vit_small_patch16_rope_mixed_224", "positions RotaryEmbeddingMixed"),
     ("vit_relpos_small_patch16_224", "class VisionTransformerRelPos"),
     ("test_vit4", "norm RmsNorm"), ("vit_nonesuch", "timm has no model")],
)  # fmt: skip
def test_a_timm_model_that_is_no_plain_vit_is_refused(trunk, cause):
    with pytest.raises(CheckpointError, match=cause):
        vit_timm.config_from({"architecture": trunk, "num_classes": 0}, {})


@pytest.mark.parametrize(
    ("family", "config", "cause"),
    [(vit_timm.FAMILY, {}, "architecture="), (clip_hf.FAMILY, {}, r"config\.json"),
     (siglip.FAMILY, {}, r"config\.json"),
     (vit_timm.FAMILY, {"architecture": "vit_tiny_patch16_224", "global_pool": "avg"}, "global_pool 'avg'"),
     (vit_timm.FAMILY, {"num_classes": 3}, "lacks 'architecture'"),
     (clip_hf.FAMILY, {"text_config": {"hidden_act": "mish"}}, "hidden_act 'mish'"),
     (clip_hf.FAMILY, {"text_config": {"eos_token_id": [1, 2]}}, "eos_token_id"),
     (siglip.FAMILY, {"vision_config": {"vision_use_head": False}}, "vision_use_head"),
     (siglip.FAMILY, {"vision_config": {"hidden_size": 1152}}, "must equal the image width")],
)  # fmt: skip
def test_an_incomplete_or_contradictory_configuration_is_refused(family, config, cause):
    with pytest.raises(CheckpointError, match=f"file: .*{cause}"):
        family.load({}, config, "file")


def test_a_folder_as_transformers_saves_it(tmp_path):
    from transformers import CLIPImageProcessor

    made = case("Hugging Face CLIP")
    made.reference.save_pretrained(tmp_path)
    sizes = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    CLIPImageProcessor(**sizes).save_pretrained(tmp_path)
    checkpoint = load(tmp_path)
    assert checkpoint.preprocessing == CLIP_PIXELS.replace(size=(24, 24), offset="floor")
    assert checkpoint.tokenizer is None  # a vocabulary of 50 is not CLIP's
    assert clip_hf.FAMILY.export(checkpoint.model)["logit_scale"].equal(made.tensors["logit_scale"])


def test_siglip_squashes_its_images(tmp_path):
    from transformers import SiglipImageProcessor

    case("Hugging Face SigLIP").reference.save_pretrained(tmp_path)
    SiglipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    half = (0.5, 0.5, 0.5)
    assert load(tmp_path).preprocessing == Preprocessing(
        (24, 24), "squash", "bicubic", half, half, 0, 1.0, offset="floor"
    )


@pytest.mark.parametrize("resample", [1, 2, 3])
def test_each_filter_gives_the_pixels_of_transformers(resample, tmp_path):
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    theirs = SiglipImageProcessorPil(size={"height": 24, "width": 20}, resample=resample)
    theirs.save_pretrained(tmp_path)
    image = Image.effect_mandelbrot((61, 43), (-2, -1, 1, 1), 40).convert("RGB")
    expected = theirs(image, return_tensors="pt")["pixel_values"][0]
    assert preprocess(image, preprocessing(tmp_path, {})).equal(expected)


@pytest.mark.parametrize("name", ["Hugging Face CLIP", "Hugging Face SigLIP", "Hugging Face BLIP", "Hugging Face GIT"])
def test_images_of_another_size_than_the_towers_are_refused(name, tmp_path):
    case(name).reference.save_pretrained(tmp_path)
    record = {"size": {"height": 32, "width": 32}, "image_processor_type": "ViTImageProcessor"}
    write(tmp_path / "preprocessor_config.json", record)
    with pytest.raises(CheckpointError, match=r"size \(32, 32\) must be \(24, 24\)"):
        load(tmp_path)


def test_older_names_of_the_two_configurations_count_in_clip_alone():
    for name, family, reads in (("CLIP", clip_hf.FAMILY, True), ("SigLIP", siglip.FAMILY, False)):
        config = case(f"Hugging Face {name}").config
        older = {f"{part}_dict": config[part] | {"layer_norm_eps": 0.03} for part in ("text_config", "vision_config")}
        made = family.config_from(config | older, {})
        expected = {0.03} if reads else {config["text_config"]["layer_norm_eps"]}
        assert {tower.stack.block.norm_eps for tower in (made.text, made.image)} == expected


def test_a_tower_without_a_projection_has_the_width_of_the_embedding():
    record = {"embed_dim": 20, "vision_cfg": {"width": 32}, "text_cfg": {"proj_type": "none", "width": 24, "heads": 3}}
    with pytest.raises(CheckpointError, match="embed 20, where the text tower without a projection has 24"):
        clip_openai.FAMILY.load({}, record, "file")


def test_steps_of_an_image_processor_that_are_not_known_are_refused_by_name(tmp_path):
    record = {"size": 256, "crop_size": 224, "image_mean": OPENAI_MEAN, "image_std": OPENAI_STD}
    cases = [
        ({"crop_size": 300}, "crop_size (300, 300) after size (256, 256)"),
        ({"crop_size": {"height": 224, "width": 200}}, "crop_size (224, 200) after size (256, 256)"),
        *(({f"do_{step}": off}, f"do_{step} {off}") for step in ("resize", "rescale", "normalize")
          for off in (False, None)),
        ({"resample": 0}, "resample 0"), ({"resample": 3.0}, "resample 3.0"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor 0.0078"),
        ({"do_pad": True, "pad_size": {"height": 300, "width": 300}}, "pad_size {'height': 300"),
        ({"do_center_crop": False}, "size 256 without do_center_crop"),
        ({"image_processor_type": "ConvNextImageProcessor"}, "image processor 'ConvNext'"),
        ({"image_processor_type": "MobileViTImageProcessorFast"}, "image processor 'MobileViT'"),
        ({"feature_extractor_type": "LevitFeatureExtractor"}, "image processor 'Levit'"),
    ]  # fmt: skip
    for change, named in cases:
        write(tmp_path / "preprocessor_config.json", record | change)
        with pytest.raises(CheckpointError, match=rf"preprocessor_config\.json: {re.escape(named)}.* not supported"):
            preprocessing(tmp_path, {})


def test_a_broken_image_processor_is_one_line_with_file_key_and_value(tmp_path):
    record = {"size": 256, "crop_size": 224, "image_mean": OPENAI_MEAN, "image_std": OPENAI_STD}
    cases = [("size", [64, 64]), ("size", {"height": 0, "width": 0}), ("size", {"longest_edge": 64}), ("size", None),
             ("size", {"longest_edge": 60, "shortest_edge": 48}), ("crop_size", {"shortest_edge": 224}),
             ("image_mean", None), ("image_std", [1, "2", 3]), ("rescale_factor", None)]  # fmt: skip
    for key, value in cases:
        write(tmp_path / "preprocessor_config.json", record | {key: value})
        with pytest.raises(CheckpointError, match=rf"preprocessor_config\.json: {key}: .*{re.escape(repr(value))}"):
            preprocessing(tmp_path, {})


def test_open_clip_resizes_to_a_rectangle_by_bicubic_interpolation_alone(tmp_path):
    import open_clip

    image = Image.effect_mandelbrot((61, 43), (-2, -1, 1, 1), 40).convert("RGB")
    for size in ([48, 32], [32, 32]):
        pixels = {"size": 24, "mean": OPENAI_MEAN, "std": OPENAI_STD, "interpolation": "bilinear"}  # the model's counts
        config = {"model_cfg": {"vision_cfg": {"image_size": size}}, "preprocess_cfg": pixels}
        own = preprocess(image, open_clip_preprocessing(None, config))
        other = open_clip.image_transform(tuple(size), False, OPENAI_MEAN, OPENAI_STD, "shortest", "bilinear")
        assert own.equal(other(image)), size
    for key, value in (("mode", "L"), ("interpolation", "lanczos"), ("resize_mode", "square")):
        with pytest.raises(CheckpointError, match=rf"preprocess_cfg\.{key} '{value}' is not supported"):
            open_clip_preprocessing(None, {"preprocess_cfg": {key: value}})


@pytest.mark.parametrize(
    "record",
    [dict.fromkeys(("mode", "resize_mode", "interpolation", "mean", "std", "fill_color")), {"mean": 0.4, "std": 0.3},
     {"interpolation": "random"}, {"mean": 0, "resize_mode": "squash"}],
    ids=str,
)  # fmt: skip
def test_values_of_the_preprocessing_are_open_clips(record):
    from open_clip import transform

    image = Image.effect_mandelbrot((61, 43), (-2, -1, 1, 1), 40).convert("RGB")
    made = transform.PreprocessCfg(**transform.merge_preprocess_dict(transform.PreprocessCfg(size=32), record))
    config = {"model_cfg": {"vision_cfg": {"image_size": 32}}, "preprocess_cfg": record}
    own = preprocess(image, open_clip_preprocessing(None, config))
    assert own.equal(transform.image_transform_v2(made, is_train=False)(image))
    with pytest.raises(CheckpointError, match=r"preprocess_cfg\.std: expected three numbers \(got \[1, 2\]\)"):
        open_clip_preprocessing(None, {"preprocess_cfg": record | {"std": [1, 2]}})


@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_folder_as_open_clip_pushes_it(wrapped, tmp_path):
    made = case("OpenCLIP")
    pixels = {"size": [24, 16], "mode": "RGB", "mean": OPENAI_MEAN, "std": OPENAI_STD, "interpolation": "bicubic",
              "resize_mode": "shortest", "fill_color": 0}  # fmt: skip
    write(tmp_path / "open_clip_config.json", made.config | {"preprocess_cfg": pixels})
    save_file({wrapped + name: t for name, t in made.tensors.items()}, tmp_path / "open_clip_model.safetensors")
    checkpoint = load(tmp_path)
    assert checkpoint.preprocessing == CLIP_PIXELS
    assert checkpoint.tokenizer is None


def test_clips_vocabulary_goes_with_clips_size(tmp_path):
    tokenizer = clip_openai.FAMILY.tokenizer(None, open_clip_architecture("ViT-B-32"))
    assert isinstance(tokenizer, CLIPTokenizer)
    assert tokenizer.context == 77
    larger = {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {"vocab_size": 64000}}
    assert isinstance(clip_openai.FAMILY.tokenizer(None, larger), CLIPTokenizer)  # as in open_clip, if none is named
    assert clip_openai.FAMILY.config_from(larger, {}).eos_id == 49407
    larger["text_cfg"]["hf_tokenizer_name"] = "elsewhere"
    assert clip_openai.FAMILY.config_from(larger, {}).eos_id == 63999
    assert clip_openai.FAMILY.tokenizer(None, open_clip_architecture("ViT-H-14-worldwide")) is None
    assert open_clip_trunk.FAMILIES[0].tokenizer(tmp_path, open_clip_architecture("ViT-B-16-SigLIP")) is None
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer"})
    assert isinstance(clip_hf.tokenizer(tmp_path, {}), CLIPTokenizer)
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
    assert clip_hf.tokenizer(tmp_path, {}) is None


def test_a_folder_as_timm_saves_it(tmp_path):
    import timm
    from timm.models import save_for_hf

    args = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 64}
    model = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", num_classes=5, **args).eval()
    save_for_hf(model, tmp_path, model_args=args, safe_serialization=True)
    checkpoint = load(tmp_path)
    expected = timm.data.resolve_data_config(model=model)
    assert checkpoint.preprocessing == Preprocessing(
        (64, 64), "shortest", expected["interpolation"], expected["mean"], expected["std"], 0, expected["crop_pct"]
    )  # fmt: skip
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert (checkpoint.model(images) - model(images)).abs().max() <= 1e-5


NAMES = ["n1", "n2", "n3"]
DESCRIBED = {"n1": "cat", "n2": "dog", "n3": "cat"}


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("stated", "labels"),
    [
        ({}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"label_names": NAMES}, NAMES),
        ({"label_names": {2: "n3", 0: "n1", 1: "n2"}}, NAMES),
        ({"label_names": {"0": "n1", "2": "n3"}}, ["n1", "LABEL_1", "n3"]),
        ({"label_names": NAMES, "label_descriptions": DESCRIBED}, ["cat (n1)", "dog", "cat (n3)"]),
        ({"label_names": ["a", "b", "a"]}, ["a (0)", "b", "a (2)"]),
    ],
)
def test_a_timm_classifier_has_the_names_that_its_folder_states(stated, labels, tmp_path):
    import timm
    from timm.models import save_for_hf

    args = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 64}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **args)
    save_for_hf(model, tmp_path, model_config=stated, model_args=args, safe_serialization=True)
    assert head_labels(load(tmp_path)) == labels


@pytest.mark.parametrize(
    ("stated", "labels"),
    [
        ({"num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"num_labels": 3, "id2label": None}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, ["a", "b", "c"]),
        ({"id2label": {"1": "a", "2": "b", "3": "c"}}, None),
    ],
)
def test_a_classifier_of_transformers_has_the_names_of_its_configuration(stated, labels, tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32, num_labels=3)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", {k: v for k, v in config.items() if k not in ("id2label", "label2id")} | stated)
    if labels is None:
        with pytest.raises(CheckpointError, match=r"classes of its head \(.*id2label, from 0 to 2\)"):
            head_labels(load(tmp_path))
    else:
        assert head_labels(load(tmp_path)) == labels == list(ViTConfig.from_pretrained(tmp_path).id2label.values())


def test_timms_preprocessing_is_known_by_its_tag_alone():
    actual = vit_timm.preprocessing(None, {"architecture": "vit_base_patch16_224.mae"})
    assert (actual.mean, actual.std, actual.crop) == (IMAGENET_MEAN, IMAGENET_STD, 0.9)
    assert vit_timm.preprocessing(None, {"architecture": "vit_base_patch16_224"}) is None


def test_a_trunk_that_is_no_vit_is_named():
    config = {"model_cfg": {"vision_cfg": {"timm_model_name": "convnext_base"}}}
    with pytest.raises(CheckpointError, match=r"file: unknown format \(convnext_base; 1 tensors such as visual\.trunk"):
        recognize({"visual.trunk.stem.0.weight": torch.zeros(1)}, config, "file")
