"""CoCa, BLIP and GIT: what they compute, step by step and at once, beside the libraries that made them."""

import pytest
import torch

from multimodal.decoding.beam_search import beam_search
from multimodal.decoding.sampling import greedy
from multimodal.errors import CheckpointError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.captioner import CaptionModel
from multimodal.models.coca import CoCa
from multimodal.weights.folder import Checkpoint, build, load_folder, save_folder
from multimodal.weights.table import export_tensors
from multimodal.weights.vision import coca
from multimodal.weights.vision.open_clip import open_clip_architecture
from tests.helpers.counting import undrawn
from tests.helpers.references.captions import BOS, CAPTIONERS, EOS
from tests.helpers.references.vision import CONTEXT, VOCABULARY, VisionCase, case, load, random_images
from tests.helpers.spread import spread, thin

every_captioner = pytest.mark.parametrize("name", CAPTIONERS)


def generated(made: VisionCase, images: torch.Tensor, prompt: torch.Tensor, most: int) -> list[list[int]]:
    """The reference's greedy tokens behind the prompt, up to the end token."""
    if made.family.name == "open_clip-coca":
        rows = prompt  # open_clip's own `generate` needs a class that transformers 5 no longer has
        for _ in range(most):
            logits = made.reference(images, rows, output_labels=False)["logits"]
            rows = torch.cat([rows, logits[:, -1].argmax(-1)[:, None]], 1)
    else:
        asked = torch.cat([prompt, prompt[:, :1]], 1) if made.family.name == "blip" else prompt  # whose last it drops
        rows = made.reference.generate(pixel_values=images, input_ids=asked, do_sample=False, num_beams=1,
                                       max_new_tokens=most)  # fmt: skip
    rows = rows[:, prompt.shape[1] :].tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


@every_captioner
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("prompt", [[BOS], [BOS, 7, 12]])
@torch.inference_mode()
def test_greedy_captions_equal_the_reference(name, prompt):
    made, model = case(name), load(name)
    images = torch.cat([random_images(made.image), -random_images(made.image)])
    ids = torch.tensor([prompt] * len(images))
    step, cache = model.decoding(model.encode(images))
    found = greedy(step, ids, cache, eos=EOS, max_new=CONTEXT - len(prompt))
    assert isinstance(model, CaptionModel)
    assert model.caption_context == CONTEXT
    assert found.ids == generated(made, images, ids, CONTEXT - len(prompt))
    assert len(prompt) > 1 or len({tuple(row) for row in found.ids}) > 1  # the image decides


@thin(3, pytest.mark.ci)
@every_captioner
@torch.inference_mode()
def test_cached_steps_equal_one_pass(name):
    """Token by token and by two, three rows an image, also behind a padding, and with rows left out on the way."""
    made, model = case(name), load(name)
    images = random_images(made.image)
    ids = torch.randint(3, VOCABULARY, (6, CONTEXT), generator=torch.Generator().manual_seed(2))
    ids[1, 2] = ids[4, 0] = 0
    rows = images.repeat_interleave(3, 0)
    whole = model.outputs(rows, ids)[2] if hasattr(model, "outputs") else model(rows, ids)
    step, cache = model.decoding(model.encode(images))
    for first, last in ((0, 1), (1, 3), (3, 4), (4, 5)):
        assert (step(ids[:, first:last], cache)[:, -1] - whole[:, last - 1]).abs().max() < 1e-5
    kept = torch.tensor([4, 3])
    cache.reorder_rows(kept)
    cache.reorder_sources(torch.tensor([1]))
    for at in range(5, CONTEXT):
        assert (step(ids[kept, at : at + 1], cache)[:, -1] - whole[kept, at]).abs().max() < 1e-5
    with pytest.raises(ValueError, match=f"longer than the context {CONTEXT}"):
        step(ids[kept, :1], cache)


@thin(3, pytest.mark.ci)
@every_captioner
@torch.inference_mode()
def test_a_beam_of_one_batch_equals_each_image_alone(name):
    made, model = case(name), load(name)
    images = random_images(made.image)

    def best(images: torch.Tensor) -> list[list[int]]:
        step, cache = model.decoding(model.encode(images))
        return beam_search(step, torch.full((len(images), 1), BOS), cache, eos=EOS, max_new=6, beams=3).ids

    assert best(images) == best(images[:1]) + best(images[1:])


