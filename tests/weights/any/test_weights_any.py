"""Parity of any-to-text models with transformers: tiny random weights, float32, every stage, greedy and sampled."""

import copy
import functools
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from multimodal.models.any_to_text import AnyToText
from multimodal.tokens.image.preprocessing import Preprocessing, Tiling
from multimodal.tokens.image.tiles import tiled
from multimodal.weights.folder import build
from multimodal.weights.load import families
from multimodal.weights.load import load as load_path
from tests.helpers.counting import undrawn
from tests.helpers.parity import record
from tests.helpers.references.any_to_text import (
    BANDS,
    CASES,
    FRAMES,
    IMAGE,
    PINPOINTS,
    VIDEO,
    case,
    file_names,
    idefics_case,
)
from tests.helpers.spread import firsts, spread, thin

TOLERANCE = 1e-5
HALF = (0.5, 0.5, 0.5)
PLAIN = Preprocessing((28, 28), "squash", "bicubic", HALF, HALF, 0, 1.0)
every_case = pytest.mark.parametrize("name", CASES)
ONE_VISION = [name for name in CASES if "OneVision" in name]


def load(name: str, tensors: dict[str, Tensor] | None = None) -> AnyToText:
    made = case(name)
    return made.family.load(made.tensors if tensors is None else tensors, made.config, "file").model


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def inputs(name: str, model: AnyToText) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Ids of one text with media, our rows of the media, and what transformers takes in their place."""
    if name in ("Qwen2-Audio", "Voxtral"):
        features = noise(3, BANDS, FRAMES)
        lengths = torch.tensor([27, 2, FRAMES] if name == "Qwen2-Audio" else [FRAMES] * 3)  # 2 frames have no row
        rows = torch.cat(model.encode_audio(features, lengths))
        theirs = {"input_features": features}
        if name == "Qwen2-Audio":
            theirs["feature_attention_mask"] = (torch.arange(FRAMES) < lengths[:, None]).long()
    elif name in ONE_VISION:
        most = 1 if name == "LLaVA-OneVision" else 9
        sizes = tuple((height, width) for height, width in PINPOINTS)
        made = tiled(picture(70, 31), PLAIN.replace(tiling=Tiling("fit", sizes, most)))
        rows = model.assemble(model.encode_images(made.pixels), made.grid, made.size, most)
        theirs = {"pixel_values": made.pixels[None], "image_sizes": torch.tensor([made.size])}
    elif name in ("Idefics3", "SmolVLM"):
        made = tiled(picture(70, 31), PLAIN.replace(tiling=Tiling("split", longest=56)))
        assert made.grid == (1, 2)
        rows = model.assemble(model.encode_images(made.pixels), made.grid, made.size)
        theirs = {"pixel_values": made.pixels[None]}
    else:
        pixels = noise(2, 3, 28, 28)
        rows, theirs = model.encode_images(pixels).flatten(0, 1), {"pixel_values": pixels}
    ids = torch.tensor([[5, 6, *[IMAGE] * len(rows), 7, 8, 9]])
    return ids, rows, theirs


@functools.cache
@torch.no_grad()
def expected(name: str) -> dict[str, Tensor]:
    ids, _, theirs = inputs(name, load(name))
    reference, merged = case(name).reference, []
    language = getattr(reference.model, "language_model", None) or reference.model.text_model
    hook = language.register_forward_pre_hook(lambda _, args, given: merged.append(given), with_kwargs=True)
    mask = torch.ones_like(ids)
    logits = reference(input_ids=ids, attention_mask=mask, **theirs).logits
    hook.remove()
    embedded = merged[0]["inputs_embeds"]
    return {"media rows": embedded[:, 2:-3], "embeddings": embedded, "logits": logits}


@torch.no_grad()
def differences(name: str, model: AnyToText) -> dict[str, float]:
    ids, rows, _ = inputs(name, model)
    actual = {"media rows": rows[None], "embeddings": model.embed(ids, [rows]), "logits": model(ids, [rows])}
    return {stage: (actual[stage] - theirs).abs().max().item() for stage, theirs in expected(name).items()}


@firsts(pytest.mark.ci)
@every_case
def test_stages_equal_the_reference(name):
    actual = differences(name, load(name))
    for stage, difference in actual.items():
        record(name, stage, difference)
    assert max(actual.values()) <= TOLERANCE, actual


LOOKED_INTO = ["SmolVLM", "LLaVA", "LLaVA-OneVision", "Qwen2-Audio", "Voxtral"]


@pytest.mark.parametrize("name", spread(LOOKED_INTO, 3, pytest.mark.slow, pytest.mark.ci))
def test_a_corrupted_tensor_fails_the_comparison(name):
    idle = re.compile(  # a key's bias adds the same to all scores of a query; LLaVA takes a state before these
        r".*vision.*k_proj\.bias|vision_tower\..*(post_layernorm|layers\.2)\..*"
    )
    for corrupted in list(case(name).held)[::3]:
        if ".0." in corrupted or idle.fullmatch(corrupted):
            continue  # another layer stands for all
        tensors = case(name).tensors
        tensors[corrupted] = tensors[corrupted] + noise(*tensors[corrupted].shape) * 0.3
        assert max(differences(name, load(name, tensors)).values()) > TOLERANCE, corrupted


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("sampled", [False, True])
@every_case
@torch.no_grad()
def test_generated_tokens_equal_the_references(name, sampled):
    """Greedy: the same tokens. Sampled: the same logits along the reference's tokens."""
    model = load(name)
    ids, rows, theirs = inputs(name, model)
    torch.manual_seed(0)
    made = case(name).reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=sampled, max_new_tokens=8, output_logits=True,
        return_dict_in_generate=True, **theirs,
    )  # fmt: skip
    expected = made.sequences[0, ids.shape[1] :].tolist()
    cache, logits = model.decoder.new_cache(), []
    logits.append(model.decoder(ids, cache=cache, last=1, embedded=model.embed(ids, [rows]))[0, -1])
    for token in expected[:-1]:
        logits.append(model.decoder(torch.tensor([[token]]), cache=cache)[0, -1])
    difference = (torch.stack(logits) - torch.cat(made.logits)).abs().max().item()
    record(name, "cached logits", difference)
    assert difference <= TOLERANCE
    if not sampled:
        assert torch.stack(logits).argmax(1).tolist() == expected


