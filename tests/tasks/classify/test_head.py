"""`multimodal classify` and `Classifier` with a ViT whose head has labels of its own."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal import Classifier
from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.vit import ViT, ViTConfig
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers.commands import one_line, run
from tests.helpers.data.video_files import noise, video
from tests.helpers.tiny import randomized

CARD = {"labels": ["n1", "n2", "n3"], "names": ["crane", "crane", "cat"]}
LABELS = ["crane (n1)", "crane (n2)", "cat"]


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    config = ViTConfig((16, 16), 8, transformer(16, 1, 2, 24), "mean", False, classes=3)
    record = Preprocessing((16, 16), "shortest", "bilinear", (0.5,) * 3, (0.5,) * 3, 0, 1.0)
    folder = tmp_path_factory.mktemp("head") / "vit"
    save_folder(Checkpoint(randomized(ViT(config)).eval(), preprocessing=record, card=CARD), folder)
    return folder


def test_a_head_has_its_own_labels(capsys, vit, folder, tmp_path):
    file = str(folder / "part0" / "0.png")
    checkpoint = load_folder(vit)
    with torch.inference_mode():
        logits = checkpoint.model(preprocess(Image.open(file), checkpoint.preprocessing)[None])[0]
    expected = dict(zip(LABELS, logits.softmax(-1).tolist(), strict=True))
    code, out, err = run(capsys, "classify", folder, "--model", vit, "--format", "json")
    assert (code, err) == (0, "")
    found = {record["file"]: record["scores"] for record in json.loads(out)}
    assert len(found) == 10
    assert {s["label"]: s["score"] for s in found[file]} == pytest.approx(expected, abs=1e-5)
    made = Classifier(vit, top=2, threshold=1.0)
    (result,) = made(file)
    assert (made.labels, result["answer"]) == (LABELS, None)
    assert [s["label"] for s in result["scores"]] == [s["label"] for s in found[file]][:2]
    columns = made({"path": np.array([file, "absent.png"], object)})
    assert columns["label"].tolist() == [result["scores"][0]["label"], ""]
    output = tmp_path / "out.csv"
    for _ in range(2):  # the second goes on, and finds all there
        assert run(capsys, "classify", folder, "--model", vit, "--top", 1, "-o", output)[0] == 0
    assert len(list(csv.reader(output.read_text().splitlines()))) == 11


def test_a_video_has_one_result_of_the_mean_of_its_frames(vit, tmp_path):
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(video(noise(4)))
    made = Classifier(vit)
    frames = made(clip)
    (whole,) = Classifier(vit, per_clip=True)(clip)
    assert len(frames) > 1
    assert {s["label"] for s in whole["scores"]} == {*LABELS}


@pytest.mark.parametrize(("flag", "values"), [
    ("labels", ["a", "b"]), ("templates", ["clip7"]), ("save_classifier", ["x.safetensors"]), ("heatmap", ["maps"]),
    ("calibrate", ["in"]), ("native", []),
])  # fmt: skip
def test_what_is_for_a_clip_is_one_line(capsys, vit, folder, monkeypatch, flag, values):
    monkeypatch.chdir(folder.parent)
    code, out, err = run(capsys, "classify", folder, "--model", vit, f"--{flag}", *values)
    assert (code, out) == (1, "")
    assert f"--{flag} is for a CLIP, and {vit} is a ViT with a head for its own 3 labels" in one_line(err)


def test_a_head_takes_no_images_at_their_aspect(vit):
    with pytest.raises(UsageError, match=r"native is for a CLIP, and .* is a ViT with a head"):
        Classifier(vit, native=0)


def test_what_a_head_cannot_do_is_one_line(capsys, models, vit, folder, tmp_path):
    for arguments, cause in (
        (["--model", vit, "--scores", "sigmoid"], "--scores sigmoid: a ViT's head has softmax scores"),
        (["--model", models / "clip"], "--labels is needed"),
    ):
        code, out, err = run(capsys, "classify", folder, *arguments)
        assert (code, out) == (1, "")
        assert cause in one_line(err)
    with pytest.raises(UsageError, match="labels is for a CLIP"):
        Classifier(vit, ["a"])
    checkpoint = load_folder(vit)
    for card, cause in (({}, "does not name the 3 classes"), (CARD | {"names": ["a"]}, "names 3 classes")):
        save_folder(Checkpoint(checkpoint.model, preprocessing=checkpoint.preprocessing, card=card), tmp_path / cause)
        with pytest.raises(CheckpointError, match=cause):
            Classifier(tmp_path / cause)
