"""Folders of any-to-text models as transformers writes them: weights, tokenizer, image processor, chat template."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal import load
from multimodal.errors import CheckpointError
from multimodal.tokens.image.preprocessing import Tiling
from multimodal.tokens.image.tiles import tiled
from multimodal.weights.any.chat import PROCESSOR, chat_template
from multimodal.weights.family import feature_record
from multimodal.weights.folder import load_folder, save_folder
from multimodal.weights.speech.parakeet import check_features
from multimodal.weights.speech.whisper import PREPROCESSOR
from multimodal.weights.vision.image_processor import image_record
from tests.helpers.references.any_to_text import PINPOINTS, case
from tests.helpers.spread import thin

HALF = [0.5, 0.5, 0.5]
EDGE = {"height": 28, "width": 28}


def processor(name: str):
    """The reference's image processor."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    if name == "LLaVA":
        return LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size=EDGE, do_pad=True)
    if name == "LLaVA-OneVision":
        return LlavaOnevisionImageProcessorPil(
            size=EDGE, image_grid_pinpoints=PINPOINTS, image_mean=HALF, image_std=HALF
        )
    return Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, image_mean=HALF, image_std=HALF
    )


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("name", ["LLaVA", "LLaVA-OneVision", "SmolVLM", "Qwen2-Audio", "Voxtral"])
@torch.no_grad()
def test_a_folder_that_transformers_writes_gives_the_references_rows_of_an_image(tmp_path, name):
    reference, image = case(name).reference, Image.fromarray(np.arange(70 * 31 * 3, dtype=np.uint8).reshape(31, 70, 3))
    reference.save_pretrained(tmp_path / "hub")
    theirs = processor(name) if name in ("LLaVA", "LLaVA-OneVision", "SmolVLM") else None
    if theirs is not None:
        theirs.save_pretrained(tmp_path / "hub")
    save_folder(load(tmp_path / "hub"), tmp_path / "ours")
    checkpoint = load_folder(tmp_path / "ours")
    assert checkpoint.model.config == case(name).family.load(case(name).tensors, case(name).config, "file").model.config
    if theirs is None:
        assert checkpoint.preprocessing is None
        return
    record, model = checkpoint.preprocessing, checkpoint.model
    made = tiled(image, record)
    given = theirs(image, return_tensors="pt")
    expected = reference.model.get_image_features(**{k: v for k, v in given.items() if k != "batch_num_images"})
    most = record.tiling.most if record.tiling else 9
    rows = model.assemble(model.encode_images(made.pixels), made.grid, made.size, most)
    assert (rows - expected.pooler_output[0]).abs().max() <= 1e-5


