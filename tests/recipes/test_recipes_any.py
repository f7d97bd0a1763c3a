"""The any-to-text recipes: questions made of small sets, a model that learns them, and runs that resume."""

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import matplotlib.cbook
import pytest
import torch
from PIL import Image

import multimodal
from multimodal import Asker, load
from multimodal.blocks.stack import transformer
from multimodal.data.datasets.chats import media_of, open_chats, question, write_chats
from multimodal.data.remote.trust import Trust
from multimodal.errors import UsageError
from multimodal.models.vit import ViT, ViTConfig
from multimodal.tasks.ask.media import MediaEncoder
from multimodal.tasks.evaluate.text.answers import evaluate_answers
from multimodal.tokens.audio.arrays import Samples
from multimodal.tokens.audio.features import speech_features
from multimodal.tokens.chat.messages import MessagePart
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.video.options import VideoOptions
from multimodal.tokens.video.reading import frames, read_info
from multimodal.train.objectives.any_to_text_model import with_encoders
from multimodal.train.objectives.contrastive_model import with_image_size
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.spread import thin
from tests.helpers.tiny_run import assert_same_states

COLOURS = ("red", "blue", "lime")
RECORD = Preprocessing((32, 32), "squash", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Questions about plain images and in text alone, and an image encoder."""
    folder = tmp_path_factory.mktemp("any")
    rows = []
    for colour in COLOURS:
        for number in range(6):
            Image.new("RGB", (40 + number, 40), colour).save(folder / f"{colour}{number}.png")
            rows.append(question("Which colour?", [colour], "colours", image=f"{colour}{number}.png"))
    write_chats(folder / "colours.jsonl", rows)
    write_chats(folder / "texts.jsonl", [question(f"{n} + 1", [str(n + 1)], "sums", "bleu") for n in range(12)])
    torch.manual_seed(0)
    encoder = ViT(ViTConfig((32, 32), 16, transformer(32, 1, 4, 64), "mean", False)).eval()
    save_folder(Checkpoint(encoder, None, RECORD), folder / "encoder")
    return folder


def flags(data: Path, run: str, steps: int, *more: str, **changes) -> list[str]:
    values = {
        "init": None, "image": data / "encoder", "run": data / run, "out": data / f"{run}-out", "steps": steps,
        "hold": 0.2, "vocabulary": 280, "width": 32, "layers": 1, "heads": 2, "context": 64, "shuffle": 1,
        "smallest_crop": 1, "colour": 0, "rate": 1e-2, "warmup": 2, "average": 0.8, "evaluate_every": 40,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    values |= changes
    pairs = [part for n, value in values.items() if value is not None for part in (f"--{n}", str(value)) if part]
    return ["--data", f"{data}/colours.jsonl=9", f"{data}/texts.jsonl=3", *pairs, *more]


@pytest.mark.ci
def test_two_stages_learn_colours_that_need_the_image(load_recipe, data):
    recipe = load_recipe("train_any")
    start(recipe.main, flags(data, "text", 20, "--freeze", "image", "image_connector"))
    before = load(data / "text-out").model.decoder.state_dict()
    parts = ("--freeze", "image", "decoder", "--optimizer", "adamw")
    start(recipe.main, flags(data, "connect", 20, *parts, init=data / "text-out", image=None))
    after = load(data / "connect-out").model
    assert all(torch.equal(before[name], tensor) for name, tensor in after.decoder.state_dict().items())
    start(recipe.main, flags(data, "all", 120, "--freeze", "image", init=data / "connect-out", image=None))
    asker = Asker(data / "all-out", compute_type="float32", max_new_tokens=8)
    found = {without: evaluate_answers(open_chats(data / "colours.jsonl"), asker, without).figures()["colours"]
             for without in ((), ("image",))}  # fmt: skip
    assert found[()]["accuracy"] > 95
    assert found[("image",)]["accuracy"] == found[()]["constant"] == pytest.approx(100 / 3, abs=0.01)
    assert load(data / "all-out").card["ask"] == {"max_frames": 8}


@pytest.mark.ci
def test_a_resumed_run_equals_an_unbroken_one(load_recipe, data):
    recipe = load_recipe("train_any")
    for run, more, steps in (("whole", [], 6), ("part", [], 3), ("part", ["--resume"], 6)):
        start(recipe.main, flags(data, run, steps, *more, "--freeze", "image", schedule="wsd", warmup=0, dropout=0.1))
    assert_same_states(data / "whole", data / "part", 6)


@pytest.mark.ci
def test_frozen_encoders_of_shipped_models_are_shared(load_recipe, data, capsys):
    args = flags(data, "shared", 1, "--freeze", "image", "--share", image="clip-vit-16", shuffle=2)
    start(load_recipe("train_any").main, args)
    assert sum(file.stat().st_size for file in (data / "shared-out").iterdir()) < 200_000
    other = load("clip-vit-16")
    torch.nn.init.zeros_(other.model.image.embed.weight)
    save_folder(other, data / "other")
    args = flags(data, "swapped", 1, "--freeze", "image", init=data / "shared-out", image=data / "other")
    start(load_recipe("train_any").main, args)
    assert not load(data / "swapped-out").shared
    args = flags(data, "refused", 1, "--freeze", "image", "--share", image=data / "other")
    with pytest.raises(SystemExit):
        start(load_recipe("train_any").main, args)
    assert "must be a shipped model with --share" in capsys.readouterr().err
    assert not (data / "refused").exists()  # before any step
    assert not load(data / "swapped-out").model.image.embed.weight.any()
    again = flags(data, "again", 1, init=data / "shared-out", image=None)  # trained, the encoder is its own
    start(load_recipe("train_any").main, again)
    assert not load(data / "again-out").shared


@pytest.mark.ci
def test_a_text_model_is_validated_on_each_file_though_names_repeat(load_recipe, data):
    (data / "more").mkdir()
    write_chats(data / "more" / "texts.jsonl", [question(f"{n} + 2", [str(n + 2)], "sums", "bleu") for n in range(12)])
    given = flags(data, "names", 1, image=None)
    start(load_recipe("train_any").main, ["--data", f"{data}/texts.jsonl=3", f"{data}/more/texts.jsonl=3", *given[3:]])
    made = load(data / "names-out")
    assert made.model.image is made.model.audio is None
    first, second = (made.card["validation"][f"{name}/texts_loss"] for name in (data.name, "more"))
    assert first != second
    assert made.card["validation"]["loss"] == pytest.approx((first + second) / 2)


@pytest.mark.ci
def test_files_that_are_validated_with_are_not_trained(load_recipe, data):
    rows = [question(f"Is it {n}?", ["yes"], "sums", image=f"red{i}.png") for i in range(6) for n in range(3)]
    write_chats(data / "asked.jsonl", rows)
    write_chats(data / "said.jsonl", [question("What?", [one], "said", image=f"../{data.name}/{one}{i}.png")
                                      for one in COLOURS for i in range(6)])  # fmt: skip
    texts = open_chats(data / "texts.jsonl")
    names = ("asked", "said", "texts")
    recipe = load_recipe("train_any")
    run = recipe.AnyRun(tuple(f"{data}/{name}.jsonl=2" for name in names), data / "out", hold=0.2, trust=Trust(True))
    trained, held = ([[media_of(row) for row in part.rows()] for part in parts] for parts in recipe.parts_of(run))
    shown = [{file for part in parts for own in part for file in own} for parts in (trained, held)]
    assert not shown[0] & shown[1]
    assert [len(part) for part in held] == [4, 4, 2]
    assert len(trained[2]) == len(texts) - 2
    assert all(trained)


def test_an_audio_encoder_gets_features_of_its_own_kind():
    known = load("any-mini")
    known.model.config = replace(known.model.config, audio=replace(known.model.config.audio, features="normalized"))
    wave = torch.arange(16000).div(9).sin()
    part = MessagePart("audio", Samples(wave[None].numpy(), 16000))
    found = MediaEncoder(known, VideoOptions()).read(part, False)
    assert torch.equal(found.tensors, speech_features("normalized", [wave], 80)[0])


@pytest.mark.ci
def test_an_encoder_for_larger_images_keeps_the_size_that_the_connector_takes(tmp_path):
    clip, known = load("clip-vit-16"), load("any-mini")
    side = known.preprocessing.size[0] + 32
    record = replace(clip.preprocessing, size=(side, side))
    larger = replace(clip, model=with_image_size(clip.model, side), preprocessing=record)
    save_folder(replace(with_encoders(known, larger, None), shared=()), tmp_path / "made")
    made = load(tmp_path / "made")
    assert made.preprocessing.size == known.preprocessing.size
    pixels = torch.rand(2, 3, *known.preprocessing.size)
    expected, found = (one.model.image_states(pixels)[0] for one in (known, made))
    assert (found - expected).norm() < 0.2 * expected.norm()  # positions were interpolated twice


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data": "colours.jsonl"}, "colours.jsonl: expected FILE=COUNT"),
        ({"data": "none.jsonl=3"}, "none.jsonl: no such file"),
        ({"init": "any-mini"}, "any-mini: its image connector takes states of 6x6 patches of width 192, and /"),
        ({"init": "any-mini"}, "/encoder gives states of 6x6 patches of width 32"),
        ({"init": "clip-vit-16", "image": None}, "clip-vit-16: expected an any-to-text model with a chat format, got"),
        ({"share": ""}, "--share needs --freeze image"),
        ({"init": "any-mini", "image": None, "share": ""}, "--share needs --image or --audio"),
        ({"image": "bert-mini"}, "bert-mini: expected a model with an image encoder and its preprocessing"),
        ({"audio": "clip-vit-16"}, "clip-vit-16: expected a model with an audio encoder"),
        ({"augment_sound": ""}, "--augment_sound needs a Conformer on"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(load_recipe, data, last_line, changes, line):
    changes = dict(changes)
    file = changes.pop("data", None)
    given = flags(data, "bad", 2, **changes)
    if file is not None:
        given = ["--data", str(data / file), *given[3:]]
    assert line in last_line(lambda: start(load_recipe("train_any").main, given))


def test_questions_about_images_are_true_or_not(load_recipe, tmp_path):
    for name in ("cat", "ship"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), "red").save(tmp_path / "set" / name / f"{number}.png")
    lines = [{"id": "cat", "names": ["cat"], "hypernyms": ["animal"]}, {"id": "ship", "names": ["ship", "vessel"]}]
    (tmp_path / "names.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = [str(tmp_path / "q"), "--labelled", str(tmp_path / "set"), "--classes", str(tmp_path / "names.jsonl")]
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "texts.jsonl").write_text("")  # of another recipe
    start(load_recipe("ask_images").main, args)
    rows = [json.loads(line) for line in (tmp_path / "q" / "yes_no.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    for row in rows:
        image, text = row["messages"][0]["content"]
        shown = {"cat", "animal"} if "/cat/" in image["path"] else {"ship"}
        true = bool(shown & set(text["text"].rstrip("?").split()))
        assert row["answers"] == ["yes" if true else "no"]
    classes = [json.loads(line)["answers"] for line in (tmp_path / "q" / "classes.jsonl").read_text().splitlines()]
    assert ["a ship", "a vessel"] in classes


def test_images_of_tars_with_the_same_names_are_all_kept(load_recipe, tmp_path):
    for number, name in enumerate(("cat", "ship")):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as file:
            stored = io.BytesIO()
            Image.new("RGB", (8, 8), COLOURS[number]).save(stored, "png")
            for ending, data in (("png", stored.getvalue()), ("cls", name.encode())):
                member = tarfile.TarInfo(f"000000.{ending}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    (tmp_path / "names.jsonl").write_text("".join(f'{{"id": "{n}", "names": ["{n}"]}}\n' for n in ("cat", "ship")))
    args = [str(tmp_path / "q"), "--labelled", f"{tmp_path}/?.tar", "--classes", str(tmp_path / "names.jsonl")]
    start(load_recipe("ask_images").main, args)
    rows = [json.loads(line) for line in (tmp_path / "q" / "classes.jsonl").read_text().splitlines()]
    paths = {row["answers"][0]: tmp_path / "q" / row["messages"][0]["content"][0]["path"] for row in rows}
    shown = {answer: Image.open(path).convert("RGB").getpixel((0, 0)) for answer, path in paths.items()}
    assert shown == {"a cat": (255, 0, 0), "a ship": (0, 0, 255)}


def lines(file: Path, *rows: dict) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(("rows", "line"), [
    ([{"id": "cat", "names": ["cat"]}, {"id": "dog", "names": ["dog"]}],
     "0.png: expected a label that --classes names, got 'ship'"),
    ([{"id": name, "names": ["thing"]} for name in ("cat", "ship")],
     "--classes expected a class with a term that 'cat' lacks, got none"),
])  # fmt: skip
def test_classes_that_questions_cannot_be_made_of_are_named(load_recipe, tmp_path, last_line, rows, line):
    for name in ("cat", "ship"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), "red").save(tmp_path / "set" / name / "0.png")
    args = [str(tmp_path / "q"), "--labelled", str(tmp_path / "set"), "--classes", lines(tmp_path / "c.jsonl", *rows)]
    assert line in last_line(lambda: start(load_recipe("ask_images").main, args))
    assert not (tmp_path / "q").exists()


def test_images_without_captions_are_left_out(load_recipe, tmp_path, monkeypatch, last_line, caplog):
    monkeypatch.chdir(tmp_path)
    rows = [{"file_name": "a.png", "captions": ["A dog."]}, {"file_name": "a.png", "captions": []}, {"captions": ["b"]}]
    Image.new("RGB", (8, 8)).save("a.png")
    args = ["q", "--captioned", lines(Path("c.jsonl"), *rows)]
    start(load_recipe("ask_images").main, args)
    asked = [json.loads(line) for line in Path("q/captions.jsonl").read_text().splitlines()]
    assert [row["answers"] for row in asked] == [["A dog"]]
    assert "c.jsonl line 2" in caplog.text
    assert "c.jsonl line 3" in caplog.text
    lines(Path("c.jsonl"), *rows[1:])
    assert "c.jsonl: no image with a caption" in last_line(lambda: start(load_recipe("ask_images").main, args))


def test_speech_is_asked_about(load_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"audio_filepath": "a.wav", "text": "Hello!", **more} for more in (
        {"duration": ""}, {"duration": 13}, {"language": "en"}, {"language": "de", "duration": 2})]  # fmt: skip
    lines(tmp_path / "t.jsonl", *rows)
    start(load_recipe("ask_speech").main, ["q.jsonl", "--data", "t.jsonl"])
    asked = [json.loads(line) for line in Path("q.jsonl").read_text().splitlines()]
    assert [(row["task"], row["answers"]) for row in asked] == [
        (f"transcribe {tmp_path.name}", ["hello"]), ("transcribe synthetic English", ["hello"]),
        ("language of speech", ["English"]), ("language of speech", ["German"])]  # fmt: skip


@pytest.mark.parametrize(("row", "more", "line"), [
    ({"text": "a", "language": "es"}, [], "t.jsonl line 1: expected a language among en, de, fr, cs, got 'es'"),
    ({}, [], "t.jsonl line 1: expected a line of a manifest with its text"),
    ({"text": "a"}, ["--english", "en.txt", "--german", "de.txt"],
     "de.txt: expected 2 lines as in en.txt (got 1)"),
])  # fmt: skip
def test_speech_that_cannot_be_asked_about_is_named(load_recipe, tmp_path, monkeypatch, last_line, row, more, line):
    monkeypatch.chdir(tmp_path)
    Path("en.txt").write_text("a\nb\n")
    Path("de.txt").write_text("a\n")
    lines(tmp_path / "t.jsonl", {"audio_filepath": "a.wav", **row})
    assert line in last_line(lambda: start(load_recipe("ask_speech").main, ["q.jsonl", "--data", "t.jsonl", *more]))
    assert not Path("q.jsonl").exists()


def test_settings_of_speech_questions_are_checked(load_recipe):
    recipe = load_recipe("ask_speech")
    with pytest.raises(UsageError, match="data expected a manifest or more"):
        recipe.SpeechQuestions(Path("q.jsonl"), ())
    with pytest.raises(UsageError, match="english needs --german"):
        recipe.SpeechQuestions(Path("q.jsonl"), ("t.jsonl",), Path("en.txt"))


def test_texts_of_different_lengths_are_named(load_recipe, tmp_path, last_line):
    for code, count in (("en", 2), ("de", 2), ("fr", 1), ("cs", 2)):
        (tmp_path / f"t.{code}").write_text("a dog runs\n" * count)
    args = [str(tmp_path / "q.jsonl"), "--texts", str(tmp_path / "t")]
    line = last_line(lambda: start(load_recipe("ask_texts").main, args))
    assert f"t.fr: expected 2 lines as in {tmp_path}/t.en (got 1)" in line


@pytest.mark.ci
def test_a_captioner_describes_labelled_images(load_recipe, tmp_path):
    for number, name in enumerate(("cat", "cat", "ship")):
        (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), COLOURS[number]).save(tmp_path / "set" / name / f"{number}.png")
    (tmp_path / "set" / "cat" / "3.png").write_bytes(b"no image")
    # squares are mostly named ("a photo of a …"), which is left out; this is described
    shutil.copy(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False), tmp_path / "set" / "ship")
    lines = [{"id": name, "names": [name]} for name in ("cat", "ship")]
    (tmp_path / "names.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["--labelled", str(tmp_path / "set"), "--classes", str(tmp_path / "names.jsonl")]
    more = ["--captioner", "captioner-mini", "--described", "5"]
    recipe = load_recipe("ask_images")
    start(recipe.main, [str(tmp_path / "q"), *args, *more])
    rows = [json.loads(line) for line in (tmp_path / "q" / "described.jsonl").read_text().splitlines()]
    assert "grace_hopper.jpg" in {Path(row["messages"][0]["content"][0]["path"]).name for row in rows}
    assert len(rows) <= 4  # one of five is broken
    assert not any(row["answers"][0].startswith(recipe.NAMING) for row in rows)
    said = {Path(row["messages"][0]["content"][0]["path"]): row["answers"][0] for row in rows}
    for path, caption in said.items():
        assert caption == multimodal.caption(path, beam_size=4)[0]["caption"]


def test_clips_show_what_is_asked(load_recipe, tmp_path):
    start(load_recipe("ask_clips").main, [str(tmp_path / "clips.jsonl"), "--count", "4", "--narrated", "0"])
    source = open_chats(tmp_path / "clips.jsonl")
    assert len(source) >= 8  # two or three questions a clip
    path = source.read(0).fields["messages"][0]["content"][0]["path"]
    assert read_info(path).duration == pytest.approx(4)
    first, *_ = frames(path)
    assert first.image.size == (96, 96)
    start(load_recipe("ask_clips").main, [str(tmp_path / "talks.jsonl"), "--count", "4", "--narrated", "0", "--turns"])
    talks = open_chats(tmp_path / "talks.jsonl")
    assert sum(len(talks.read(key).fields["messages"]) + 1 for key in range(4)) == 2 * len(source)
