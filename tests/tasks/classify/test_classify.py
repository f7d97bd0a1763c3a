"""`multimodal classify` on folders: resumable results, classifier files, labels, thresholds."""

import csv
import json
import os
import re
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from multimodal.cli.vision.images import found, remaining
from multimodal.models.clip import CLIP
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.weights.folder import load_folder
from tests.helpers.commands import one_line, run
from tests.helpers.processes.programs import LIMIT, forked, wait_for
from tests.helpers.spread import thin

LABELS = ["--labels", "red", "blue", "dog"]


def breakages(folder: Path) -> list[str]:
    """Add broken files; return the error of each."""
    whole = (folder / "part0" / "0.png").read_bytes()
    (folder / "part0" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "part0" / "text.jpg").write_text("no image")
    (folder / "part1" / "empty.jpg").write_bytes(b"")
    (folder / "part1" / "folder.jpg").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "part1" / "folder.jpg" / "inside.png")
    return ["cut.png: cannot be decoded", "text.jpg: not a readable image", "empty.jpg: empty file"]


def assert_same_scores(own: Path, expected: Path) -> None:
    """The same text, and scores equal but for rounding: the rows of a batch may differ from single ones."""
    number = re.compile(r"\d\.\d+")
    own, expected = own.read_text(), expected.read_text()
    assert number.sub("", own) == number.sub("", expected)
    assert list(map(float, number.findall(own))) == pytest.approx(list(map(float, number.findall(expected))), abs=3e-6)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_a_second_call_does_what_is_missing_and_says_so(capsys, models, folder, tmp_path, style):
    whole, part = tmp_path / f"whole.{style}", tmp_path / f"part.{style}"
    common = [*LABELS, "-m", models / "clip", "--batch_size", 3]
    assert run(capsys, "classify", folder, *common, "-o", whole) == (0, "", "")
    run(capsys, "classify", folder / "part0", *common, "-o", part)
    code, out, err = run(capsys, "classify", folder, *common, "-o", part)
    assert (code, out) == (0, "")
    assert err == f"multimodal: {part}: 5 of 10 images are there already\n"
    assert_same_scores(part, whole)
    before = part.read_bytes()
    run(capsys, "classify", folder, *common, "-o", part)
    assert part.read_bytes() == before
    if style == "csv":
        with whole.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 30
        assert rows[0].keys() == {"file", "label", "score"}
    else:
        records = [json.loads(line) for line in whole.read_text().splitlines()]
        assert [len(record["scores"]) for record in records] == [3] * 10


@pytest.mark.filterwarnings("default:.*that have changed since")
def test_rows_of_an_image_that_has_changed_since_are_told(capsys, models, folder, tmp_path):
    arguments = ["classify", folder / "part0", *LABELS, "-m", models / "clip", "-o", tmp_path / "o.csv"]
    run(capsys, *arguments)
    image = sorted((folder / "part0").iterdir())[0]
    later = (tmp_path / "o.csv").stat().st_mtime + 10
    os.utime(image, (later, later))
    code, _, err = run(capsys, *arguments)
    assert code == 0
    assert f"keeps the rows of 1 images that have changed since, such as {image};" in err


@pytest.mark.ci
def test_good_images_are_done_and_broken_ones_told_at_each_call(capsys, models, folder, tmp_path):
    causes = breakages(folder)
    arguments = ["classify", folder, *LABELS, "-m", models / "clip", "-o", tmp_path / "o.csv", "--batch_size", 4]
    for _ in range(2):
        code, _, err = run(capsys, *arguments)
        assert code == 1
        lines = [line for line in err.splitlines() if "error:" in line]
        assert [sum(cause in line for line in lines) for cause in causes] == [1, 1, 1]
        assert len(lines) == 3
    assert "11 of 14 images are there already" in err
    content = (tmp_path / "o.csv").read_text()
    assert content.count("\n") == 1 + 3 * 11
    Image.new("RGB", (40, 40), "red").save(folder / "part0" / "text.jpg")  # repaired: done at the next call
    run(capsys, *arguments)
    assert (tmp_path / "o.csv").read_text().startswith(content)
    assert (tmp_path / "o.csv").read_text().count("text.jpg") == 3


