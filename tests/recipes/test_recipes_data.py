"""Recipes and their data: they train on every layout that `multimodal validate` passes, resume on no other classes or
tokens, and say what a disk or a text cannot hold."""

import io
import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from multimodal.data.sources import open_source
from multimodal.data.spoken import SpokenText, write_speech
from multimodal.data.validate import validate
from multimodal.models.vit import ViT
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers import tiny
from tests.helpers.data.sets import COLOURS, squares, tar, wav
from tests.helpers.folders import every_kind, files_of_at_most
from tests.helpers.paths import ROOT

SHORT = ["--steps", "1", "--threads", "1", "--log_every", "1"]
TINY = ["--width", "32", "--layers", "1", "--heads", "2"]
VIT = ["--image", "16", *TINY, "--batch", "4", "--count", "4", "--randaugment", ""]
CLIP = ["--image", "16", "--patch", "8", "--width", "64", "--layers", "1", "--text_layers", "1", "--vocabulary", "300",
        "--batch", "4"]  # fmt: skip
CAPTIONER = [*TINY, "--encoder_layers", "1", "--batch", "4", "--vocabulary", "300", "--val", "DATA"]
PIXELS = ["--side", "4", "--colours", "4", *TINY, "--batch", "4", "--probe_c", "1", "--sheet", "1"]
ASR = ["--width", "32", "--layers", "1", "--decoder_layers", "1", "--vocabulary", "270", "--budget", "400"]
WHISPER = [*TINY, "--words", "1", "--vocabulary", "280", "--window", "200", "--budget", "400", "--epoch", "4"]
CLIP_16 = ["--model", "clip-vit-16", "--batch", "4"]
LOOP = ["--precision", "float32", "--threads", "1", "--steps"]
IMAGES = [*("--image", "16", "--width", "16", "--layers", "1", "--heads", "1"), *LOOP]
LM = [*("--width", "16", "--layers", "1", "--heads", "1", "--context", "16", "--tokenizer", "bpe"), *LOOP]
RECIPES = {
    "vit": ("train_vit", "image", ["--data", "DATA", "--val", "DATA", *VIT]),
    "clip": ("train_clip", "image", ["--data", "DATA", "--val", "DATA", *CLIP]),
    "captioner": ("train_captioner", "image", ["--data", "DATA", *CAPTIONER]),
    "pixels": ("train_igpt", "image", ["--data", "DATA", *PIXELS]),
    "classify": ("finetune", "image", ["--data", "DATA", "--task", "classify", *CLIP_16]),
    "match": ("finetune", "image", ["--data", "DATA", "--val", "DATA", *CLIP_16]),
    "asr": ("train_asr", "audio", ["--train", "DATA", "--valid", "DATA", *ASR]),
    "whisper": ("train_whisper", "audio", ["--train", "DATA", "--valid", "DATA", "--language", "en", *WHISPER]),
    "recognize": ("finetune", "audio", ["--model", "asr-conformer-en", "--data", "DATA", "--val", "DATA"]),
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
    pytest.param(name, layout, marks=pytest.mark.ci if (name, layout) in QUICK else pytest.mark.slow)
    for name in RECIPES
    for layout in LAYOUTS
]


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


@pytest.fixture
def outputs(tmp_path) -> list[str]:
    return ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]


def renamed(folder) -> None:
    old = min(folder.iterdir())
    old.rename(folder / "zebra")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["train_vit", "finetune"])
def test_a_renamed_class_is_refused(load_recipe, tmp_path, outputs, last_line, name):
    data = squares(tmp_path / "data")
    first, second = sorted(path.name for path in data.iterdir())[:2]
    own = (
        IMAGES if name == "train_vit" else ["--task", "classify", "--model", str(every_kind(tmp_path) / "clip"), *LOOP]
    )
    flags = [*outputs, "--data", str(data), "--batch", "8", *own]
    recipe = load_recipe(name)
    start(recipe.main, [*flags, "1"])
    renamed(data)
    line = last_line(lambda: start(recipe.main, [*flags, "2", "--resume"]))
    assert f"state-000000001: does not fit this run: classes were {first}, {second}, " in line
    assert f", now {second}, " in line


@pytest.mark.ci
def test_a_renamed_class_of_texts_is_refused(load_recipe, tmp_path, outputs, last_line):
    recipe, data = load_recipe("finetune_text"), tmp_path / "rows.tsv"
    flags = [*outputs, *("--model", str(every_kind(tmp_path) / "encoder"), "--data", str(data), "--val", str(data))]
    data.write_text("the dog\tdry\nthe sea\twet\n" * 8)
    start(recipe.main, [*flags, *LOOP, "1"])
    data.write_text(data.read_text().replace("dry", "zoo"))
    line = last_line(lambda: start(recipe.main, [*flags, *LOOP, "2", "--resume"]))
    assert "does not fit this run: classes were dry, wet, now wet, zoo" in line


