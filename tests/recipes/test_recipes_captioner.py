"""Captioner training and its scores: exact token weights, what a run learns and leaves, figures by hand."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from multimodal import caption, load
from multimodal.blocks.stack import transformer
from multimodal.data.datasets.captions import (
    CaptionAugmentSettings,
    PrepareCaption,
    SourcePart,
    sentences,
    tidy,
    together,
    unlike,
)
from multimodal.data.datasets.class_names import words
from multimodal.data.loader import Loader, finished, generator
from multimodal.data.sources import open_source
from multimodal.errors import DataError, UsageError
from multimodal.models.vit import ViT, ViTConfig
from multimodal.tasks.evaluate.caption_scores import agreement, best_constant, caption_scores
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.loop import Loop
from multimodal.train.objectives.captioning import Captioning, CollateCaptions, DecoderSettings, captioner
from multimodal.train.recipe_cli import start
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.data import sets
from tests.helpers.spread import thin
from tests.helpers.tiny_run import assert_same_states

RECORD = Preprocessing((32, 32), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
SAID = {
    "red": ["A red wall .", "a wall that is red"],
    "blue": ["a deep blue sea", "the blue sea ."],
    "lime": ["A green field .", "a field of grass"],
}
COLLATE = CollateCaptions(RECORD, CaptionAugmentSettings())
SMALL = DecoderSettings(32, 1, 4, 16, 0.0, 0, 0.0)


@pytest.fixture
def train_captioner(load_recipe):
    return load_recipe("train_captioner")


def encoder() -> ViT:
    torch.manual_seed(0)
    return ViT(ViTConfig((32, 32), 16, transformer(32, 2, 4, 64), "mean", False)).eval()


@pytest.fixture
def data(tmp_path) -> Path:
    """Four images a colour with captions, one folder of labelled ones, sentences, and an image encoder."""
    lines = []
    for colour, captions in SAID.items():
        for number in range(4):
            Image.new("RGB", (48 + number, 44), colour).save(tmp_path / f"{colour}{number}.png")
            lines.append({"file_name": f"{colour}{number}.png", "captions": captions})
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "classes" / "plain_white").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 40), "white").save(tmp_path / "classes" / "plain_white" / f"{number}.png")
    texts = ["A red car drives by.", "The blue sea", "Two dogs run over a field.", "A man walks."]
    (tmp_path / "texts.gz").write_bytes(gzip.compress("\n".join(texts).encode()))
    save_folder(Checkpoint(encoder(), None, RECORD), tmp_path / "encoder")
    return tmp_path


def flags(data: Path, run: str = "run", steps: int = 100, **changes) -> list[str]:
    values = {
        "data": data / "said.jsonl", "val": data / "said.jsonl", "init": data / "encoder", "run": data / run,
        "out": data / f"{run}-out", "steps": steps, "labelled": data / "classes", "sentences": data / "texts.gz",
        "batch": 12, "batch_labelled": 3, "batch_sentences": 3, "vocabulary": 300, "layers": 1, "width": 32,
        "heads": 4, "context": 24, "dropout": 0, "drop_path": 0, "smoothing": 0, "rate": 5e-3, "warmup": 5,
        "average": 0.8, "beams": 1, "evaluate_every": 50, "log_every": 10, "threads": torch.get_num_threads(),
    }  # fmt: skip
    values |= changes
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


@pytest.mark.ci
def test_a_run_learns_its_captions_and_ships_a_folder_that_says_them(train_captioner, data, capsys):
    start(train_captioner.main, flags(data))
    rows = [json.loads(line) for line in (data / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["captions"] for row in rows if "captions" in row]
    assert losses[0] > 3
    assert losses[-1] < 0.3 * losses[0]  # not 0, as an image's caption is drawn from two
    assert 0 < rows[0]["padding"] < 1
    images = [data / f"{colour}0.png" for colour in SAID]
    for row, own in zip(caption(images, data / "run-out", beam_size=3), SAID.values(), strict=True):
        assert row["caption"] in [tidy(text).lower() for text in own]
    (white,) = caption(data / "classes" / "plain_white" / "0.png", data / "run-out")
    assert white["caption"].rstrip(".").endswith("a plain white")
    checkpoint = load(data / "run-out")
    assert checkpoint.card["validation"]["cider"] > 100
    assert "plain white" not in (data / "run" / "report" / "report.md").read_text()
    assert re.search(r"line \d+: a ", (data / "run" / "report" / "report.md").read_text())


@pytest.mark.ci
def test_a_resumed_run_equals_an_unbroken_one(train_captioner, data):
    for run, changes in (("whole", {}), ("part", {"steps": 4}), ("part", {"resume": ""})):
        args = flags(data, run, **({"steps": 8, "schedule": "wsd", "warmup": 0, "dropout": 0.1} | changes))
        start(train_captioner.main, [arg for arg in args if arg])
    assert_same_states(data / "whole", data / "part", 8)


@pytest.mark.slow
def test_an_image_tower_of_a_shipped_model_is_shared_until_it_is_trained(train_captioner, load_recipe, data):
    own = dict.fromkeys(("layers", "width", "heads", "context", "sentences"))
    for run, freeze in (("frozen", "image"), ("trained", None)):
        start(train_captioner.main, flags(data, run, 1, init="captioner-mini", freeze=freeze, **own))
    frozen, trained = str(data / "frozen-out"), str(data / "trained-out")
    assert len(load(frozen).shared) == 1
    assert load(trained).shared == ()
    for models, shared in (((frozen, "captioner-mini", frozen), 1), ((frozen, trained), 0), ((trained, frozen), 0)):
        out = data / f"mean-{len(models)}-{models[0] == frozen}"
        start(load_recipe("average").main, ["--models", *models, "--out", str(out)])
        assert len(load(out).shared) == shared


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"val": None, "hold": 0.1}, "--hold 0.1: must leave two or more of 12 items in each part"),
        ({"batch": 13}, "a batch cannot take 13 of a part of 12 items"),
        ({"freeze": "imgae"}, "--freeze imgae: no part of this model (near: image"),
        ({"width": 31}, "--width must be a multiple of heads (4) (got 31)"),
        ({"encoder_layers": 9}, "--encoder_layers 9: the encoder has 2"),
        ({"sentences": "none.txt"}, "none.txt: cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(train_captioner, data, capsys, changes, line):
    with pytest.raises(SystemExit) as end:
        start(train_captioner.main, flags(data, **changes))
    assert end.value.code == (2 if "width" in changes else 1)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train_captioner.py: error: ")
    assert line in last


def objective(tokenizer: BytePairTokenizer) -> Captioning:
    model = captioner(encoder(), tokenizer.vocab_size, SMALL)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return Captioning(model.double(), 0.1, 0.5)


def test_the_gradient_of_three_micro_batches_is_that_of_the_whole_batch(data):
    parts = [
        SourcePart.whole(open_source(data / "said.jsonl"), 9),
        SourcePart.whole(sentences([data / "texts.gz"], []), 4),
    ]
    source, plan = together(parts, 0)
    tokenizer = BytePairTokenizer.train(["a red wall", "a deep blue sea"] * 2, 280)
    prepare = PrepareCaption(tokenizer, 16, RECORD, {})
    found = []
    for micro in (1, 3):
        loader = Loader(source, plan, prepare, COLLATE, micro=micro)
        settings = LoopSettings(data / str(micro), 1, accumulate=micro, precision="float32", threads=0)
        loop = Loop(settings, objective(tokenizer), loader)
        batches = next(loader.start(0)).batches
        batches = [replace(batch, images=batch.images.double()) for batch in batches]
        assert len({int(batch.lengths.sum()) for batch in batches}) == micro  # of different weight
        metrics = {name: value.item() for name, value in loop.objective.backward(loop, batches).items()}
        grads = {n: p.grad for n, p in loop.objective.model.named_parameters() if p.grad is not None}
        found.append((metrics, grads))
    (one, whole), (three, parts) = found
    assert one == pytest.approx(three, rel=1e-6)
    assert one["loss"] == pytest.approx(one["captions"] + 0.5 * one["sentences"])
    assert whole.keys() == parts.keys()
    largest = max(grad.abs().max() for grad in whole.values())
    for name, grad in whole.items():
        assert (grad - parts[name]).abs().max() <= 1e-6 * largest, name


def test_the_loss_is_the_mean_over_tokens_and_a_sentence_sees_no_image(data):
    tokenizer = BytePairTokenizer.train(["a red wall", "a deep blue sea"] * 2, 280)
    prepare = PrepareCaption(tokenizer, 16, RECORD, {})
    images, texts = open_source(data / "said.jsonl"), sentences([data / "texts.gz"], [])
    rows = [prepare(source.read(0), generator(0, i)) for i, source in enumerate((images, texts))]
    lowered = objective(tokenizer).eval()
    together_, *each = (lowered(_double(finished(COLLATE(part)))) for part in (rows, rows[:1], rows[1:]))
    assert together_["captions"].item() == pytest.approx(each[0]["captions"].item())
    assert together_["sentences"].item() == pytest.approx(each[1]["sentences"].item())
    assert each[0]["sentences"] == each[1]["captions"] == 0
    batch = _double(finished(COLLATE(rows[:1])))
    logits = lowered.model(batch.images, batch.ids[:, :-1])
    wanted = torch.nn.functional.cross_entropy(logits[0], batch.ids[0, 1:], label_smoothing=0.1)
    assert each[0]["captions"].item() / lowered.counts(batch)["captions"] == pytest.approx(wanted.item())


def _double(batch):
    return replace(batch, images=batch.images.double())


def test_held_out_captions_are_not_among_the_sentences(data):
    held = ["A red car drives by .", "a man walks a dog in the park"]
    source = sentences([data / "texts.gz"], held)
    assert [source.row(i).texts[0] for i in range(len(source))] == [
        "The blue sea", "Two dogs run over a field.", "A man walks."
    ]  # fmt: skip
    assert unlike(["a b c d", "a b c x", "a b y z"], ["a b c d"]) == [False, False, True]
    with pytest.raises(DataError, match="not a regular file"):
        sentences([data], [])
    with pytest.raises(UsageError, match=r"hold 0\.1"):
        SourcePart.whole(source, 1).held_out(0.1)


@pytest.mark.parametrize("val", [None, "said.csv"])
def test_lines_of_one_file_are_one_image(train_captioner, data, val):
    lines = [f"{colour}{i}.png,{text}" for which in (0, 1) for colour, own in SAID.items() for text in own[which::2]
             for i in range(4)]  # fmt: skip
    (data / "said.csv").write_text("\n".join(["file_name,caption", *lines, "none.png,"]))
    named = train_captioner.CaptionerRun((str(data / "said.csv"),), data / "out", hold=0.3, batch=2,
                                         val=val and str(data / val))  # fmt: skip
    (images,), held = train_captioner.parts_of(named)
    trained, judged = ({row.name for row in part.rows()} for part in (images, held))
    assert (len(images.keys), len(trained)) == ((9, 9) if val is None else (13, 13))
    assert len(judged) == len(held.keys) == (4 if val is None else 13)
    assert bool(trained & judged) == (val is not None)
    for key in held.keys:
        colour = Path(held.source.read(key).name).stem[:-1]
        assert list(held.source.read(key).texts) == SAID.get(colour, [""])


def test_broken_validation_images_are_left_out_and_a_path_may_be_written_in_two_ways(train_captioner, data, caplog):
    (data / "cut.png").write_bytes((data / "red0.png").read_bytes()[:60])
    rows = ["file_name,caption", "cut.png,a wall", "none.png,a wall", "red0.png, .", "red1.png,a wall"]
    (data / "said.csv").write_text("\n".join([*rows, f"{data}/classes/../red1.png,the wall", "blue1.png,the sea"]))
    run = train_captioner.CaptionerRun((str(data / "said.csv"),), data / "out", val=str(data / "said.csv"), batch=2)
    _, val = train_captioner.parts_of(run)
    names, images, texts = train_captioner.judged(val)
    assert [name.rpartition(" line ")[2] for name in names] == ["5", "7"]
    assert [image.width for image in images] == [49, 49]
    assert texts == (["a wall", "the wall"], ["the sea"])
    for place, cause in ((2, "cut.png"), (3, "none.png"), (4, "its caption is empty")):
        assert any(f"line {place}: " in line and cause in line for line in caplog.messages)
    with pytest.raises(DataError, match="1 of 4 validation images can be used"):
        train_captioner.judged(replace(val, keys=range(4)))


def test_empty_captions_are_broken_and_cut_ones_counted(train_captioner, data, caplog):
    rows = ["file_name,caption", "red0.png,", "blue0.png, .", *(f"lime{n}.png,a field of grass" for n in range(4))]
    (data / "said.csv").write_text("\n".join(rows))
    source, tokenizer = open_source(data / "said.csv"), BytePairTokenizer.train(["a field of grass"], 280)
    prepare = PrepareCaption(tokenizer, 24, RECORD, {})
    assert len(prepare(source.read(2), generator(0)).ids) > 2
    for key in range(2):
        with pytest.raises(DataError, match="its caption is empty"):
            prepare(source.read(key), generator(0))
    start(train_captioner.main, flags(data, "cut", 1, context=5, sentences=None, labelled=None))
    assert "12 of 24 captions have more than 3 tokens and are cut" in caplog.text


def test_images_of_one_name_are_told_apart(tmp_path):
    tokenizer = BytePairTokenizer.train(["a red wall", "a deep blue sea"] * 2, 280)
    members = [(f"{name}.{end}", data) for name, value in (("a", 1), ("b", 2), ("a", 3))
               for end, data in (("png", sets.png(value)), ("txt", b"a wall"))]  # fmt: skip
    source, prepare = open_source(sets.tar(tmp_path / "a.tar", members)), PrepareCaption(tokenizer, 16, RECORD, {})
    images = [prepare(source.read(key), generator(0)).image for key in (0, 1, 2)]
    assert [int(image[0, 0, 0]) for image in images] == [1, 2, 3]


def test_an_epoch_takes_each_captioned_image_once_and_others_in_turn(data):
    images, labelled = open_source(data / "said.jsonl"), open_source(data / "classes")
    _, plan = together([SourcePart(images, range(2, 12), 5), SourcePart.whole(labelled, 2)], 0)
    (first, second), again = plan(0), plan(1)
    assert sorted(first[:5] + second[:5]) == list(range(2, 12))
    assert [len(batch) for batch in (first, second)] == [7, 7]
    assert set(first[5:] + second[5:]) == {12, 13, 14}
    assert again != [first, second]


def test_words_follow_coco_captions_punctuation():
    assert words("The man's T-shirt isn't blue , (\"no\") & 'x' ...") == "the man 's t-shirt is n't blue no & x"


def test_scores_agree_with_a_case_by_hand():
    """The second caption is its reference, CIDEr 10. The first shares 2 of 3 informative words ("a" is in both
    documents and weighs nothing), 2 of 3 pairs, 1 of 2 triples and no four: 10·(2/3 + 2/3 + 1/2 + 0)/4. Matches over
    both captions are 8 of 9 words, 6 of 7 pairs, 4 of 5 triples, 2 of 3 fours, at equal lengths."""
    said = ["A red dog sits .", "a blue cat sits here"]
    references = [["a red dog runs"], ["A blue cat sits here ."]]
    scores = caption_scores(said, references)
    assert scores["cider"] == pytest.approx(100 * (10 + 10 * (2 / 3 + 2 / 3 + 1 / 2) / 4) / 2)
    assert scores["bleu4"] == pytest.approx(100 * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25, abs=1e-4)
    with pytest.raises(DataError, match="image 1 has no reference"):
        caption_scores(said, [["a"], ["."]])
    with pytest.raises(DataError, match="for 1 images, two or more"):
        caption_scores(said[:1], references[:1])


def test_levels_to_judge_by():
    references = [["one red dog", "one red dog"], ["a blue cat", "a blue cat"], ["two birds fly", "two birds fly"]]
    assert agreement(references)["cider"] == pytest.approx(750)  # three words have no fours
    best = best_constant(["b c d", "one red dog", "nothing of it"], references)
    assert best["text"] == "one red dog"
    assert best["cider"] == pytest.approx(250)
    with pytest.raises(DataError, match="one reference only"):
        agreement([["a"], ["b", "c"]])