@thin(3, pytest.mark.ci)
@every_captioner
def test_saved_in_our_folder_it_is_the_same_to_the_bit(name, tmp_path):
    made, model = case(name), load(name)
    save_folder(Checkpoint(model), tmp_path / "ours")
    read = load_folder(tmp_path / "ours")
    assert read.model.config == model.config
    exported = made.family.export(read.model)
    assert all(torch.equal(exported[key], value) for key, value in made.tensors.items())


@pytest.mark.parametrize("name", spread(CAPTIONERS, 3, pytest.mark.slow, pytest.mark.ci))
@torch.inference_mode()
def test_made_for_inference_it_writes_the_same(name):
    made, model = case(name), load(name)
    images = random_images(made.image)
    for compute_type, most in (("float32", 1e-5), ("bfloat16", 0.5)):
        fast = prepare_for_inference(Checkpoint(model), compute_type).model
        found = []
        for one in (model, fast):
            step, cache = one.decoding(one.encode(images))
            found.append(torch.cat([step(ids, cache) for ids in torch.tensor([[[BOS], [BOS]], [[5], [7]]])], 1))
        assert (found[0] - found[1]).abs().max() < most
        if isinstance(model, CoCa):
            ids = torch.tensor([[BOS, 5, EOS], [BOS, 7, EOS]])
            assert (fast.encode_text(ids) - model.encode_text(ids)).abs().max() < most / 10


@torch.inference_mode()
def test_coca_texts_with_padding_equal_open_clip_and_need_none_of_it():
    """0 is the padding and also "!": open_clip masks what follows it, wherever it stands."""
    made, model = case("OpenCLIP CoCa"), load("OpenCLIP CoCa")
    ids = torch.randint(3, EOS, (4, CONTEXT), generator=torch.Generator().manual_seed(1))
    for row, end in enumerate((3, 5, 6, CONTEXT - 1)):
        ids[row, end], ids[row, end + 1 :] = EOS, 0
    ids[2, 1] = ids[3, 4] = 0
    theirs = made.reference.encode_text(ids)
    assert (model.encode_text(ids) - theirs).abs().max() < 1e-6
    assert (model.encode_text(ids[:3, :7]) - theirs[:3]).abs().max() < 1e-6
    assert (model.encode_text(ids[:1, :4]) - theirs[:1]).abs().max() < 1e-6
    for row in (0, 2):  # padding counts, unlike in CLIP's causal mask
        assert (model.encode_text(ids[row : row + 1].masked_fill(ids[row] == 0, 9)) - theirs[row]).abs().max() > 1e-3
    with pytest.raises(ValueError, match=f"longer than the context {CONTEXT}"):
        model.encode_text(torch.cat([ids, ids], 1))


@torch.inference_mode()
def test_coca_takes_images_each_of_its_own_size():
    model = load("OpenCLIP CoCa")
    images = [
        torch.randn(3, *size, generator=torch.Generator().manual_seed(6)) for size in ((24, 16), (16, 40), (8, 8))
    ]
    together = model.encode_image(images)
    for image, vector in zip(images, together, strict=True):
        assert (model.encode_image(image[None])[0] - vector).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["Hugging Face BLIP", "Hugging Face GIT"])
@torch.inference_mode()
def test_a_padded_text_has_the_logits_that_it_has_alone(name):
    made, model = case(name), load(name)
    images, ids = random_images(made.image), torch.randint(3, EOS, (2, CONTEXT))
    valid = torch.arange(CONTEXT) < torch.tensor([[4], [CONTEXT]])
    together = model(images, ids, valid)
    assert (together[0, :4] - model(images[:1], ids[:1, :4])[0]).abs().max() < 1e-5
    assert (together[1] - model(images[1:], ids[1:])[0]).abs().max() < 1e-5


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("architecture", ["coca_ViT-B-32", "coca_ViT-L-14", "coca_base"])
def test_open_clips_own_architectures_have_these_names_and_shapes(architecture):
    from open_clip.coca_model import CoCa as Reference

    record = open_clip_architecture(architecture)
    config = coca.config_from(record, {})
    made = export_tensors(coca.rows(config), build(CoCa, config).state_dict())
    with undrawn():
        reference = Reference(**{key: value for key, value in record.items() if key != "custom_text"})
    assert {key: value.shape for key, value in reference.state_dict().items()} == {k: v.shape for k, v in made.items()}


def test_a_text_tower_of_hugging_face_is_refused_by_its_name():
    with pytest.raises(CheckpointError, match="hf_model_name 'roberta-base' in a CoCa"):
        coca.config_from(open_clip_architecture("coca_roberta-ViT-B-32"), {})
