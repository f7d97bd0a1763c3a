"""Parity of the vision families with the original libraries: tiny random models, float32, all outputs."""

import functools

import pytest
import torch
from torch import Tensor, nn

from multimodal.errors import CheckpointError
from multimodal.models.captioner import CaptionModel
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa
from multimodal.weights.vision import clip_openai
from tests.helpers.parity import record
from tests.helpers.references.captions import CAPTIONERS
from tests.helpers.references.vision import CASES, CONTEXT, VOCABULARY, case, load, random_images
from tests.helpers.spread import firsts, spread, thin

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


def ours(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    if isinstance(model, CoCa):
        features = model.outputs(images.repeat(2, 1, 1, 1)[: len(ids)], ids)
        made = dict(zip(("image features", "text features", "captions"), features, strict=True))
        return made | {"logits": model(images, ids), "image tokens": model.encode(images)}
    if isinstance(model, CaptionModel):
        return {"image tokens": model.encode(images), "logits": model(images, ids[: len(images)])}
    if isinstance(model, CLIP):
        return {
            "image features": model.encode_image(images), "text features": model.encode_text(ids),
            "logits": model(images, ids), "image tokens": model.image.tokens(images),
            "text tokens": model.text.states(ids),
        }  # fmt: skip
    tokens = model.tokens(images)
    return {"image tokens": tokens, "image features": model.pooled(tokens), "logits": model(images)}


@functools.cache
@torch.no_grad()
def reference_outputs(name: str) -> dict[str, Tensor]:
    made = case(name)
    return made.outputs(made.reference, random_images(made.image), texts())


@torch.no_grad()
def differences(name: str, model: nn.Module) -> dict[str, float]:
    theirs, mine = reference_outputs(name), ours(model, random_images(case(name).image), texts())
    assert all(theirs[output].shape == mine[output].shape for output in theirs)
    return {output: (theirs[output] - mine[output]).abs().max().item() for output in theirs}


@firsts(pytest.mark.ci)
@every_case
def test_outputs_equal_the_reference(name):
    actual = differences(name, load(name))
    for output, difference in actual.items():
        record(name, output, difference)
    assert {"logits", "image tokens" if name in CAPTIONERS else "image features"} <= set(actual)
    assert max(actual.values()) <= TOLERANCE, actual


@pytest.mark.parametrize("name", spread(ALL, 3, pytest.mark.slow, pytest.mark.ci))
def test_a_corrupted_tensor_fails_the_comparison(name):
    made = case(name)
    names = [n for n in made.tensors if not n.endswith(UNSEEN)]
    for corrupted in names[:: len(names) // 2] + names[-1:]:
        tensors = made.tensors
        tensors[corrupted] = tensors[corrupted] + torch.randn(tensors[corrupted].shape) * 0.3
        assert max(differences(name, load(name, tensors)).values()) > TOLERANCE, corrupted


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("name", ["timm ViT, mean pool", "timm ViT, registers", "timm ViT of CLIP"])
@pytest.mark.parametrize("size", [(96, 64), (32, 128)])
def test_another_image_size_interpolates_positions_as_timm_does(name, size):
    made, model = case(name), load(name)
    assert made.reference.dynamic_img_size
    assert size != made.image
    with torch.no_grad():
        theirs = made.outputs(made.reference, random_images(size), texts())
        mine = ours(model, random_images(size), texts())
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
        images = random_images((32, 32))
        theirs = reference.float().eval().get_logits(images, texts())[0]
        assert (model(images, texts()) - theirs).abs().max() <= TOLERANCE


def test_bare_openclip_file_asks_for_the_architecture():
    with pytest.raises(CheckpointError, match=r"file: .*architecture="):
        clip_openai.FAMILY.load(case("OpenCLIP").tensors, {}, "file")
