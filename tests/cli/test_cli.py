"""The command line as a person uses it: outputs, exit codes, one-line errors."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from multimodal.cli.main import main
from multimodal.cli.vision.classify import split_labels
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load
from tests.helpers.commands import one_line, run
from tests.helpers.spread import thin


def test_classify_json_lists_every_label_best_first(capsys, models, images):
    code, out, err = run(capsys, "classify", images, "--labels", "red", "blue", "dog", "-m", models / "clip",
                         "--format", "json")  # fmt: skip
    results = json.loads(out)
    assert code == 0
    assert err == ""
    assert [Path(r["file"]).name for r in results] == ["blue.jpg", "red.png"]
    for result in results:
        scores = [s["score"] for s in result["scores"]]
        assert {s["label"] for s in result["scores"]} == {"red", "blue", "dog"}
        assert scores == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1.0, abs=1e-5)


def test_classify_csv_and_top_and_comma_labels(capsys, models, images):
    code, out, _ = run(capsys, "classify", images / "red.png", "--labels", "red,blue,dog", "-m", models / "clip",
                       "--format", "csv", "--top", 2)  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len(rows) == 2
    assert rows[0].keys() == {"file", "label", "score"}


@pytest.mark.parametrize(
    ("values", "labels"),
    [(["a,b"], ["a", "b"]), (["a", "dog,", "a", "cat"], ["a dog", " a cat"]), (["a dog", "a, b"], ["a dog", "a, b"])],
)
def test_labels_that_the_shell_split_at_their_spaces_are_joined(values, labels):
    assert split_labels(values) == labels


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("command", ["classify no.jpg --labels a b", "caption no.jpg", "transcribe no.mp3"])
def test_a_missing_input_is_named_before_torch_is_imported(command):
    start = "import sys; from multimodal.cli.main import main\ntry: main(sys.argv[1:])\n"
    start += "finally: print('torch' in sys.modules)"
    call = [sys.executable, "-c", start, *command.split()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "False\n")
    assert "error: no." in done.stderr
    assert "no such file" in done.stderr


def test_labels_and_templates_from_files(capsys, models, images, tmp_path):
    (tmp_path / "labels.txt").write_text("red\nblue\n")
    (tmp_path / "templates.txt").write_text("a drawing of {}\n")
    common = ["classify", images, "--labels_file", tmp_path / "labels.txt", "-m", models / "clip", "--format", "json"]
    outs = [run(capsys, *common, "--templates", t) for t in (tmp_path / "templates.txt", "clip7", "none")]
    assert all(code == 0 for code, _, _ in outs)
    assert len({out for _, out, _ in outs}) == 3
    (tmp_path / "templates.txt").write_text("no place for the label\n")
    code, _, err = run(capsys, *common, "--templates", tmp_path / "templates.txt")
    assert code == 1
    assert "no place" in one_line(err)


def test_transcribe_writes_every_format_with_whispers_shape(capsys, models, tone, tmp_path):
    heard = load(models / "asr")
    heard.model.ctc.bias.data[heard.tokenizer.encode("a")[-1]] = 100.0  # untrained, it hears nothing
    save_folder(heard, tmp_path / "asr")
    given = ["-m", tmp_path / "asr", "--vad_filter", "False", "-o", tmp_path / "out"]
    code, _, err = run(capsys, "transcribe", tone, *given)
    assert (code, err) == (0, "")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"tone.{f}" for f in ("txt", "vtt", "srt", "tsv", "json")}
    result = json.loads((tmp_path / "out" / "tone.json").read_text())
    assert result.keys() >= {"text", "segments", "language"}
    (segment,) = result["segments"]
    assert (segment["id"], segment["text"].strip()) == (0, "a")
    assert 0 <= segment["start"] <= segment["end"] <= 1.0
    assert (tmp_path / "out" / "tone.vtt").read_text().startswith("WEBVTT\n\n")
    assert (tmp_path / "out" / "tone.tsv").read_text().startswith("start\tend\ttext\n")


@pytest.mark.ci
def test_info_models_env(capsys, models):
    code, out, _ = run(capsys, "info", models / "clip", "--format", "json")
    facts = json.loads(out)
    assert code == 0
    assert facts["licence"] == "MIT"
    assert facts["preprocessing"]["size"] == [32, 32]
    assert facts["parameters"]["total"] == sum(n for k, n in facts["parameters"].items() if k != "total")
    code, out, _ = run(capsys, "info", models / "clip")
    assert code == 0
    assert "licence: MIT" in out
    code, out, _ = run(capsys, "models")
    assert code == 0
    for name in ("clip-vit-16", "asr-conformer-en", "whisper"):
        assert name in out
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert f"torch {torch.__version__.split('+')[0]}" in out


HELP = """
import sys
before = set(sys.modules)
from multimodal.cli.main import COMMANDS, parser
top = parser()
assert all(help_line[:30] in " ".join(top.format_help().split()) for _, help_line in COMMANDS.values())
pending = [top]
while pending:
    p = pending.pop().load()
    p.format_help()
    for action in p._actions:
        pending += (action.choices or {}).values() if hasattr(action, "add_parser") else ()
print(len(COMMANDS), *(SLOW & sys.modules.keys() - before))
"""
SLOW = {
    "torch", "numpy", "PIL", "av", "tqdm",  # seconds
    "dataclasses", "inspect", "hashlib", "tempfile", "shutil", "importlib.metadata",  # 4 to 40 ms each, of 50
}  # fmt: skip


def test_help_of_no_command_imports_a_slow_library():
    script = HELP.replace("SLOW", repr(SLOW))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    count, *heavy = done.stdout.split()
    assert (int(count) > 10, heavy, done.stderr) == (True, [], "")


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "multimodal", "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "classify" in done.stdout
    version = subprocess.run(
        [sys.executable, "-m", "multimodal", "--version"], capture_output=True, text=True, timeout=300
    )
    assert version.stdout.startswith("multimodal ")


def test_a_text_with_a_control_name_stays_text(models):
    from multimodal import classify

    red = Image.new("RGB", (40, 40), "red")
    plain, typed = (classify(red, ["cat", name], models / "clip")[0]["scores"] for name in ("cat dog", "cat <eos> dog"))
    by_label = [{s["label"]: s["score"] for s in scores} for scores in (plain, typed)]
    assert by_label[0]["cat dog"] != by_label[1]["cat <eos> dog"]


@pytest.mark.parametrize(("more", "noted"), [([], True), (["--quiet"], False), (["--model", "clip-vit-16"], False)])
def test_a_demonstration_model_names_a_good_one(capsys, more, noted):
    with pytest.raises(SystemExit):
        main(["embed", "a dog", *more])
    line = "multimodal: sentence-mini: demonstration model, 1.6 M parameters; for real use: --model bge-small-en\n"
    assert capsys.readouterr().err == (line if noted else "")
