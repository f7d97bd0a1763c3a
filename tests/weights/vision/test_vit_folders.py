"""Folders of vision transformers as transformers saves them: pixels, and the commands."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.errors import CheckpointError
from multimodal.tokens.image.preprocessing import preprocess
from multimodal.weights.load import load
from tests.helpers.commands import evaluated, run
from tests.helpers.data.sets import squares
from tests.helpers.data.vits.cases import case
from tests.helpers.spread import thin

SQUARE, EDGE = {"height": 32, "width": 32}, {"shortest_edge": 40}
# case, image processor, its options, largest difference
PROCESSORS = [
    ("ViT", "ViTImageProcessorPil", {"size": SQUARE}, 1e-6),
    ("DeiT", "DeiTImageProcessorPil", {"size": {"height": 37, "width": 37}, "crop_size": SQUARE}, 1e-6),
    ("DINOv2", "BitImageProcessorPil", {"size": EDGE, "crop_size": SQUARE}, 1e-6),
    ("BEiT", "BeitImageProcessorPil", {"size": SQUARE}, 1e-6),
    # resizes float pixels, where Pillow rounds to whole numbers of 255
    ("DINOv3", "DINOv3ViTImageProcessor", {"size": SQUARE}, 1.01 / 255 / 0.22),
]


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize(("name", "processor", "options", "limit"), PROCESSORS)
def test_pixels_equal_the_image_processors(name, processor, options, limit, tmp_path):
    import transformers

    case(name).reference.save_pretrained(tmp_path)
    made = getattr(transformers, processor)(**options)
    made.save_pretrained(tmp_path)
    record = load(tmp_path).preprocessing
    noise = np.random.default_rng(0).integers(0, 256, (53, 71, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((131, 83))
    pixels = made(image, return_tensors="pt")["pixel_values"][0]
    assert (preprocess(image, record) - torch.as_tensor(pixels)).abs().max() <= limit
    path = tmp_path / "preprocessor_config.json"
    old = json.loads(path.read_text()) | {"size": options["size"].get("height", 40)}  # as old files state it
    path.write_text(json.dumps(old | ({"crop_size": 32} if "crop_size" in options else {})))
    assert load(tmp_path).preprocessing == record


STATED = [
    ("BEiT", {"size": 32, "image_processor_type": "ViTImageProcessor"}),
    ("BEiT", {"size": 37, "crop_size": SQUARE, "do_center_crop": True}),
    ("BEiT", {"size": EDGE, "crop_size": 32, "feature_extractor_type": "CLIPFeatureExtractor"}),
    ("DeiT", {"size": 40, "crop_size": 32, "default_to_square": False}),
    ("DeiT", {"size": 32, "feature_extractor_type": "ViTFeatureExtractor", "do_pad": True, "size_divisor": 32}),
    ("DINOv2", {"size": 37, "crop_size": 32, "do_center_crop": True, "image_processor_type": "BlipImageProcessor"}),
    ("DINOv2", {"size": SQUARE, "crop_size": SQUARE, "image_processor_type": "BitImageProcessorFast"}),
    ("DINOv2", {"size": EDGE, "crop_size": SQUARE, "image_processor_type": "LlavaImageProcessor", "do_pad": True}),
]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("name", "record"), STATED)
def test_what_a_record_leaves_out_is_as_in_the_class_that_it_names(name, record, tmp_path):
    from transformers import AutoImageProcessor

    case(name).reference.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(record))
    made = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    noise = np.random.default_rng(0).integers(0, 256, (53, 71, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((131, 83))
    pixels = made(image, return_tensors="pt")["pixel_values"][0]
    assert (preprocess(image, load(tmp_path).preprocessing) - pixels).abs().max() <= 1e-6


@pytest.mark.parametrize(("name", "takes"), [("ViT", False), ("DeiT", False), ("DINOv2", True)])
def test_another_size_is_for_models_whose_reference_takes_it(name, takes, tmp_path):
    from transformers import ViTImageProcessorPil

    reference = case(name).reference
    reference.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(tmp_path)
    pixels = torch.zeros(1, 3, 48, 48)
    if takes:
        reference(pixels)
        assert load(tmp_path).preprocessing.size == (48, 48)
        return
    with pytest.raises(ValueError, match="doesn't match model"):
        reference(pixels)
    with pytest.raises(CheckpointError, match=r"size \(48, 48\) must be \(32, 32\)"):
        load(tmp_path)


@pytest.mark.ci
def test_scores_of_a_classifier_of_several_labels_equal_the_pipelines(tmp_path, capsys):
    import transformers

    made = case("ViT").reference
    made.config.problem_type = "multi_label_classification"
    made.save_pretrained(tmp_path)
    transformers.ViTImageProcessorPil(size=SQUARE).save_pretrained(tmp_path)
    photo = next(squares(tmp_path / "images", 1).rglob("*.png"))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    pipeline = transformers.pipeline("image-classification", model=str(tmp_path), image_processor=processor, top_k=99)
    expected = {row["label"]: row["score"] for row in pipeline(str(photo))}
    capsys.readouterr()  # what transformers says
    code, out, err = run(capsys, "classify", photo, "-m", tmp_path, "--format", "json", "--scores", "sigmoid")
    assert (code, err) == (0, "")
    found = {row["label"]: row["score"] for row in json.loads(out)[0]["scores"]}
    assert found == pytest.approx(expected, abs=1e-2)  # bfloat16
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("multi_label_classification", "regression")
    )
    code, _, err = run(capsys, "classify", photo, "-m", tmp_path)
    assert (code, "problem_type 'regression' is not supported" in err, err.count("\n")) == (1, True, 1)


@thin(3, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize("name", ["DINOv3", "BEiT", "DeiT"])
def test_folders_embed_index_inspect_and_probe(name, capsys, tmp_path):
    from transformers import BeitImageProcessorPil

    folder = tmp_path / "model"
    case(name).reference.save_pretrained(folder)
    BeitImageProcessorPil(size=SQUARE).save_pretrained(folder)
    capsys.readouterr()  # what transformers says
    images, train = squares(tmp_path / "images", 2), squares(tmp_path / "train", 4)
    photos = sorted(map(str, images.rglob("*.png")))
    assert run(capsys, "info", folder)[0] == 0  # whose counting leaves nothing behind
    code, out, err = run(capsys, "embed", "--images", *photos, "-m", folder)
    assert (code, err) == (0, "")
    checkpoint = load(folder)
    with torch.no_grad(), Image.open(photos[0]) as image:
        expected = checkpoint.model.features(preprocess(image, checkpoint.preprocessing)[None])[0]
    vector = torch.tensor(json.loads(out.splitlines()[0])["vector"])
    cosine = torch.nn.functional.cosine_similarity(vector, expected, dim=0)
    assert cosine > 0.9999
    code, out, err = run(capsys, "index", images, "-o", tmp_path / "made", "-m", folder)
    assert (code, err) == (0, "")
    code, out, err = run(capsys, "search", photos[0], "--index", tmp_path / "made", "--top", 1, "--format", "json")
    assert json.loads(out)[0]["results"][0]["file"] == photos[0]
    if checkpoint.model.head is not None:
        code, out, err = run(capsys, "classify", photos[0], "-m", folder, "--format", "json")
        assert (code, err) == (0, "")
        assert json.loads(out)[0]["scores"][0]["label"] in case(name).config["id2label"].values()
    code, out, err = run(capsys, "inspect", folder, photos[0], "--format", "json")
    assert (code, err) == (0, "")
    code, _, err = run(capsys, "inspect", folder, photos[0], "--size", "64", "--format", "json")
    assert (code, "--size must be the model's 32x32" in err) == ((1, True) if name == "BEiT" else (0, False))
    assert evaluated(capsys, "linear-probe", images, "--train", train, "-m", folder, "--C", "1")["acc1"] > 0.5
