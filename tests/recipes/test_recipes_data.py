"""Recipes train on every layout of data that `multimodal validate` passes."""

import io
from pathlib import Path

import pytest
from PIL import Image

from multimodal.data.sources import open_source
from multimodal.data.validate import validate
from multimodal.train.recipe_cli import start
from tests.helpers.data.sets import COLOURS, tar, wav

SHORT = ["--steps", "1", "--threads", "1", "--log_every", "1"]
TINY = ["--width", "32", "--layers", "1", "--heads", "2"]
VIT = ["--image", "16", *TINY, "--batch", "4", "--count", "4", "--randaugment", ""]
CLIP = ["--image", "16", "--patch", "8", "--width", "64", "--layers", "1", "--text_layers", "1", "--vocabulary", "300",
        "--batch", "4"]  # fmt: skip
CAPTIONER = [*TINY, "--batch", "4", "--vocabulary", "300", "--val", "DATA"]
PIXELS = ["--side", "4", "--colours", "4", *TINY, "--batch", "4", "--probe_c", "1", "--sheet", "1"]
ASR = ["--width", "32", "--layers", "1", "--decoder_layers", "1", "--vocabulary", "270", "--budget", "400"]
WHISPER = [*TINY, "--words", "1", "--vocabulary", "280", "--window", "200", "--budget", "400", "--epoch", "4"]
CLIP_16 = ["--model", "clip-vit-16", "--batch", "4"]
RECIPES = {
    "vit": ("train_vit", "image", ["--data", "DATA", "--val", "DATA", *VIT]),
    "clip": ("train_clip", "image", ["--data", "DATA", "--val", "DATA", *CLIP]),
    "captioner": ("train_captioner", "image", ["--data", "DATA", *CAPTIONER]),
    "pixels": ("train_igpt", "image", ["--data", "DATA", *PIXELS]),
    "classify": ("finetune", "image", ["--data", "DATA", "--task", "classify", *CLIP_16]),
    "match": ("finetune", "image", ["--data", "DATA", "--val", "DATA", *CLIP_16]),
    "asr": ("train_asr", "audio", ["--train", "DATA", "--valid", "DATA", *ASR]),
    "whisper": ("train_whisper", "audio", ["--train", "DATA", "--valid", "DATA", "--language", "en", *WHISPER]),
    "recognise": ("finetune", "audio", ["--model", "asr-conformer-en", "--data", "DATA", "--val", "DATA"]),
    "transcribe": ("finetune", "audio", ["--model", "whisper-mini", "--data", "DATA"]),
}  # fmt: skip


def items(kind: str) -> list[tuple[str, bytes, str, str]]:
    """Name, contents, label and text of each file."""
    if kind == "audio":
        return [(f"a tone {n}.wav", wav(0.5 + n / 10), "tone", "one two") for n in range(4)]
    rows = []
    for name, colour in COLOURS.items():
        for number in range(6):
            file = io.BytesIO()
            Image.new("RGB", (24 + number, 20), colour).save(file, "PNG")
            rows.append((f"{name} {number}.png", file.getvalue(), name, f"a {name} wall"))
    return rows


def dataset(folder: Path, kind: str, layout: str) -> Path:
    """Write a list whose columns are none of the first names, with a byte order mark and CRLF, or a tar."""
    if layout == "tar":
        parts = [(Path(name), data, label, text) for name, data, label, text in items(kind)]
        members = [((str(name), data), (f"{name.stem}.cls", label.encode()), (f"{name.stem}.txt", text.encode()))
                   for name, data, label, text in parts]  # fmt: skip
        return tar(folder / "data.tar", [member for group in members for member in group])
    rows = ["image,number,class,transcription" if kind == "image" else "file,number,class,transcription"]
    for number, (name, data, label, text) in enumerate(items(kind)):
        (folder / name).write_bytes(data)
        rows.append(f'{name},{number},{label},"{text}"')
    (folder / "däta.csv").write_bytes(("\ufeff" + "\r\n".join(rows) + "\r\n").encode())
    return folder / "däta.csv"


LAYOUTS = ("csv", "tar")
# the recipes share their readers of images and audio
QUICK = {("vit", "csv"), ("match", "tar"), ("captioner", "csv"), ("asr", "tar"), ("whisper", "csv")}
CASES = [
    pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow)
    for name in RECIPES
    for layout in LAYOUTS
]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_what_validate_passes_trains(name, layout, tmp_path, load_recipe):
    recipe, kind, flags = RECIPES[name]
    data = dataset(tmp_path, kind, layout)
    report = validate(open_source(str(data)), kind)
    assert (report.broken, report.texts) == (0, report.items)
    own = [str(data) if flag == "DATA" else flag for flag in flags]
    start(load_recipe(recipe).main, [*own, *SHORT, "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "manifest.json").is_file()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_validate_passes_makes_ngrams(layout, tmp_path, load_recipe):
    data = dataset(tmp_path, "audio", layout)
    start(load_recipe("train_ngram").main, [str(tmp_path / "lm.arpa"), "--order", "2", "--texts", str(data)])
    assert "one two" in (tmp_path / "lm.arpa").read_text()
