"""SigLIP 2 for images of their own aspect (NaFlex), beside transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from multimodal import Classifier
from multimodal.errors import UsageError
from multimodal.tasks.encode.native import encode_native, native_features, native_record
from multimodal.tasks.text.embedder import Embedder
from multimodal.tokens.image.preprocessing import native_size, preprocess
from multimodal.weights.load import load
from tests.helpers.commands import run
from tests.helpers.data.gemma_text import gemma_tokenizer
from tests.helpers.references.vision import HF_TEXT, HF_VISION, randomized

PATCHES = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import Siglip2Config, Siglip2ImageProcessorPil, Siglip2Model

    folder = tmp_path_factory.mktemp("naflex")
    size = 1 + max(gemma_tokenizer(folder).get_vocab().values())
    text = HF_TEXT | {"vocab_size": size, "projection_size": 32, "max_position_embeddings": 12}
    vision = {key: value for key, value in HF_VISION.items() if key != "image_size"} | {"num_patches": PATCHES}
    randomized(Siglip2Model(Siglip2Config(text_config=text, vision_config=vision))).save_pretrained(folder)
    Siglip2ImageProcessorPil(patch_size=8, max_num_patches=PATCHES).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_images_at_their_aspect_and_texts_equal_transformers(folder):
    from transformers import Siglip2ImageProcessorPil, Siglip2Model

    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in
              ((40, 40), (61, 33), (20, 93), (32, 48))]  # fmt: skip
    made = Siglip2ImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")
    reference, checkpoint = Siglip2Model.from_pretrained(folder).eval(), load(folder)
    record, patch = checkpoint.preprocessing, checkpoint.model.config.image.patch
    pixels = [preprocess(image, native_record(image, record, patch, PATCHES, "image")) for image in images]
    assert [(p.shape[1] // 8, p.shape[2] // 8) for p in pixels] == [tuple(s) for s in made["spatial_shapes"].tolist()]
    ids = checkpoint.required_tokenizer().batch(["a dog", "two cats on the mat"]).ids
    expected = reference(input_ids=ids, **made)
    found = encode_native(checkpoint.model, pixels)
    assert_close(found, expected.image_embeds, atol=1e-5, rtol=0)
    texts = checkpoint.model.encode_text(ids)
    assert_close(texts, expected.text_embeds, atol=1e-5, rtol=0)
    assert_close(checkpoint.model.logits(found, texts), expected.logits_per_image, atol=2e-5, rtol=0)
    assert preprocess(images[0], record).equal(pixels[0])  # a square is the same without it


@pytest.mark.ci
def test_the_native_size_is_that_of_the_image_processor(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    path = other / "preprocessor_config.json"
    path.write_text(path.read_text().replace(f'"max_num_patches": {PATCHES}', '"max_num_patches": 9'))
    image = Image.effect_mandelbrot((61, 33), (-2, -1, 1, 1), 40).convert("RGB")
    vectors = [Embedder(other, native=limit).images([image])[0] for limit in (0, 9, PATCHES)]
    assert np.array_equal(vectors[0], vectors[1])
    assert not np.allclose(vectors[0], vectors[2], atol=1e-3)
    for wrong in (True, False):
        with pytest.raises(UsageError, match=f"^native must be an integer of at least 0 \\(got {wrong}\\); 0 is "):
            Embedder(other, native=wrong)


@pytest.mark.ci
def test_commands_embed_and_classify_images_at_their_aspect(folder, tmp_path, capsys):
    noise, files = np.random.default_rng(1), []
    for number, (height, width) in enumerate(((40, 40), (61, 33), (20, 93))):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(files[-1])
    checkpoint = load(folder)
    expected = native_features(checkpoint.model, files, checkpoint.preprocessing).numpy()
    made = {}
    for flags in ((), ("--native",), ("--native", "8")):
        code, _, err = run(capsys, "embed", "--images", *files, "-m", folder, *flags, "-o", tmp_path / "made.npy")
        assert (code, err) == (0, "")
        made[flags] = np.load(tmp_path / "made.npy")
    assert np.abs(made["--native",] - expected).max() <= 1e-5
    assert np.abs(made[()][1:] - expected[1:]).max() > 1e-3  # squares
    assert np.abs(made["--native", "8"] - expected).max() > 1e-3
    code, out, err = run(capsys, "classify", *files, "--labels", "a dog", "a cat", "-m", folder, "--native", "--format",
                         "jsonl", "--templates", "none")  # fmt: skip
    assert (code, err) == (0, "")
    own = Classifier(folder, ["a dog ", "a cat"], templates="none", native=0)([str(file) for file in files])
    told = [{one["label"]: one["score"] for one in json.loads(line)["scores"]} for line in out.splitlines()]
    for result, scores in zip(own, told, strict=True):
        assert {one["label"]: one["score"] for one in result["scores"]} == pytest.approx(scores, rel=1e-5)
    code, _, err = run(capsys, "embed", "a text", "-m", folder, "--native")
    assert "--native: is for --images" in err
    code, _, err = run(capsys, "embed", "--images", *files, "-m", folder, "--prompt", "query")
    assert (code, "--prompt: is for texts" in err) == (2, True)


@pytest.mark.ci
def test_an_index_at_the_images_aspect_answers_image_queries_alike(folder, tmp_path, capsys):
    noise, files = np.random.default_rng(2), []
    for number, (height, width) in enumerate(((40, 40), (61, 33), (20, 93), (32, 90))):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(files[-1])
    index = ("index", *files, "-m", folder, "-o", tmp_path / "made.index", "--dtype", "float32", "--native")
    for _ in range(2):  # the second finds nothing new
        code, out, err = run(capsys, *index)
        assert (code, err) == (0, "")
    assert "(0 new" in out
    code, out, _ = run(capsys, "search", *files, "two cats", "--index", tmp_path / "made.index", "--top", "1",
                       "--format", "jsonl")  # fmt: skip
    found = [json.loads(line) for line in out.splitlines()]
    assert [Path(one["results"][0]["file"]).name for one in found[:4]] == [file.name for file in files]
    assert min(one["results"][0]["score"] for one in found[:4]) > 0.99999
    code, _, err = run(capsys, *index[:-1])
    assert code == 1
    assert "native 0, not None" in err


def test_sizes_equal_transformers():
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    missed = [(3854, 3613), (2105, 2556)]  # where the bisection stops short of a larger grid
    for height, width in [*missed, *((h, w) for h in (17, 64, 333, 480, 1080) for w in (16, 50, 224, 640, 1999))]:
        image = Image.new("RGB", (width, height))
        theirs = get_image_size_for_max_num_patches(height, width, 16, 256)
        assert native_size(image, 16, 256) == theirs, (height, width)


def test_a_file_is_exported_exactly(folder):
    from multimodal.weights.files.tensor_files import read_tensors
    from multimodal.weights.load import families

    held = read_tensors(folder / "model.safetensors")
    exported = families()["siglip2-hf"].export(load(folder).model)
    assert exported.keys() == held.keys()
    assert all(exported[name].equal(tensor) for name, tensor in held.items())