def test_steps_that_are_not_ours_are_refused(tmp_path):
    case("SmolVLM").reference.save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, "image_mean": HALF}
    known = sizes | {"image_std": HALF, "resample": 1, "do_image_splitting": True}
    path.write_text(json.dumps(known))
    assert load(tmp_path).preprocessing.tiling == Tiling("split", longest=56)
    for change, named in (
        ({"size": {"height": 28, "width": 28}}, "size .* is not supported .expected a longest edge"),
        ({"resample": 0}, "resample 0 is not supported"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor 0.0078"),
        ({"image_processor_type": "Idefics2ImageProcessor"}, "image processor 'Idefics2' is not supported"),
    ):
        path.write_text(json.dumps(known | change))
        with pytest.raises(CheckpointError, match=rf"preprocessor_config.json: {named}"):
            load(tmp_path)


@pytest.mark.parametrize("name", ["Qwen2-Audio", "Voxtral"])
def test_other_spectrograms_than_whispers_are_refused(name, tmp_path):
    case(name).reference.save_pretrained(tmp_path)
    record = {"feature_extractor": {"feature_size": case(name).config["audio_config"]["num_mel_bins"]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(record))
    load(tmp_path)
    for key, value in (("hop_length", 200), ("n_fft", 512)):
        record["feature_extractor"] |= {key: value}
        (tmp_path / "processor_config.json").write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match=rf"{key} must be \d+ \(got {value}\)"):
            load(tmp_path)
        record["feature_extractor"].pop(key)


def test_the_processors_record_goes_before_older_files(tmp_path):
    """As in transformers 5."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, CLIPImageProcessor, WhisperFeatureExtractor

    for name, made, reader, key in (
        ("image_processor", CLIPImageProcessor(image_mean=HALF), AutoImageProcessor, "image_mean"),
        ("feature_extractor", WhisperFeatureExtractor(hop_length=200), AutoFeatureExtractor, "hop_length"),
    ):
        folder = tmp_path / name
        made.save_pretrained(folder)
        older = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "processor_config.json").write_text(json.dumps({name: older}))
        (folder / "preprocessor_config.json").write_text(json.dumps(older | {key: [0.25] * 3}))
        found = image_record(folder)[1] if name == "image_processor" else feature_record(folder, PREPROCESSOR)
        assert found[key] == older[key]
        assert getattr(reader.from_pretrained(folder), key) == (tuple(HALF) if key == "image_mean" else 200)
    with pytest.raises(CheckpointError, match=r"feature extractor: hop_length must be 160 \(got 200\)"):
        check_features(folder, {"encoder_config": {"num_mel_bins": 80}})


@pytest.mark.parametrize(
    ("name", "changed", "named"),
    [
        ("LLaVA", {"vision_feature_layer": [1, 2]}, r"vision_feature_layer \[1, 2\] is not supported"),
        ("LLaVA", {"image_token_index": 99}, "placeholder 99 is outside the vocabulary"),
        ("LLaVA", {"image_token_id": 98}, "placeholder 98 is outside the vocabulary"),
        ("Qwen2-Audio", {"audio_token_id": 98}, "placeholder 98 is outside the vocabulary"),
        ("LLaVA", {"vision_config": {"model_type": "pixtral"}}, "vision_config of kind 'pixtral'"),
        ("LLaVA", {"text_config": {"model_type": "gemma"}}, "text_config of kind 'gemma'"),
        ("LLaVA-OneVision", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy 'default'"),
        ("LLaVA-OneVision", {"vision_config": {"model_type": "clip_vision_model"}}, "select_strategy 'full'"),
        ("Voxtral", {"projector_hidden_act": "mish"}, "projector_hidden_act 'mish'"),
    ],
)
def test_what_the_model_cannot_express_is_refused_by_name(name, changed, named):
    made = case(name)
    with pytest.raises(CheckpointError, match=named):
        made.family.load(made.tensors, made.config | changed, "file")


def test_a_text_config_without_an_epsilon_has_that_of_a_llama():
    from transformers import Idefics3Config

    made = case("Idefics3")
    text = {key: value for key, value in made.config["text_config"].items() if key != "rms_norm_eps"}
    expected = Idefics3Config(text_config=text).text_config.rms_norm_eps
    config = made.family.load(made.tensors, made.config | {"text_config": text}, "file").model.config
    assert config.decoder.stack.block.norm_eps == expected == 1e-6


def test_the_chat_template_of_a_folder(tmp_path):
    """Processors of media read other files first than tokenizers."""
    from transformers import LlavaProcessor

    assert chat_template(tmp_path) is chat_template(None) is None
    record = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record))
    assert chat_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert chat_template(tmp_path) == chat_template(tmp_path, PROCESSOR) == "{{ messages }}"
    for name in ("chat_template.json", "processor_config.json"):
        (tmp_path / name).write_text(json.dumps({"chat_template": name}))
        assert LlavaProcessor.get_processor_dict(tmp_path)[0]["chat_template"] == name
        assert chat_template(tmp_path, PROCESSOR) == name
        assert chat_template(tmp_path) == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read as text"):
        chat_template(tmp_path)
