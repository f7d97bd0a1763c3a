"""Classifiers: files, labels, prompts, and the library call."""

import json
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import multimodal
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.prompts import labels_from, prompts_of, templates_from
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.weights.folder import load_folder, save_folder
from tests.helpers.commands import one_line, run

LABELS = ["--labels", "red", "blue", "dog"]


def saved(capsys, models, path: Path, *flags: object) -> Path:
    words = ("classify", *LABELS, "-m", models / "clip", "--save_classifier", path, "--quiet", *flags)
    assert run(capsys, *words) == (0, "", "")
    return path


@pytest.mark.ci
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


@pytest.mark.ci
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


def test_a_cut_label_is_named_once_among_many(models, monkeypatch):
    checkpoint = load_folder(models / "clip")
    labels = ["cat", "word " * 300, "dog", "word " * 301]
    lists, encode = [], checkpoint.tokenizer.encode
    monkeypatch.setattr(checkpoint.tokenizer, "encode", lambda text: lists.append(warnings.filters) or encode(text))
    with pytest.warns(TextCut) as told:
        ZeroShotClassifier(checkpoint, labels, ["{}", "a {}"])
    assert len(lists) > 8
    assert all(one is lists[0] for one in lists)  # other threads warn meanwhile
    (message,) = [str(w.message) for w in told]
    assert re.fullmatch(
        r"label 'word .+: 2 of its 2 prompts are cut to 40 tokens, \d+ lost \(and those of 1 more labels\)", message
    )


@pytest.mark.ci
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
    again = classifier.using(threshold=0.9).results(files, 1)
    for a, b in zip(plain, again, strict=True):
        assert a["scores"][0]["score"] == pytest.approx(b["scores"][0]["score"], abs=1e-5)
        assert b["answer"] == (b["scores"][0]["label"] if b["scores"][0]["score"] >= 0.9 else None)
    with pytest.raises(UsageError, match="either labels or a classifier"):
        multimodal.classify(files, model=models / "clip")
    with pytest.raises(UsageError, match="not allowed with a classifier"):
        multimodal.classify(files, model=models / "clip", classifier="a.safetensors", templates=["{}"])


def test_scores_that_are_not_finite_are_refused(models):
    classifier = ZeroShotClassifier(load_folder(models / "clip"), ["red", "blue"])
    with pytest.raises(CheckpointError, match=r"the scores of b\.png are not finite"):
        classifier.results_of(
            ["a.png", "b.png"], torch.stack([torch.zeros(3, 32, 32), torch.full((3, 32, 32), torch.nan)])
        )