@pytest.mark.ci
def test_a_renamed_class_of_a_table_is_refused(load_recipe, tmp_path, outputs, last_line):
    recipe, data = load_recipe("finetune_table"), tmp_path / "table.csv"
    data.write_text("x,y\n" + "".join(f"{i % 7},{'low' if i % 7 < 3 else 'high'}\n" for i in range(60)))
    flags = [*outputs, "--data", str(data), "--target", "y", "--trees", "0", "--batch", "8", *LOOP]
    start(recipe.main, [*flags, "1"])
    data.write_text(data.read_text().replace("high", "over"))
    line = last_line(lambda: start(recipe.main, [*flags, "2", "--resume"]))
    assert "does not fit this run: classes were high, low, now low, over" in line


@pytest.mark.ci
def test_a_tokenizer_learned_again_is_refused(load_recipe, tmp_path, outputs, last_line):
    recipe, data = load_recipe("train_lm"), tmp_path / "text.txt"
    data.write_text("the cat sat on the mat\n" * 40)
    flags = [*outputs, "--data", str(data), "--vocabulary", "262", *LM]
    start(recipe.main, [*flags, "1"])
    data.write_text(data.read_text() + "dogs and dogs and dogs\n" * 400)
    line = last_line(lambda: start(recipe.main, [*flags, "2", "--resume"]))
    assert "does not fit this run: tokenizer files" in line


@pytest.mark.parametrize("name", ["annotate_text", "silero_vad"])
def test_a_script_without_settings_has_help_too(monkeypatch, capsys, name):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "recipes" / "data" / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0
    assert f"python recipes/data/{name}.py" in capsys.readouterr().out


def test_a_full_disk_at_the_end_is_one_line(load_recipe, tmp_path, last_line):
    recipe, model = load_recipe("average"), every_kind(tmp_path) / "lm"
    with files_of_at_most(1000):
        line = last_line(lambda: start(recipe.main, ["--models", *[str(model)] * 2, "--out", str(tmp_path / "out")]))
    assert line == f"average.py: error: {tmp_path / 'out'}: the checkpoint cannot be saved: File too large"


@pytest.mark.parametrize(("change", "line"), [
    (lambda c: {"card": {"labels": ["b", "a"]}}, "differs from {}/a: classes were a, b, now b, a"),
    (lambda c: {"card": {}}, "differs from {}/a: classes were a, b, now none"),
    (lambda c: {"preprocessing": replace(c.preprocessing, crop=0.9)}, "its preprocessing differs from that of {}/a"),
])  # fmt: skip
def test_models_that_mean_different_things_are_not_averaged(load_recipe, tmp_path, capsys, change, line):
    record = Preprocessing((8, 12), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    first = Checkpoint(ViT(replace(tiny.VIT, classes=2)), preprocessing=record, card={"labels": ["a", "b"]})
    for name, one in (("a", first), ("b", first), ("c", replace(first, **change(first)))):
        save_folder(one, tmp_path / name)
    average = lambda other: start(
        load_recipe("average").main,
        ["--models", f"{tmp_path}/a", f"{tmp_path}/{other}", "--out", f"{tmp_path}/{other}-out"],
    )
    average("b")
    with pytest.raises(SystemExit):
        average("c")
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"--models {tmp_path}/c: {line.format(tmp_path)}")


@pytest.mark.parametrize("weight", ["nan", "inf", "-1"])
def test_shares_of_an_average_are_finite(load_recipe, tmp_path, capsys, weight):
    with pytest.raises(SystemExit) as end:
        start(load_recipe("average").main, ["--models", "a", "b", "--out", "c", "--weights", "1", weight])
    assert end.value.code == 2
    assert "--weights expected 2 numbers of 0 or more, not all 0 (got 1.0 " in capsys.readouterr().err


def unigrams(path: Path) -> dict[str, float]:
    rows = path.read_text().partition("\\1-grams:\n")[2].partition("\n\n")[0].splitlines()
    return {row.split("\t")[1]: 10 ** float(row.split("\t")[0]) for row in rows}


def test_unknown_words_of_a_text_count_and_the_unigrams_sum_to_1(load_recipe, tmp_path):
    recipe, made = load_recipe("train_ngram"), {}
    for name, word in (("known", "mat"), ("unknown", "<unk>")):
        (text := tmp_path / f"{name}.txt").write_text(f"a cat sat on the {word}\nthe {word} sat\n" * 3)
        start(recipe.main, [str(tmp_path / f"{name}.arpa"), "--texts", str(text), "--order", "2"])
        made[name] = unigrams(tmp_path / f"{name}.arpa")
        assert math.fsum(made[name].values()) == pytest.approx(1, abs=1e-5)
    assert made["unknown"]["<unk>"] > made["known"]["<unk>"]


