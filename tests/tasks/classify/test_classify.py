"""`multimodal classify` on folders: resumable results, classifier files, labels, thresholds."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import multimodal
from multimodal.cli.vision.images import found, remaining
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.models.clip import CLIP
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.prompts import labels_from, prompts_of, templates_from
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.weights.folder import load_folder, save_folder
from tests.helpers.commands import one_line, run
from tests.helpers.paths import ROOT
from tests.helpers.processes.programs import LIMIT, started, wait_for

LABELS = ["--labels", "red", "blue", "dog"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten noisy images in two folders."""
    for number in range(10):
        path = tmp_path / "in" / f"part{number // 5}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 40), 50).convert("RGB").save(path)
    return tmp_path / "in"


def breakages(folder: Path) -> list[str]:
    """Add broken files; return the error of each."""
    whole = (folder / "part0" / "0.png").read_bytes()
    (folder / "part0" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "part0" / "text.jpg").write_text("no image")
    (folder / "part1" / "empty.jpg").write_bytes(b"")
    (folder / "part1" / "folder.jpg").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "part1" / "folder.jpg" / "inside.png")
    return ["cut.png: cannot be decoded", "text.jpg: not a readable image", "empty.jpg: empty file"]


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_a_second_call_does_what_is_missing_and_says_so(capsys, models, folder, tmp_path, style):
    whole, part = tmp_path / f"whole.{style}", tmp_path / f"part.{style}"
    common = [*LABELS, "-m", models / "clip", "--batch_size", 3]
    assert run(capsys, "classify", folder, *common, "-o", whole) == (0, "", "")
    run(capsys, "classify", folder / "part0", *common, "-o", part)
    code, out, err = run(capsys, "classify", folder, *common, "-o", part)
    assert (code, out) == (0, "")
    assert err == f"multimodal: {part}: 5 of 10 images are there already\n"
    assert part.read_bytes() == whole.read_bytes()
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
        with started([sys.executable, "-c", program, *common, "-o", str(path)], cwd=ROOT,
                     env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE) as process:  # fmt: skip
            wait_for(lambda: path.exists() and path.stat().st_size > before)  # noqa: B023
            held = path.read_bytes()
            process.send_signal(number)
            err = process.communicate(timeout=LIMIT)[1]
        assert process.returncode in (130, -number)
        assert (b"the same command resumes" in err) == (number == signal.SIGINT)
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


def test_results_of_other_labels_models_or_settings_are_not_mixed(capsys, models, folder, tmp_path):
    path, common = tmp_path / "o.csv", ["classify", folder, "-m", models / "clip", "-o", tmp_path / "o.csv"]
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
        assert f"has another {named}" in one_line(err)
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


# none of these


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


# classifiers as files


def saved(capsys, models, path: Path, *flags: object) -> Path:
    assert run(capsys, "classify", *LABELS, "-m", models / "clip", "--save_classifier", path, *flags) == (0, "", "")
    return path


def test_a_saved_classifier_gives_the_same_scores_and_encodes_no_text(capsys, models, folder, tmp_path, monkeypatch):
    file = saved(capsys, models, tmp_path / "c.safetensors", "--threshold", 0.4)
    common = ["classify", folder, "-m", models / "clip", "--format", "jsonl"]
    wanted = run(capsys, *common, *LABELS, "--threshold", 0.4)
    monkeypatch.setattr("multimodal.models.clip.CLIP.encode_text", None)
    assert run(capsys, *common, "--classifier", file) == wanted
    other = multimodal.classify(folder / "part0" / "0.png", model=models / "clip", classifier=file)
    assert other[0]["answer"] == json.loads(wanted[1].splitlines()[0])["answer"]


def test_a_file_that_is_there_is_left_unless_asked_and_never_if_foreign(capsys, models, tmp_path):
    file = saved(capsys, models, tmp_path / "c.safetensors")
    arguments = ["classify", "--labels", "x,y", "-m", models / "clip", "--save_classifier"]
    assert "exists; --overwrite" in one_line(run(capsys, *arguments, file)[2])
    assert run(capsys, *arguments, file, "--overwrite")[0] == 0
    foreign = models / "clip" / "model.safetensors"
    before = foreign.read_bytes()
    assert "not a classifier file" in one_line(run(capsys, *arguments, foreign, "--overwrite")[2])
    assert foreign.read_bytes() == before
    assert "cannot be written" in one_line(run(capsys, *arguments, tmp_path / "no" / "c.safetensors")[2])


