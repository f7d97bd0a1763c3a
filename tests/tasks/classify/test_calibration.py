"""Calibration: fits against references, hand-computed measures, and the command's output."""

import json
import re
from pathlib import Path

import pytest
import torch
from sklearn.calibration import _SigmoidCalibration

from multimodal.errors import CheckpointError, DataError
from multimodal.system.records import from_record
from multimodal.tasks.classify.calibrate import open_labelled
from multimodal.tasks.classify.calibration import (
    Calibration,
    answered,
    bins,
    calibrate,
    calibration_error,
    fitted,
    folds_of,
    log_odds,
    measured,
)
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.classify.classifier_file import read_classifier
from multimodal.tasks.encode.features import Features
from multimodal.tasks.evaluate.zero_shot import zero_shot_scores
from multimodal.weights.folder import load_folder
from tests.helpers.commands import one_line, run
from tests.helpers.data import sets
from tests.helpers.spread import spread


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    return sets.squares(tmp_path / "squares")


def drawn(temperature: float, images: int = 4000, labels: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and classes that are as likely as softmax(logits / temperature) says."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(images, labels, generator=source) * 4
    return logits, (logits / temperature).softmax(1).multinomial(1, generator=source)[:, 0]


def separated(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose greatest is that of the class, of 4."""
    source = torch.Generator().manual_seed(0)
    classes = torch.arange(images) % 4
    return torch.rand(images, 4, generator=source) + 5 * torch.eye(4)[classes], classes


def test_the_temperature_that_made_the_classes_is_found():
    logits, classes = drawn(2.5)
    calibration, held = calibrate("temperature", "softmax", logits, classes, logits.softmax(1), threshold=0.6)
    assert 1 / calibration.scale[0] == pytest.approx(2.5, rel=0.05)
    before, after = calibration.figures["before"], calibration.figures["after"]
    assert after["ece"] < 0.03 < 0.1 < before["ece"]
    assert after["nll"] < before["nll"]
    assert after["accuracy"] == before["accuracy"]
    assert torch.equal(calibration(logits).argsort(1), logits.argsort(1))
    assert after["right_of_answers"] > before["right_of_answers"]
    assert held.sum(1).allclose(torch.ones(len(held)).double())


def test_no_other_temperature_has_a_smaller_loss():
    logits, classes = drawn(0.7, 500)
    (scale,), _ = fitted("temperature", "softmax", logits, classes)
    loss = lambda s: torch.nn.functional.cross_entropy(logits.double() * s, classes).item()
    assert loss(scale) <= min(loss(scale * factor) for factor in (0.9, 0.999, 1.001, 1.1))


def test_images_that_are_all_right_do_not_make_every_score_1():
    """Their likelihood grows without end as the temperature falls: the number of images bounds it."""
    logits, classes = separated(20)
    with pytest.warns(UserWarning, match="all 20 images are classified right"):
        calibration, held = calibrate("temperature", "softmax", logits, classes, logits.softmax(1))
    assert calibration(logits).amax(1).mean().item() == pytest.approx(21 / 22, abs=1e-6)
    assert held.amax(1).mean() < 21 / 22
    assert calibration(torch.tensor([[3.0, 2.9, 0.0, 0.0]])).max() < 0.9


def test_a_calibration_that_makes_held_out_scores_worse_warns():
    logits, classes = separated(60)
    logits[0] = logits[0].roll(1)  # one mistake, in one of the five parts
    with pytest.warns(UserWarning, match=r"held-out NLL worse \(\S+ → \S+\); give more images"):
        calibration, _ = calibrate("temperature", "softmax", logits, classes, logits.softmax(1))
    assert calibration.figures["after"]["nll"] < 2 * calibration.figures["before"]["nll"]


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_platt_scaling_equals_scikit_learns(loss):
    """With Platt's own targets: the shared one on all pairs of image and label, else a label at a time."""
    logits, classes = drawn(1.5, 800)
    classes[::7] = -1  # images of something else
    odds, own = log_odds(loss, logits), classes[:, None] == torch.arange(5)
    slope, offset = fitted("platt", loss, logits, classes)
    known = _SigmoidCalibration().fit(odds.flatten().numpy(), own.flatten().numpy())
    assert [slope.item(), offset.item()] == pytest.approx([-known.a_, -known.b_], rel=1e-3, abs=1e-3)
    slopes, offsets = fitted("platt-per-label", loss, logits, classes)
    for label in range(5):
        known = _SigmoidCalibration().fit(odds[:, label].numpy(), own[:, label].numpy())
        assert [slopes[label], offsets[label]] == pytest.approx([-known.a_, -known.b_], rel=1e-3, abs=1e-3)


def test_log_odds_are_those_of_the_models_own_probability():
    logits = torch.tensor([[3.0, -1.0, 0.5], [100.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    odds = log_odds("softmax", logits)
    assert odds.sigmoid().allclose(logits.double().softmax(1), atol=1e-9)
    assert odds.isfinite().all()
    assert log_odds("sigmoid", logits).equal(logits.double())


def test_measures_by_hand():
    """Two spans of scores: (0.6, 0.66…] with one of two right, (0.86…, 0.93…] with both."""
    best, right = torch.tensor([0.61, 0.65, 0.9, 0.9]), torch.tensor([True, False, True, True])
    assert calibration_error(best, right) == pytest.approx((2 * (0.63 - 0.5) + 2 * (1 - 0.9)) / 4)
    table = bins(best, right)
    assert table[:, 0].sum() == 4
    assert table[9].tolist() == pytest.approx([2, 0.63, 0.5])
    assert bins(torch.tensor([0.0, 1.0]), torch.tensor([True, True]))[[0, 14], 0].tolist() == [1, 1]
    scores = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.9, 0.1]]).double()
    classes = torch.tensor([0, 0, -1])
    figures = answered(scores, classes, 0.7)
    assert figures == {"false_accept": 1.0, "false_reject": 0.5, "right_of_answers": 0.5}
    assert measured("temperature", scores, classes).nll == pytest.approx(-torch.tensor([0.8, 0.4]).log().mean().item())
    assert measured("platt", scores, classes).accuracy == 0.5


@pytest.mark.ci
def test_figures_are_of_images_that_were_not_fitted():
    """Logits that know nothing: a fit of two numbers a label to itself would look better than it is."""
    source = torch.Generator().manual_seed(0)
    logits, classes = torch.randn(60, 20, generator=source) * 5, torch.randint(20, (60,), generator=source)
    calibration, held = calibrate("platt-per-label", "softmax", logits, classes, logits.softmax(1))
    own = measured("platt-per-label", calibration(logits.double()), classes)
    assert calibration.figures["after"]["nll"] > 1.05 * own.nll
    assert calibration.figures["after"] == measured("platt-per-label", held, classes)._asdict()
    folds = folds_of(classes)
    assert torch.bincount(folds).tolist() == [12] * 5
    pairs = torch.arange(20).repeat(10)
    assert all((torch.bincount(folds_of(pairs)[pairs == label], minlength=5) == 2).all() for label in range(20))


def test_too_few_images_and_a_record_that_does_not_fit_are_refused():
    logits, classes = drawn(1, 19)
    with pytest.raises(DataError, match="19 images of the labels: calibration needs at least 20"):
        calibrate("temperature", "softmax", logits, classes, logits.softmax(1))
    with pytest.raises(DataError, match="of two labels"):
        calibrate("temperature", "softmax", *(torch.cat([x, x]) for x in (logits, classes * 0, logits.softmax(1))))
    good = Calibration("platt", "softmax", (1.0,), (0.0,), {}).to_dict()
    assert from_record(Calibration, json.loads(json.dumps(good)), "f").scale == (1.0,)
    for change in (
        {"kind": "other"},
        {"scale": []},
        {"offset": [float("nan")]},
        {"kind": "platt-per-label"},
        {"scale": "x"},
    ):
        with pytest.raises(CheckpointError, match=r"(kind|scale|offset)(\[0\])?: expected"):
            from_record(Calibration, good | change, "f").check_labels(3)


@pytest.mark.parametrize(
    "kind", spread(["platt-per-label", "temperature", "platt"], 3, pytest.mark.slow, pytest.mark.ci)
)
def test_a_calibrated_classifier_is_stored_and_gives_its_scores_later(capsys, models, squares, tmp_path, kind):
    file, image = tmp_path / "c.safetensors", tmp_path / "curve.png"
    code, out, err = run(capsys, "classify", "--calibrate", squares, "--calibration", kind, "-m", models / "clip",
                         "--save_classifier", file, "--reliability", image, "--threshold", 0.3, "-q")  # fmt: skip
    assert (code, err) == (0, "")
    assert re.search(rf"^{kind}: .+ fitted to 32 images of 4 labels$", out, re.MULTILINE)
    rows = re.findall(r"(before|after) +accuracy (\S+)  NLL (\S+)  ECE (\S+)  false rejects \S+", out)
    assert [row[0] for row in rows] == ["before", "after"]
    assert kind == "platt-per-label" or rows[0][1] == rows[1][1]
    assert image.read_bytes().startswith(b"\x89PNG")
    record = read_classifier(file).record
    assert record.labels == ("blue square", "green square", "red square", "yellow square")
    common = ["classify", squares / "red_square", "-m", models / "clip", "--format", "json"]
    found = json.loads(run(capsys, *common, "--classifier", file)[1])
    plain = json.loads(run(capsys, *common, "--labels", *record.labels)[1])
    calibration = record.calibration
    for own, before in zip(found, plain, strict=True):
        scores = {s["label"]: s["score"] for s in before["scores"]}
        logits = torch.tensor([scores[label] for label in record.labels]).double().log()  # up to a shift
        wanted = dict(zip(record.labels, calibration(logits[None])[0].tolist(), strict=True))
        assert {s["label"]: s["score"] for s in own["scores"]} == pytest.approx(wanted, abs=1e-4)
        assert own["answer"] == (own["scores"][0]["label"] if own["scores"][0]["score"] >= 0.3 else None)
    err = run(capsys, *common, "--classifier", file, "--scores", "softmax" if kind != "temperature" else "sigmoid")[2]
    assert f"the classifier is calibrated ({kind})" in one_line(err)
    code, out, err = run(capsys, *common, "--classifier", file, "--scores", "cosine")
    assert (code, out) == (1, "")
    assert "threshold 0.3 of the classifier is for s" in one_line(err)
    assert run(capsys, *common, "--classifier", file, "--scores", "cosine", "--threshold", 0.1)[0] == 0
    for wrong in (tmp_path / "x.jpg", squares / "red_square"):
        code, out, err = run(capsys, "classify", "--calibrate", squares, "-m", models / "clip", "--reliability", wrong)
        assert (code, out, f"--reliability {wrong}: must end in .png" in one_line(err)) == (1, "", True)


@pytest.mark.parametrize("kind", ["temperature", "platt", "platt-per-label"])
def test_the_class_that_evaluation_finds_is_the_best_calibrated_label(models, squares, kind):
    data = open_labelled(str(squares))
    classifier = ZeroShotClassifier(load_folder(models / "clip"), data.labels())
    maps = ((0.2, 1.0, 2.0, 0.5), (0.5, -0.5, 1.0, 0.0)) if kind == "platt-per-label" else ((0.7,), (0.0,))
    classifier = classifier.using(calibration=Calibration(kind, "softmax", *maps, {}))
    source = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(data.images.keys), classifier.weights.shape[1], generator=source)
    logits = classifier.vector_logits(vectors)
    numbers = data.numbers(classifier.labels)
    found = zero_shot_scores(classifier, data.images, Features(vectors, data.images.keys, []), numbers).found
    assert torch.equal(found, classifier.scored(logits.double()).argmax(1))
    if kind == "platt-per-label":  # scale and offset are of the log-odds, not of the logits
        assert (found != (logits * torch.tensor(maps[0]) + torch.tensor(maps[1])).argmax(1)).any()


def test_classes_that_are_no_label_count_as_none_of_these(capsys, models, squares):
    common = ["classify", "--calibrate", squares, "-m", models / "clip", "--threshold", 0.2, "--calibration", "platt"]
    code, out, _ = run(capsys, *common, "--labels", "Red square", "blue_square", "green square")
    assert code == 0
    assert "fitted to 24 images of 3 labels" in out
    assert "8 images of 1 other classes (as none of these): yellow_square" in out
    assert "false accepts" in out
    err = run(capsys, *common, "--labels", "cat", "dog")[2]
    assert "none of its 4 classes (such as 'blue_square') is one of the 2 labels" in one_line(err)
    assert "no such file" in one_line(run(capsys, "classify", "--calibrate", "absent", "-m", models / "clip")[2])


def test_a_broken_image_of_the_calibration_is_told_and_the_rest_used(capsys, models, squares):
    (squares / "red_square" / "0.png").write_bytes(b"no image")
    code, out, err = run(capsys, "classify", "--calibrate", squares, "-m", models / "clip")
    assert code == 1
    assert "0.png" in one_line(err)
    assert "fitted to 31 images" in out