@pytest.mark.parametrize("word", ["<s>", "</s>"])
def test_the_ends_of_a_text_are_no_words(load_recipe, tmp_path, last_line, word):
    recipe = load_recipe("train_ngram")
    (text := tmp_path / "text.txt").write_text(f"a cat\n\na {word} cat\n")
    line = last_line(lambda: start(recipe.main, [str(tmp_path / "lm.arpa"), "--texts", str(text)]))
    problem = f"{text}: line 3: expected words, got {word}, which marks a text's ends"
    assert line == f"train_ngram.py: error: {problem}"
    start(recipe.main, [str(tmp_path / "lm.arpa"), "--texts", str(text), "--plain"])  # spelled as the word s


APART = "one\u2028dog\n\ntwo\x85cats\x0c\n"  # no ends of lines but three


def test_lines_end_at_newlines_alone(load_recipe, tmp_path):
    for name, text in (("en", APART), ("de", "ein Hund\n\nzwei Katzen\n"), ("fr", "un\ndeux\n")):
        (tmp_path / name).write_text(text)
    en, de = (tmp_path / name for name in ("en", "de"))
    pairs = [("one dog", "ein Hund"), ("two cats", "zwei Katzen")]
    asked = load_recipe("ask_speech")
    assert asked.translations(asked.SpeechQuestions(Path("q"), ("d",), en, de)) == dict(pairs)
    mining = load_recipe("mine_pairs")
    lines = mining.read(mining.MiningRun((f"en={en}", f"de={de}"), Path("m"), aligned=True))
    assert sorted(lines["en"].numbers) == sorted(lines["de"].numbers) == [0, 2]
    speaking = load_recipe("speak_languages")
    named = speaking.SpeechOfLanguage(tmp_path / "m.jsonl", "de", de, en, 9)
    spoken = {(one.text, one.facts["translation"]) for one in speaking.plan(named, *speaking.read(named))}
    assert spoken == {(de, en) for en, de in pairs}


def test_translations_of_other_numbers_of_lines_are_neither_spoken_nor_aligned(load_recipe, tmp_path, last_line):
    (tmp_path / "de").write_text("ein Hund\nzwei Hunde\n")
    (tmp_path / "en").write_text("one dog\n")
    args = [str(tmp_path / "m.jsonl"), "--language", "de", "--texts", str(tmp_path / "de"), "--count", "9"]
    line = last_line(lambda: start(load_recipe("speak_languages").main, [*args, "--english", str(tmp_path / "en")]))
    wrong = f"en: expected 2 lines as in {tmp_path}/de (got 1)"
    assert line.endswith(wrong)
    assert not (tmp_path / "m.jsonl").exists()
    args = ["--texts", f"de={tmp_path}/de", f"en={tmp_path}/en", "--out", str(tmp_path / "m"), "--aligned"]
    assert last_line(lambda: start(load_recipe("mine_pairs").main, args)).endswith(wrong)


@pytest.mark.parametrize(("text", "share", "line"), [
    ("two words\n", "1", "has no sentence of 3 to 18 words in ASCII without digits"),
    ("a dog runs\n", "0", "expected a share above 0 here or in --spelled"),
    ("a dog runs\n", "x", "expected FILE=SHARE"),
])  # fmt: skip
def test_what_cannot_be_spoken_is_one_line(load_recipe, tmp_path, last_line, text, share, line):
    (tmp_path / "t.txt").write_text(text)
    args = [str(tmp_path / "m.jsonl"), "--texts", f"{tmp_path}/t.txt={share}", "--count", "2"]
    assert line in last_line(lambda: start(load_recipe("speak").main, args))
    assert not (tmp_path / "m.jsonl").exists()


def test_a_stop_leaves_no_manifest_of_the_recordings_before(tmp_path):
    """The recordings have the same names, so its texts would be wrong."""
    (tmp_path / "a.wav").write_bytes(wav(0.1))
    one = SpokenText("one", "one", "voice", ["cp", str(tmp_path / "a.wav"), "{wav}"])
    write_speech(tmp_path / "m.jsonl", iter([one]))
    assert len(open_source(tmp_path / "m.jsonl")) == 1
    with pytest.raises(KeyboardInterrupt):
        write_speech(tmp_path / "m.jsonl", (exec("raise KeyboardInterrupt") for _ in range(1)))
    assert not (tmp_path / "m.jsonl").exists()