@pytest.mark.parametrize("name", ONE_VISION)
@torch.no_grad()
def test_one_vision_sees_several_images_and_videos(name):
    model, reference = load(name), case(name).reference
    pixels = noise(2, 1, 3, 28, 28)
    sizes = {"image_sizes": torch.tensor([[28, 28], [28, 28]]), "batch_num_images": torch.tensor([2])}
    expected = reference.model.get_image_features(pixels, **sizes).pooler_output
    for image, rows in zip(pixels, expected, strict=True):
        actual = model.assemble(model.encode_images(image), (0, 0), (28, 28))
        assert (actual - rows).abs().max() <= TOLERANCE
    frames = noise(1, 3, 3, 28, 28)
    rows = model.assemble_frames(model.encode_images(frames[0]))
    assert (rows - reference.model.get_video_features(frames).pooler_output[0]).abs().max() <= TOLERANCE
    ids = torch.tensor([[5, *[VIDEO] * len(rows), 6]])
    expected = reference(input_ids=ids, pixel_values_videos=frames).logits
    assert (model(ids, [rows]) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("side", [14, 28, 56])
@torch.no_grad()
def test_idefics_sees_tiles_of_other_sizes(side):
    pixels = noise(2, 3, side, side)
    expected = case("Idefics3").reference.model.get_image_features(pixels[None]).pooler_output
    rows = load("Idefics3").encode_images(pixels)
    assert (rows.flatten(0, 1) - torch.cat([*expected]).flatten(0, -2)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("top", "text"), [(False, True), (True, False), (False, False)])
def test_idefics_ties_what_transformers_ties(top, text, tmp_path):
    model = idefics_case("Idefics3", tie_word_embeddings=top).reference
    model.config.text_config.tie_word_embeddings = text
    model.save_pretrained(tmp_path)
    loaded, ids = load_path(tmp_path).model, torch.tensor([[5, 6, 7]])
    assert loaded.config.decoder.tied == top
    assert (loaded.decoder(ids) - model(input_ids=ids).logits).abs().max() <= TOLERANCE


# config.json of the releases, less what has no part in shapes
RELEASED = {
    "Llava": ("llava-5", {
        "model_type": "llava", "image_token_index": 32000, "text_config": {
            "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
        "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "patch_size": 14,
                          "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24},
    }),
    "LlavaOnevision": ("llava-onevision-5", {
        "model_type": "llava_onevision", "tie_word_embeddings": False, "text_config": {
            "hidden_size": 896, "intermediate_size": 4864, "model_type": "qwen2", "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0, "tie_word_embeddings": True,
            "vocab_size": 152000},
        "vision_config": {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "patch_size": 14,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 26,
                          "vision_use_head": False},
    }),
    "SmolVLM": ("idefics3", {
        "model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 4, "text_config": {
            "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
            "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5, "rope_theta": 100000, "vocab_size": 49280},
        "vision_config": {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16},
    }),
    "Qwen2Audio": ("qwen2-audio", {
        "model_type": "qwen2_audio", "audio_token_index": 151646, "audio_config": {"model_type": "qwen2_audio_encoder"},
        "text_config": {"intermediate_size": 11008, "model_type": "qwen2", "rms_norm_eps": 1e-5, "vocab_size": 156032},
    }),
    "Voxtral": ("voxtral", {
        "model_type": "voxtral", "audio_token_id": 24, "audio_config": {"model_type": "voxtral_encoder"},
        "text_config": {"model_type": "llama"},
    }),
}  # fmt: skip


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_have_the_references_names_and_shapes(name):
    import transformers

    kind, config = RELEASED[name]
    with undrawn():
        made = getattr(transformers, f"{name}Config").from_dict(copy.deepcopy(config))
        tensors = getattr(transformers, f"{name}ForConditionalGeneration")(made).state_dict()
    family = families()[kind]
    tensors = tensors if name == "SmolVLM" else file_names(tensors)
    model = build(AnyToText, family.config_from(family.completed(config, tensors), {}))
    exported = family.export(model)
    assert {key: value.shape for key, value in exported.items()} == {key: t.shape for key, t in tensors.items()}