@pytest.mark.ci
def test_kill_and_interrupt_lose_nothing_and_the_end_is_that_of_an_unbroken_run(capsys, models, folder, tmp_path):
    program = (
        "import sys, time\n"
        "from multimodal.tasks.classify import classifier\n"
        "from multimodal.cli.main import main\n"
        "slow = classifier.ZeroShotClassifier.results_of\n"
        "def results_of(*given):\n    time.sleep(0.3)\n    return slow(*given)\n"
        "classifier.ZeroShotClassifier.results_of = results_of\n"
        "main()\n"
    )
    common = ["classify", str(folder), *LABELS, "-m", str(models / "clip"), "--batch_size", "2"]
    path = tmp_path / "killed.csv"
    for number in (signal.SIGKILL, signal.SIGINT):
        before = path.stat().st_size if path.exists() else 0
        with forked(program, *common, "-o", path) as process:
            wait_for(lambda: path.exists() and path.stat().st_size > before)  # noqa: B023
            held = path.read_bytes()
            process.send_signal(number)
            err = process.communicate(timeout=LIMIT)[1]
        assert process.returncode in (130, -number)
        assert ("the same command resumes" in err) == (number == signal.SIGINT)
        assert path.read_bytes().startswith(held[: held.rfind(b"\n")])
    for target in (path, tmp_path / "whole.csv"):
        assert run(capsys, *common, "-o", target)[0] == 0
    assert path.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_the_batch_in_which_a_stop_came_is_made_whole_again():
    files = [f"{i}" for i in range(10)]
    assert remaining(files, set(), 4) == ([], files)
    assert remaining(files, {"0", "1", "2", "3", "4"}, 4) == ([], files[4:])
    assert remaining(files, set(files[:4]), 4) == ([], files[4:])
    assert remaining(files, {"0", "2", "3", "4", "5", "6", "7"}, 4) == (["1"], files[8:])
    assert remaining(files, set(files), 4) == ([], [])


