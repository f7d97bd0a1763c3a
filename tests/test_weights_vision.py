"""Vision families against the libraries that made the weights: tiny random models, float32, every output."""

import re

import pytest
import torch
from caption_references import CAPTIONERS
from parity import record
from torch import Tensor, nn
from vision_references import CASES, CONTEXT, VOCABULARY, case

from multimodal.errors import CheckpointError
from multimodal.models.captioner import Captions
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa
from multimodal.weights.load import recognise
from multimodal.weights.vision import clip_openai

TOLERANCE = 1e-5
ALL = {**CASES, **CAPTIONERS}
# they hold what another name holds too, or nothing that outputs show: a key bias shifts all scores of a row alike
REPEATED = ("predictions.decoder.bias", "predictions.decoder.weight", "position_ids")
UNSEEN = (*REPEATED, "k_proj.bias", "key.bias")
every_case = pytest.mark.parametrize("name", ALL)


def texts() -> Tensor:
    """Three rows with an end of text (the highest id, and 2 for the cases that pool there) at different places."""
    ids = torch.randint(3, VOCABULARY - 1, (3, CONTEXT), generator=torch.Generator().manual_seed(5))
    ids[0, 3], ids[1, 5], ids[2, 8] = VOCABULARY - 1, VOCABULARY - 1, VOCABULARY - 1
    ids[0, 4], ids[1, 2], ids[2, 7] = 2, 2, 2
    return ids


def pictures(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))


def ours(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    if isinstance(model, CoCa):
        features = model.outputs(images.repeat(2, 1, 1, 1)[: len(ids)], ids)
        made = dict(zip(("image features", "text features", "captions"), features, strict=True))
        return made | {"logits": model(images, ids), "image tokens": model.encode(images)}
    if isinstance(model, Captions):
        return {"image tokens": model.encode(images), "logits": model(images, ids[: len(images)])}
    if isinstance(model, CLIP):
        return {
            "image features": model.encode_image(images), "text features": model.encode_text(ids),
            "logits": model(images, ids), "image tokens": model.image.tokens(images),
            "text tokens": model.text.states(ids),
        }  # fmt: skip
    tokens = model.tokens(images)
    return {"image tokens": tokens, "image features": model.pooled(tokens), "logits": model(images)}


@torch.no_grad()
def differences(name: str, model: nn.Module) -> dict[str, float]:
    made = case(name)
    images, ids = pictures(made.image), texts()
    theirs, mine = made.outputs(made.reference, images, ids), ours(model, images, ids)
    assert all(theirs[output].shape == mine[output].shape for output in theirs)
    return {output: (theirs[output] - mine[output]).abs().max().item() for output in theirs}


def load(name: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    made = case(name)
    return made.family.load(made.tensors if tensors is None else tensors, made.config, "file").model


@every_case
def test_outputs_equal_the_reference(name):
    found = differences(name, load(name))
    for output, difference in found.items():
        record(name, output, difference)
    assert {"logits", "image tokens" if name in CAPTIONERS else "image features"} <= set(found)
    assert max(found.values()) <= TOLERANCE, found


@every_case
def test_a_corrupted_tensor_fails_the_comparison(name):
    made = case(name)
    names = [n for n in made.tensors if not n.endswith(UNSEEN)]
    for corrupted in names[:: len(names) // 4] + names[-1:]:
        tensors = made.tensors
        tensors[corrupted] = tensors[corrupted] + torch.randn(tensors[corrupted].shape) * 0.3
        assert max(differences(name, load(name, tensors)).values()) > TOLERANCE, corrupted


@every_case
def test_missing_extra_and_misshapen_tensors_are_named(name):
    tensors = case(name).tensors
    of_layer = next(key for key in tensors if re.search(r"\.1\.", key) and tensors[key].ndim == 2)
    for missing in (of_layer, [key for key in tensors if not key.endswith(REPEATED)][-1]):
        with pytest.raises(CheckpointError, match=re.escape(f"file: tensor {missing!r} is missing")):
            load(name, {key: value for key, value in tensors.items() if key != missing})
    for extra in ("visual.extra", of_layer.replace(".1.", ".99.")):
        with pytest.raises(CheckpointError, match=re.escape(f"file: tensor {extra!r} is not of this model")):
            load(name, tensors | {extra: torch.zeros(2)})
    with pytest.raises(CheckpointError, match=re.escape(f"file: tensor {of_layer!r} has shape [3, 3], not ")):
        load(name, tensors | {of_layer: torch.zeros(3, 3)})
    with pytest.raises(CheckpointError, match=re.escape(f"file: tensor {of_layer!r} holds values that are not finite")):
        load(name, tensors | {of_layer: tensors[of_layer].fill_(torch.nan)})


@every_case
def test_export_gives_the_same_file_back(name):
    made = case(name)
    exported = made.family.export(load(name))
    assert set(exported) == set(made.tensors)
    assert all(torch.equal(exported[key], value) for key, value in made.tensors.items())
    assert all(exported[key].shape == value.shape for key, value in made.tensors.items())


@every_case
def test_each_file_is_recognised_as_its_family_alone(name):
    made = case(name)
    assert recognise(made.tensors, made.config, "file").name == made.family.name


@pytest.mark.parametrize("name", ["timm ViT, mean pool", "timm ViT, registers", "timm ViT of CLIP"])
@pytest.mark.parametrize("size", [(96, 64), (32, 128)])
def test_another_image_size_interpolates_positions_as_timm_does(name, size):
    made, model = case(name), load(name)
    assert made.reference.dynamic_img_size
    assert size != made.image
    with torch.no_grad():
        theirs, mine = made.outputs(made.reference, pictures(size), texts()), ours(model, pictures(size), texts())
    for output, tensor in theirs.items():
        difference = (tensor - mine[output]).abs().max().item()
        record(f"{name}, another size", output, difference)
        assert difference <= TOLERANCE


def test_openai_archive_needs_no_configuration():
    """OpenAI's own archive: half precision, three numbers beside the weights, heads 64 wide, quick-GELU."""
    from open_clip import model as open_clip

    vision = {"image_size": 32, "layers": 2, "width": 128, "patch_size": 16}
    text = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 64, "heads": 1, "layers": 1}
    reference = open_clip.CLIP(40, vision, text, quick_gelu=True).half()
    extras = {"input_resolution": 32, "context_length": CONTEXT, "vocab_size": VOCABULARY}
    tensors = reference.state_dict() | {key: torch.tensor(value) for key, value in extras.items()}
    model = clip_openai.FAMILY.load(tensors, {}, "file").model
    with torch.no_grad():
        images = pictures((32, 32))
        theirs = reference.float().eval().get_logits(images, texts())[0]
        assert (model(images, texts()) - theirs).abs().max() <= TOLERANCE


def test_bare_openclip_file_asks_for_the_architecture():
    with pytest.raises(CheckpointError, match=r"file: .*architecture="):
        clip_openai.FAMILY.load(case("OpenCLIP").tensors, {}, "file")
