"""Parity with open_clip of CLIPs whose images go through convolutions: tiny random models, float32."""

import pytest
import torch
from torch import Tensor, nn

from multimodal.errors import CheckpointError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from multimodal.weights.load import recognize
from tests.helpers.data.vits.towers import CASES, reference, small, tensors
from tests.helpers.parity import idle, record
from tests.helpers.references.vision import CONTEXT, VOCABULARY, random_images
from tests.helpers.spread import firsts, spread

TOLERANCE = 1e-5
every_case = pytest.mark.parametrize("name", CASES)
some_cases = pytest.mark.parametrize("name", spread(CASES, 2, pytest.mark.slow, pytest.mark.ci))


def load(name: str, held: dict[str, Tensor] | None = None) -> nn.Module:
    config, held = reference(name)[1], tensors(name) if held is None else held
    with small(config):
        return recognize(held, config, "file").load(held, config, "file").model


def images(name: str) -> Tensor:
    return random_images((CASES[name][1], CASES[name][1]))


def texts() -> Tensor:
    ids = torch.randint(3, VOCABULARY - 1, (3, CONTEXT), generator=torch.Generator().manual_seed(5))
    ids[:, -1] = VOCABULARY - 1
    return ids


def last_map(visual: nn.Module, pixels: Tensor) -> Tensor:
    if hasattr(visual, "trunk"):
        return visual.trunk.forward_features(pixels)
    return visual.layer4(visual.layer3(visual.layer2(visual.layer1(visual.stem(pixels)))))


@firsts(pytest.mark.ci)
@every_case
@torch.no_grad()
def test_all_outputs_equal_the_references_and_depend_on_every_tensor(name):
    model, (theirs, _), pixels = load(name), reference(name), images(name)
    vectors = theirs.encode_image(pixels, normalize=True)
    outputs = {
        "image features": (model.encode_image(pixels), vectors),
        "text features": (model.encode_text(texts()), theirs.encode_text(texts(), normalize=True)),
        "logits": (model(pixels, texts()), theirs.get_logits(pixels, texts())[0]),
    }
    maps = last_map(theirs.visual, pixels)
    outputs["image tokens"] = model.image.tokens(pixels), maps.flatten(2).transpose(1, 2) if maps.ndim == 4 else maps
    for output, (ours, expected) in outputs.items():
        difference = float((ours - expected).abs().max())
        record(f"OpenCLIP {name}", output, difference)
        assert difference <= TOLERANCE * max(1.0, float(expected.abs().max())), output
    found = idle(model.image, lambda: model.encode_image(pixels))
    assert [own for own in found if not own.endswith("key.bias")] == []
    held = [tensor for tensor in model.image.buffers() if tensor.is_floating_point()]
    for tensor in held[:: max(1, len(held) // 6)]:
        kept = tensor.clone()
        tensor.mul_(torch.rand(tensor.shape) + 1.5).add_(0.5)
        assert (model.encode_image(pixels) - vectors).abs().max() > TOLERANCE
        tensor.copy_(kept)


@some_cases
@torch.no_grad()
def test_a_file_is_recognized_and_exported_exactly(name, tmp_path):
    held, config = tensors(name), reference(name)[1]
    family = recognize(held, config, "file")
    assert family.name == CASES[name][0]
    save_folder(Checkpoint(load(name)), tmp_path / "ours")
    read = load_folder(tmp_path / "ours").model
    assert read.config == load(name).config
    exported = family.export(read)
    assert exported.keys() == held.keys()
    assert all(exported[key].equal(value) for key, value in held.items())
    held.pop([key for key in held if key.startswith("visual.")][9])
    with pytest.raises(CheckpointError, match="is missing"):
        load(name, held)


@some_cases
@torch.no_grad()
def test_an_image_in_a_batch_and_in_a_prepared_copy_equals_itself_alone(name):
    model, pixels = load(name), images(name)
    alone = torch.cat([model.encode_image(image[None]) for image in pixels])
    prepared = prepare_for_inference(Checkpoint(load(name)), "float32").model
    for one in (model, prepared):
        assert (one.encode_image(pixels) - alone).abs().max() <= TOLERANCE
    sizes = [pixels[0], pixels[1]] if model.image.config.fixed else [pixels[0], pixels[1][:, :32, :], pixels[1]]
    apart = torch.cat([model.encode_image(image[None]) for image in sizes])
    assert (model.encode_image(sizes) - apart).abs().max() <= TOLERANCE
    halves = prepare_for_inference(Checkpoint(load(name)), "bfloat16").model
    assert (halves.encode_image(pixels) - alone).abs().max() <= 0.05


def test_an_archive_of_openai_needs_no_configuration():
    held = tensors("ResNet")
    numbers = {"input_resolution": 64, "context_length": CONTEXT, "vocab_size": VOCABULARY}
    held |= {key: torch.tensor(value) for key, value in numbers.items()}
    config = recognize(held, {}, "file").completed({}, held)
    vision = {"layers": [1, 2, 1, 1], "width": 8, "patch_size": None, "image_size": 64}
    assert config["model_cfg"]["vision_cfg"] == vision
