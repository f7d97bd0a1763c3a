"""The command line as a person uses it: outputs, exit codes, one-line errors."""

import csv
import io
import json
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conv import ConformerConfig
from multimodal.blocks.stack import transformer
from multimodal.cli import main
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.seq2seq import JointConformer, JointConformerConfig
from multimodal.models.speech import ConformerEncoderConfig
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.tokens.image import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text import BytePairTokenizer
from multimodal.weights.folder import Checkpoint, save_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random `clip` and `asr`."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tokenizer = BytePairTokenizer.train(["a photo of a red square", "a photo of a blue square"], 270, lowercase=True)
    image = ViTConfig((32, 32), 16, transformer(32, 2, 4, 64), "token", True)
    text = TextConfig(tokenizer.vocab_size, 40, transformer(32, 2, 4, 64), True)
    clip = CLIP(CLIPConfig(image, text, 16, "softmax", "eos", tokenizer.eos_id))
    record = Preprocessing((32, 32), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    card = {"licence": "MIT", "training_data": ["none"], "templates": ["a photo of a {}"]}
    save_folder(Checkpoint(clip, tokenizer, record, card=card), folder / "clip")
    block = ConformerConfig(AttentionConfig(32, 4), 64, 7)
    encoder = ConformerEncoderConfig(80, block, 1, 4, 8, rotary=True)
    asr = JointConformer(JointConformerConfig(encoder, tokenizer.vocab_size, None))
    save_folder(Checkpoint(asr, tokenizer, card={"licence": "MIT"}), folder / "asr")
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (50, 40), "red").save(folder / "red.png")
    Image.new("RGB", (40, 50), "blue").save(folder / "blue.jpg")
    return folder


@pytest.fixture
def tone(tmp_path: Path) -> Path:
    path = tmp_path / "tone.wav"
    samples = (np.sin(np.arange(16000) * 0.2) * 8000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


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


def test_one_broken_picture_does_not_stop_the_others(capsys, models, pictures):
    (pictures / "broken.jpg").write_bytes(b"no picture")
    code, out, err = run(capsys, "classify", pictures, "missing.png", "--labels", "red,blue", "-m", models / "clip",
                         "--format", "json")  # fmt: skip
    assert code == 1
    assert len(json.loads(out)) == 2
    lines = err.splitlines()
    assert len(lines) == 2
    assert "missing.png" in lines[0]
    assert "broken.jpg" in lines[1]


@pytest.mark.parametrize(
    ("labels", "cause"),
    [(["red", " "], "empty"), (["red", "blue", "red"], "twice"), ([","], "empty"), (["red", " red"], "twice")],
)
def test_unusable_labels_are_refused(capsys, models, pictures, labels, cause):
    code, out, err = run(capsys, "classify", pictures, "--labels", *labels, "-m", models / "clip")
    assert (code, out) == (1, "")
    assert cause in one_line(err)


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


def test_unknown_model_lists_near_names_and_unknown_kind_is_refused(capsys, models, pictures):
    code, _, err = run(capsys, "classify", pictures, "--labels", "a,b", "-m", "clip-vit-17")
    assert code == 1
    assert "clip-vit-17" in one_line(err)
    assert "near: " in err
    code, _, err = run(capsys, "classify", pictures, "--labels", "a,b", "-m", models / "asr")
    assert code == 1
    assert "needs a clip" in one_line(err)


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


def test_transcribe_goes_on_after_a_broken_file(capsys, models, tone, tmp_path):
    broken = tmp_path / "broken.mp3"
    broken.write_bytes(b"")
    code, _, err = run(capsys, "transcribe", broken, tone, "-m", models / "asr", "-o", tmp_path / "out", "-f", "txt")
    assert code == 1
    assert "broken.mp3" in one_line(err)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tone.txt"]


def test_two_recordings_of_one_name_are_refused(capsys, models, tone, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tone.wav").write_bytes(tone.read_bytes())
    code, _, err = run(
        capsys, "transcribe", tone, tmp_path / "other" / "tone.wav", "-m", models / "asr", "-o", tmp_path
    )
    assert code == 1
    assert "tone.*" in one_line(err)


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


def test_an_output_folder_that_cannot_be_made_is_named(capsys, models, tone, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "transcribe", tone, "-m", models / "asr", "-o", tmp_path / "file" / "out")
    assert code == 1
    assert "file" in one_line(err)


def test_the_module_runs_and_help_is_quick():
    done = subprocess.run([sys.executable, "-m", "multimodal", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "classify" in done.stdout
    loaded = "import sys, multimodal.cli; multimodal.cli.parser(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout.strip() == "False"
    version = subprocess.run([sys.executable, "-m", "multimodal", "--version"], capture_output=True, text=True)
    assert version.stdout.startswith("multimodal ")


def test_a_text_with_a_control_name_stays_text(models):
    from multimodal import classify

    red = Image.new("RGB", (40, 40), "red")
    plain, typed = (classify(red, ["cat", name], models / "clip")[0]["scores"] for name in ("cat dog", "cat <eos> dog"))
    by_label = [{s["label"]: s["score"] for s in scores} for scores in (plain, typed)]
    assert by_label[0]["cat dog"] != by_label[1]["cat <eos> dog"]