@pytest.mark.ci
def test_results_of_other_labels_models_or_settings_are_not_mixed(capsys, models, folder, tmp_path):
    path = tmp_path / "o"
    common = ["classify", folder, "-m", models / "clip", "-o", path, "--format", "csv"]
    run(capsys, *common, *LABELS)
    content = path.read_bytes()
    for flags, named in (
        (["--labels", "red,blue"], "labels"), ([*LABELS, "--top", 2], "top"), ([*LABELS, "--format", "jsonl"], "style"),
        ([*LABELS, "--threshold", 0.5], "threshold"), ([*LABELS, "--templates", "none"], "templates"),
        ([*LABELS, "--preprocessing", "siglip"], "preprocessing"),
    ):  # fmt: skip
        with warnings.catch_warnings(action="ignore"):
            code, _, err = run(capsys, *common, *flags)
        assert code == 1
        assert f"was written with other {named}" in one_line(err)
    assert path.read_bytes() == content
    assert run(capsys, *common, "--labels", "red,blue", "--overwrite")[0] == 0
    assert path.read_text().count("\n") == 1 + 2 * 10


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--labels"), (["--labels", "a,b", "--classifier", "f"], "--labels"),
        (["--labels", "a", "-o", "x.txt"], "--output"), (["--labels", "a", "-o", "x.csv", "--format", "json"], "--out"),
        (["--labels", "a", "--overwrite"], "--overwrite"), (["--labels", "a", "--classes", "f"], "--classes"),
        (["--labels", "a", "--calibration", "platt"], "--cal"), (["--labels", "a", "--scores", "x"], "--scores"),
        (["--classifier", "f", "--templates", "none"], "--templates"),
        (["--labels", "a,b", "--save_classifier", "x.csv"], "--save_classifier"),
    ],
)  # fmt: skip
def test_flags_that_contradict_are_one_line_and_exit_2(capsys, flags, named):
    code, out, err = run(capsys, "classify", "a.png", *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.ci
def test_every_output_comes_a_image_at_a_time(capsys, models, folder):
    common = ["classify", folder, *LABELS, "-m", models / "clip", "--top", 1]
    printed = {style: run(capsys, *common, "--format", style)[1] for style in ("jsonl", "json", "csv", "table")}
    assert [json.loads(line) for line in printed["jsonl"].splitlines()] == json.loads(printed["json"])
    assert printed["csv"].count("\n") == 11
    assert printed["table"].count("\n") == 20


def test_finding_images_reports_what_it_cannot_list(capsys, folder, tmp_path, monkeypatch):
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("part1"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    files, code = found([str(folder), str(folder / "part0" / "1.png")])
    assert (len(files), code) == (5, 1)
    assert "part1: cannot be listed (Permission denied)" in one_line(capsys.readouterr().err)


def test_photos_of_phones_that_are_not_read_are_counted(capsys, tmp_path):
    for name in ("a.png", "B.HEIC", "c.heif", "d.txt"):
        (tmp_path / name).touch()
    assert found([str(tmp_path)]) == ([str(tmp_path / "a.png")], 0)
    expected = f"multimodal: {tmp_path}: HEIC images left out: 2 (not read; convert them)\n"
    assert capsys.readouterr().err == expected


# none of these


@pytest.mark.ci
def test_none_of_these_is_the_answer_below_the_threshold(capsys, models, folder):
    common = ["classify", folder, *LABELS, "-m", models / "clip"]
    sure = json.loads(run(capsys, *common, "--threshold", 0.0, "--format", "json")[1])
    assert [r["answer"] for r in sure] == [r["scores"][0]["label"] for r in sure]
    none = json.loads(run(capsys, *common, "--threshold", 1.0, "--format", "json")[1])
    assert [r["answer"] for r in none] == [None] * 10
    assert [len(r["scores"]) for r in none] == [3] * 10
    rows = list(csv.reader(run(capsys, *common, "--threshold", 1.0, "--format", "csv")[1].splitlines()))
    assert [row[1:] for row in rows[1:]] == [["none of these", ""]] * 10
    table = run(capsys, *common, "--threshold", 1.0)[1]
    assert len(re.findall(r"^ {12}none of these \(best: \w+ 0\.\d{4}\)$", table, re.MULTILINE)) == 10
    half = run(capsys, *common, "--threshold", 0.4, "--format", "csv")[1]
    scores = [row[2] for row in csv.reader(half.splitlines()[1:])]
    assert all(score == "" or float(score) >= 0.4 for score in scores)
    code, _, err = run(capsys, "classify", folder, "--labels", "red", "none of these", "-m", models / "clip",
                       "--threshold", 0.4)  # fmt: skip
    assert code == 1
    assert "'none of these' is reserved for answers below the threshold" in one_line(err)
    assert "--threshold must be in [0, 1] for softmax scores (got 2)" in one_line(
        run(capsys, *common, "--threshold", 2)[2]
    )


@pytest.mark.ci
def test_cosines_are_as_they_are_and_sigmoid_is_refused_for_a_softmax_model(capsys, models, folder):
    common = ["classify", folder, *LABELS, "-m", models / "clip", "--format", "json"]
    cosines = json.loads(run(capsys, *common, "--scores", "cosine")[1])
    model = load_folder(models / "clip").model
    for record, soft in zip(cosines, json.loads(run(capsys, *common)[1]), strict=True):
        scores = torch.tensor([s["score"] for s in record["scores"]])
        assert scores.abs().max() <= 1
        wanted = (scores * model.logit_scale.exp()).softmax(0)
        assert torch.allclose(wanted, torch.tensor([s["score"] for s in soft["scores"]]), atol=1e-3)
    assert "--scores sigmoid: the model was trained with softmax" in one_line(
        run(capsys, *common, "--scores", "sigmoid")[2]
    )


@torch.inference_mode()
def test_a_model_of_the_sigmoid_loss_gives_each_label_by_itself_or_what_is_asked_for(models):
    softmax = load_folder(models / "clip")
    torch.manual_seed(0)
    model = CLIP(replace(softmax.model.config, loss="sigmoid")).eval()
    made = ZeroShotClassifier(replace(softmax, model=model), ["red", "blue"])
    pixels = torch.rand(3, 3, 32, 32)
    cosines = model.encode_image(pixels) @ made.weights.T
    logits = cosines * model.logit_scale.exp() + model.logit_bias
    assert made.scores == "sigmoid"
    for scores, wanted in (("sigmoid", logits.sigmoid()), ("softmax", logits.softmax(1)), ("cosine", cosines)):
        torch.testing.assert_close(made.using(scores=scores).probabilities(pixels), wanted, atol=1e-5, rtol=1e-4)