def test_another_model_or_preprocessing_is_refused(capsys, models, folder, tmp_path):
    file = saved(capsys, models, tmp_path / "c.safetensors")
    checkpoint = load_folder(models / "clip")
    with torch.no_grad():
        checkpoint.model.text.embed.weight[0, 0] += 1e-3  # one weight of the text tower
    save_folder(checkpoint, tmp_path / "other")
    code, out, err = run(capsys, "classify", folder, "--classifier", file, "-m", tmp_path / "other")
    assert (code, out) == (1, "")
    assert re.search(r"c\.safetensors: was made with model .+ has other weights", one_line(err))
    with warnings.catch_warnings(action="ignore"):
        err = run(capsys, "classify", folder, "--classifier", file, "-m", models / "clip", "--preprocessing", "siglip")[
            2
        ]
    assert "was made for images with resize shortest" in one_line(err)


def test_any_flipped_byte_of_a_classifier_is_noticed(capsys, models, folder, tmp_path):
    from multimodal.tasks.classify.classifier_file import read_classifier

    file = saved(capsys, models, tmp_path / "c.safetensors")
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if whole[place : place + 1] == b" ":  # one that fills safetensors' own header may mean nothing
            continue
        with pytest.raises(CheckpointError, match=r"^[^\n]*c\.safetensors[^\n]*$"):
            read_classifier(file)
    file.write_bytes(whole[:-1])
    code, _, err = run(capsys, "classify", folder, "--classifier", file, "-m", models / "clip")
    assert code == 1
    assert "c.safetensors" in one_line(err)
    with safe_open(models / "clip" / "model.safetensors", "pt") as foreign:
        assert not foreign.metadata()
    save_file(load_file(models / "clip" / "model.safetensors"), tmp_path / "f.safetensors", metadata={"format": "pt"})
    err = run(capsys, "classify", folder, "--classifier", tmp_path / "f.safetensors", "-m", models / "clip")[2]
    assert "not a classifier file" in one_line(err)


# labels and prompts


def test_prompts_by_label_are_the_mean_of_their_vectors(capsys, models, folder, tmp_path):
    checkpoint = load_folder(models / "clip")
    prompts = {"cat": ["a photo of a red {}", "blue"], "dog": ["square"]}
    made = ZeroShotClassifier(checkpoint, ["dog", "cat"], prompts).weights
    one = {
        t: ZeroShotClassifier(checkpoint, [t], "none").weights[0] for t in ("a photo of a red cat", "blue", "square")
    }
    wanted = torch.nn.functional.normalize(one["a photo of a red cat"] + one["blue"], dim=0)
    assert torch.allclose(made, torch.stack([one["square"], wanted]), atol=1e-6)
    (tmp_path / "p.json").write_text(json.dumps(prompts | {"dog": "square"}))
    out = run(
        capsys, "classify", folder, "--labels_file", tmp_path / "p.json", "-m", models / "clip", "--format", "json"
    )
    found = multimodal.classify(str(folder / "part0" / "0.png"), ["cat", "dog"], checkpoint, templates=prompts)
    assert json.loads(out[1])[0]["scores"][0]["score"] == pytest.approx(found[0]["scores"][0]["score"], abs=1e-5)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"a": ["x"], "a": ["y"]}', "repeated key 'a'"), ('{"a": []}', "'a': expected a list of texts ([])"),
        ('{"a": [3]}', "'a': expected a list of texts ([3])"), ("{", "cannot be read as JSON"), ("3", "a list"),
        ('["a", "a"]', "'a' is repeated"), ('["a", 3]', "number 2 of 2: expected"), ("{}", "expected at least one"),
    ],
)  # fmt: skip
def test_unusable_prompt_files_are_one_line(capsys, models, folder, tmp_path, text, cause):
    (tmp_path / "p.json").write_text(text)
    code, out, err = run(capsys, "classify", folder, "--labels_file", tmp_path / "p.json", "-m", models / "clip")
    assert (code, out) == (1, "")
    assert cause in one_line(err)


