"""The shipped models on real input, as the README's first command uses them."""

import json
import re
import wave
from pathlib import Path

import matplotlib.cbook
import numpy as np
import pytest
from PIL import Image, ImageOps

import multimodal
from multimodal.cli.main import main
from multimodal.system.assets import DEFAULT_MODELS, asset, shipped
from multimodal.weights.hub.registry import DEMONSTRATIONS
from tests.helpers.paths import ROOT
from tests.helpers.spread import thin

LABELS = ["goldfish", "school bus", "teapot", "military uniform", "lighthouse", "banana", "suspension bridge"]


@pytest.fixture(scope="module")
def photograph() -> Path:
    return Path(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))


def test_a_photograph_is_classified_and_a_phone_s_turned_copy_alike(photograph, tmp_path):
    with Image.open(photograph) as image:
        exif = Image.Exif()
        exif[0x0112] = 6  # stored on its side: a viewer turns it clockwise
        image.rotate(90, expand=True).save(tmp_path / "turned.jpg", exif=exif, quality=95)
        assert ImageOps.exif_transpose(Image.open(tmp_path / "turned.jpg")).size == image.size
    results = multimodal.classify([photograph, tmp_path / "turned.jpg"], LABELS)
    upright, turned = ({s["label"]: s["score"] for s in r["scores"]} for r in results)
    assert results[0]["scores"][0]["label"] == "military uniform"
    assert all(abs(upright[label] - turned[label]) < 0.02 for label in LABELS)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("beam_size", [None, 4])
def test_the_sample_recording_is_transcribed_word_for_word(beam_size):
    result = multimodal.transcribe(asset("sample", "speech.flac"), beam_size=beam_size)
    assert result["text"] == asset("sample", "speech.txt").read_text().strip()
    assert result["language"] == "en"
    assert 0 <= result["segments"][0]["start"] < result["segments"][-1]["end"] <= 7.2


@pytest.mark.ci
@pytest.mark.parametrize("lm", ["asr-lm-en", "None", "absent", "gpt-mini"])
def test_the_command_takes_the_recognizer_s_language_model_by_name_or_none(capsys, lm):
    with pytest.raises(SystemExit) as stop:
        main(["transcribe", str(asset("sample", "speech.flac")), "-o", "-", "--format", "txt", "--lm", lm])
    out, err = capsys.readouterr()
    if lm in ("asr-lm-en", "None"):
        assert " ".join(out.split()) == asset("sample", "speech.txt").read_text().strip()
    else:
        wrong = {"absent": "--lm absent: does not exist", "gpt-mini": "expected the recognizer's 320 tokens"}[lm]
        assert (stop.value.code, out) == (1, "")
        assert wrong in err


def test_the_german_sample_is_written_translated_and_its_language_found():
    sample, model = asset("sample", "german.flac"), multimodal.load("whisper-mini")
    result = multimodal.transcribe(sample, model)
    assert result["text"].strip() == asset("sample", "german.txt").read_text().strip()
    assert result["language"] == "de"
    assert abs(result["segments"][-1]["end"] - 2.4) < 0.2
    english = multimodal.transcribe(sample, model, task="translate")["text"].lower()
    assert "two children" in english
    assert "ball" in english


# of each task, the command without --model, and what its answer must match
COMMANDS = {
    "caption": (["caption", "PHOTO"], r"\b(man|woman|person|people|boy|girl)\b"),
    "generate": (["generate", "A man in a", "--max_new_tokens", "8"], r"\b(shirt|hat|jacket|suit)\b"),
    "fill-mask": (
        ["fill-mask", "A man is riding a [MASK]."],
        r"riding a (bike|motorcycle|bicycle|horse)\.\n  0\.\d+  \w",
    ),
    "translate": (["translate", "A dog runs on the beach.", "--from", "en", "--to", "de"], r"Hund .*Strand"),
    "ask": (["ask", str(asset("sample", "speech.flac")), "Which language is spoken?"], r"^English$"),
    "embed": (["embed", "A dog runs on the beach."], r'"vector": \[-?0\.\d+, '),
}


@pytest.mark.parametrize("task", COMMANDS)
def test_a_command_answers_without_a_model_and_says_which_one_it_was(capsys, photograph, task):
    arguments, expected = COMMANDS[task]
    with pytest.raises(SystemExit) as stop:
        main([str(photograph) if one == "PHOTO" else one for one in arguments])
    out, err = capsys.readouterr()
    assert (stop.value.code or 0, err.count("\n")) == (0, 1), err
    assert f"{DEFAULT_MODELS[task]}: demonstration model, " in err
    assert re.search(expected, out), out


def test_noise_is_no_speech(tmp_path):
    noise = 0.1 * np.random.default_rng(0).standard_normal(5 * 16000)
    with wave.open(str(tmp_path / "noise.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((noise * 32767).clip(-32768, 32767).astype("<i2").tobytes())
    assert multimodal.transcribe(tmp_path / "noise.wav", "whisper-mini")["text"] == ""


def test_cards_say_licence_data_figures_and_command_and_the_models_are_small():
    folders = shipped()
    of_tasks = set(filter(None, DEFAULT_MODELS.values()))
    assert set(folders) == of_tasks | {"asr-lm-en"} == set(DEMONSTRATIONS)  # the language model of asr-conformer-en
    assert sum(file.stat().st_size for file in (ROOT / "assets").rglob("*") if file.is_file()) < 28e6
    for folder in folders.values():
        card = json.loads((folder / "card.json").read_text())
        assert card.keys() >= {"licence", "training_data", "figures", "command", "limits"}
        (script,) = set(re.findall(r"recipes/\w+/train_\w+\.py", card["command"]))
        assert (ROOT / script).is_file()
