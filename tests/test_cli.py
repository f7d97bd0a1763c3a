"""The command line as a person uses it: outputs, exit codes, one-line errors."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import clip_and_asr, write_tone
from PIL import Image

from multimodal.cli.main import main


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random `clip` and `asr`."""
    return clip_and_asr(tmp_path_factory.mktemp("models"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (50, 40), "red").save(folder / "red.png")
    Image.new("RGB", (40, 50), "blue").save(folder / "blue.jpg")
    return folder


@pytest.fixture
def tone(tmp_path: Path) -> Path:
    return write_tone(tmp_path / "tone.wav")


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def one_line(err: str) -> str:
    assert err.startswith("multimodal: error: "), err
    assert err.count("\n") == 1, err
    return err


def test_classify_json_lists_every_label_best_first(capsys, models, pictures):
    code, out, err = run(capsys, "classify", pictures, "--labels", "red", "blue", "dog", "-m", models / "clip",
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


def test_classify_csv_and_top_and_comma_labels(capsys, models, pictures):
    code, out, _ = run(capsys, "classify", pictures / "red.png", "--labels", "red,blue,dog", "-m", models / "clip",
                       "--format", "csv", "--top", 2)  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len(rows) == 2
    assert rows[0].keys() == {"file", "label", "score"}


def test_labels_and_templates_from_files(capsys, models, pictures, tmp_path):
    (tmp_path / "labels.txt").write_text("red\nblue\n")
    (tmp_path / "templates.txt").write_text("a drawing of {}\n")
    common = ["classify", pictures, "--labels_file", tmp_path / "labels.txt", "-m", models / "clip", "--format", "json"]
    outs = [run(capsys, *common, "--templates", t) for t in (tmp_path / "templates.txt", "clip7", "none")]
    assert all(code == 0 for code, _, _ in outs)
    assert len({out for _, out, _ in outs}) == 3
    (tmp_path / "templates.txt").write_text("no place for the label\n")
    code, _, err = run(capsys, *common, "--templates", tmp_path / "templates.txt")
    assert code == 1
    assert "no place" in one_line(err)


def test_transcribe_writes_every_format_with_whispers_shape(capsys, models, tone, tmp_path):
    code, _, err = run(capsys, "transcribe", tone, "-m", models / "asr", "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"tone.{f}" for f in ("txt", "vtt", "srt", "tsv", "json")}
    result = json.loads((tmp_path / "out" / "tone.json").read_text())
    assert result.keys() >= {"text", "segments", "language"}
    for number, segment in enumerate(result["segments"]):
        assert segment["id"] == number
        assert 0 <= segment["start"] <= segment["end"] <= 1.0
    assert (tmp_path / "out" / "tone.vtt").read_text().startswith("WEBVTT\n\n")
    assert (tmp_path / "out" / "tone.tsv").read_text().startswith("start\tend\ttext\n")


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


def test_the_module_runs_and_help_is_quick():
    done = subprocess.run([sys.executable, "-m", "multimodal", "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "classify" in done.stdout
    loaded = "import sys, multimodal.cli.main; multimodal.cli.main.parser(); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=300).stdout.strip()
        == "False"
    )
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