def test_label_and_template_files_are_read_by_their_ending():
    assert labels_from(["a\r", " b ", ""], "x.txt") == (["a", "b"], None)
    with pytest.raises(UsageError, match="got tabs"):
        labels_from(["n01\ttench"], "x.txt")
    assert templates_from(['{"imagenet1k": ["a {c}.", "{}"]}'], "t.json") == ["a {c}.", "{}"]
    assert prompts_of(["cat"], ["a {c}.", "{}"]) == [["a cat.", "cat"]]
    with pytest.raises(UsageError, match="expected one list, got a, b"):
        templates_from(['{"a": [], "b": []}'], "t.json")
    with pytest.raises(UsageError, match="expected a list of texts"):
        templates_from(["[1]"], "t.json")


def test_labels_that_are_one_text_to_the_model_are_said(models):
    checkpoint = load_folder(models / "clip")  # its tokenizer makes lower case
    with pytest.warns(UserWarning, match=r"labels 'Cat' and 'cat' tokenize alike \(1 more pairs\)"):
        ZeroShotClassifier(checkpoint, ["Cat", "dog", "cat", "CAT"])
    ZeroShotClassifier(checkpoint, ["cat", "cats"])


def test_a_label_of_which_the_rules_of_the_model_leave_nothing_is_refused(models, monkeypatch):
    checkpoint = load_folder(models / "clip")
    encode = checkpoint.tokenizer.encode
    monkeypatch.setattr(checkpoint.tokenizer, "encode", lambda text: encode(text.strip("!")))
    with pytest.raises(TextError, match="prompt '!!' has no tokens"):
        ZeroShotClassifier(checkpoint, ["cat", "!!"], "none")


def test_control_tokens_in_labels_stay_text():
    """open_clip ends the text there, so that `cat <end_of_text> dog` is a cat."""
    tokenizer = CLIPTokenizer()
    batch = tokenizer.batch(["cat <end_of_text> dog", "<start_of_text>cat"])
    assert [(row == tokenizer.eos_id).sum().item() for row in batch.ids] == [1, 1]
    assert [(row == tokenizer.bos_id).sum().item() for row in batch.ids] == [1, 1]
    assert tokenizer.encode("dog")[0] in batch.ids[0].tolist()


def test_a_cut_label_is_named_once_among_many(models):
    checkpoint = load_folder(models / "clip")
    labels = ["cat", "word " * 300, "dog", "word " * 301]
    with pytest.warns(TextCut) as told:
        ZeroShotClassifier(checkpoint, labels, ["{}", "a {}"])
    (message,) = [str(w.message) for w in told]
    assert re.fullmatch(
        r"label 'word .+: 2 of its 2 prompts are cut to 40 tokens, \d+ lost \(and those of 1 more labels\)", message
    )


def test_ten_thousand_labels_are_quick(models):
    checkpoint = load_folder(models / "clip")
    labels = [f"{i}" for i in range(10_000)]
    start = time.process_time()
    classifier = ZeroShotClassifier(checkpoint, labels, "none")
    result = classifier.results_of(["a"] * 8, torch.rand(8, 3, 32, 32), 5)
    assert time.process_time() - start < 10  # 1 s, most of it the texts; comparing each with each takes minutes
    assert len(result[0]["scores"]) == 5


def test_the_library_does_what_the_command_does(models, folder):
    files = sorted(str(path) for path in folder.rglob("*.png"))
    plain = multimodal.classify(files, ["red", "blue"], models / "clip", batch_size=3)
    classifier = ZeroShotClassifier(load_folder(models / "clip"), ["red", "blue"])
    again = multimodal.classify(files, classifier=classifier, threshold=0.9, top=1)
    for a, b in zip(plain, again, strict=True):
        assert a["scores"][0]["score"] == pytest.approx(b["scores"][0]["score"], abs=1e-5)
        assert b["answer"] == (b["scores"][0]["label"] if b["scores"][0]["score"] >= 0.9 else None)
    with pytest.raises(UsageError, match="either labels or a classifier"):
        multimodal.classify(files, model=models / "clip")
    with pytest.raises(UsageError, match="not allowed with a classifier"):
        multimodal.classify(files, ["a"], classifier=classifier)


def test_scores_that_are_not_finite_are_refused(models):
    classifier = ZeroShotClassifier(load_folder(models / "clip"), ["red", "blue"])
    with pytest.raises(CheckpointError, match=r"the scores of b\.png are not finite"):
        classifier.results_of(
            ["a.png", "b.png"], torch.stack([torch.zeros(3, 32, 32), torch.full((3, 32, 32), torch.nan)])
        )
