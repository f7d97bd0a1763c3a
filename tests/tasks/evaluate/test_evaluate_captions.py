"""Captions of a model or a file scored against references: the right caption at the right image, nothing hidden."""

import csv
import io
import json
import statistics
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from multimodal.blocks.stack import transformer
from multimodal.cli.main import main
from multimodal.errors import DataError, UsageError
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.tasks.encode.images import pixels_of
from multimodal.tasks.evaluate.caption_scores import agreement, caption_scores
from multimodal.tasks.evaluate.captions import evaluate, open_references, read_captions, write_captions
from multimodal.tasks.evaluate.clip_score import clip_scores
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.data.sets import lines, tar
from tests.helpers.spread import thin
from tests.helpers.tiny import HEADS, WIDTH, randomized, teach

RECORD = Preprocessing((16, 16), "squash", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
SAID = {
    "red": ["a red wall", "a wall that is red"],
    "blue": ["a deep blue sea", "the sea"],
    "lime": ["a field", "grass"],
}
TOKENIZER = BytePairTokenizer.train([text for texts in SAID.values() for text in texts] * 2, 290)


@pytest.fixture(scope="module")
def captioner() -> Checkpoint:
    """Trained in a second to tell three colours apart."""
    torch.manual_seed(0)
    image = ViTConfig((16, 16), 16, transformer(32, 1, 4, 64), "none", False)
    text = TextConfig(TOKENIZER.vocab_size, 16, transformer(32, 1, 4, 64, source_width=32), True, True)
    model = VisionEncoderDecoder(VisionEncoderDecoderConfig(image, text))
    pixels = pixels_of([Image.new("RGB", (40, 40), colour) for colour in SAID], RECORD)
    batch = TOKENIZER.batch([texts[0] for texts in SAID.values()])
    return Checkpoint(teach(model, pixels, batch, 50), TOKENIZER, RECORD)


@pytest.fixture(scope="module")
def clip() -> Checkpoint:
    image = ViTConfig((16, 16), 8, transformer(WIDTH, 2, HEADS, 24), "token", True)
    text = TextConfig(TOKENIZER.vocab_size, 60, transformer(WIDTH, 2, HEADS, 24), True)
    config = CLIPConfig(image, text, 6, "softmax", "eos", eos_id=TOKENIZER.eos_id)
    return Checkpoint(randomized(CLIP(config), 4), TOKENIZER, RECORD)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A line for each text, so two for each image."""
    rows = [["image", "caption"]]
    (tmp_path / "images").mkdir()
    for colour, texts in SAID.items():
        Image.new("RGB", (30, 20), colour).save(tmp_path / "images" / f"{colour}.png")
        rows += [[f"images/{colour}.png", text] for text in texts]
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return tmp_path / "data.csv"


def run(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end, warnings.catch_warnings(action="default"):
        main(["evaluate", "captions", *map(str, arguments)])
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_lines_of_one_file_are_one_image(data, tmp_path):
    given = open_references(data)
    assert list(given.texts.values()) == list(SAID.values())
    assert len(open_references(data, limit=2).texts) == 2
    with pytest.raises(DataError, match="1 images with captions"):
        open_references(data, limit=1)
    with pytest.raises(DataError, match=r"red\.png: 2 captions, at least 3"):
        open_references(data, least=3)
    with pytest.raises(DataError, match="no captions"):
        open_references(tmp_path / "images")


def test_a_models_captions_belong_to_their_images(captioner, data):
    given = open_references(data)
    said = write_captions(given, captioner, batch_size=2)
    assert list(said.texts.values()) == [texts[0] for texts in SAID.values()]
    found = evaluate(given, said, people=True)
    assert found.scores == pytest.approx(caption_scores([t[0] for t in SAID.values()], list(SAID.values())))
    assert found.people == pytest.approx(agreement(list(SAID.values())))
    assert found.figures()["distinct"] == 3
    assert [Path(row["file"]).stem for row in found.rows] == list(SAID)


def test_broken_images_are_named_and_the_others_keep_their_captions(captioner, clip, data, tmp_path):
    def png(colour: str) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (20, 20), colour).save(file, "PNG")
        return file.getvalue()

    members = [("0.png", png("red")[:50]), ("0.txt", b"a red wall"), ("1.png", png("blue")), ("1.txt", b"the sea")]
    members += [("2.png", png("lime")), ("2.txt", b"a field"), ("3.png", b""), ("3.txt", b"nothing")]
    given = open_references(tar(tmp_path / "set.tar", members))
    for size in (1, 4):
        said = write_captions(given, captioner, batch_size=size)
        assert list(said.texts.values()) == ["a deep blue sea", "a field"]
        assert [line.split("!")[1][:6] for line in said.broken] == ["0.png:", "3.png:"]
    found = evaluate(given, said, clip)
    assert [row["caption"] for row in found.rows] == ["a deep blue sea", "a field"]
    assert found.broken == said.broken
    (tmp_path / "images" / "blue.png").write_bytes(b"no image")  # a CLIP is the first to see it
    given = open_references(data)
    predictions = lines(tmp_path / "p.jsonl", [{"file": f"{c}.png", "caption": SAID[c][0]} for c in SAID])
    found = evaluate(given, read_captions(predictions, given), clip)
    assert [row["caption"] for row in found.rows] == ["a red wall", "a field"]
    assert len(found.broken) == 1
    assert "blue.png" in found.broken[0]


def test_captions_of_a_file_are_found_by_path_or_by_name(data, tmp_path, monkeypatch):
    given = open_references(data)
    monkeypatch.chdir(tmp_path)
    for red in ("images/red.png", str(tmp_path / "images/red.png"), "red.png", "elsewhere/red.png"):
        rows = [
            {"file": "blue.png", "caption": "b"},
            {"file_name": red, "text": "r"},
            {"image": "lime.png", "caption": ""},
        ]
        said = read_captions(lines(tmp_path / "p.jsonl", rows), given)
        assert list(said.texts.values()) == ["r", "b", ""]
        assert said.broken == []
    (tmp_path / "p.csv").write_text("file,caption,score\nred.png,one,1\nred.png,two,2\nblue.png,b,1\nother.png,o,1\n")
    with warnings.catch_warnings(record=True, action="always") as told:
        said = read_captions(tmp_path / "p.csv", given)
    assert list(said.texts.values()) == ["one", "b"]
    assert "1 captions of no image of the data, such as other.png" in str(told[0].message)
    assert "1 more captions of the same images; of each the first" in str(told[1].message)
    assert len(said.broken) == 1
    assert "lime.png: has no caption in" in said.broken[0]


def test_a_name_that_two_images_share_is_not_guessed(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "x.png")
    data = lines(tmp_path / "d.jsonl", [{"path": f"{f}/x.png", "captions": [f"text {f}"]} for f in "ab"])
    given = open_references(data)
    with pytest.warns(UserWarning, match=r"1 captions of no image of the data, such as x\.png"):
        said = read_captions(lines(tmp_path / "p.jsonl", [{"file": "x.png", "caption": "which?"}]), given)
    assert said.texts == {}
    rows = [{"file": str(tmp_path / "b/x.png"), "caption": "B"}, {"file": str(tmp_path / "a/x.png"), "caption": "A"}]
    assert list(read_captions(lines(tmp_path / "p.jsonl", rows), given).texts.values()) == ["A", "B"]


@pytest.mark.parametrize("row", ['{"file": "red.png"}', '{"caption": "a"}', '{"file": 3, "caption": "a"}', "no json"])
def test_a_line_without_file_and_caption_is_refused(data, tmp_path, row):
    path = lines(tmp_path / "p.jsonl", [{"file": "red.png", "caption": "a"}, row])
    with pytest.raises(DataError, match=r"p\.jsonl line 2"):
        read_captions(path, open_references(data))


def test_clip_score_is_that_of_its_paper(clip):
    captions, references = ["a red wall", "", "the sea"], [["a wall"], ["grass", "a red sea"], ["a", "b", "c"]]
    texts = lambda given: clip.model.encode_text(TOKENIZER.batch([f"A photo depicts {given}"]).ids)[0].detach()
    images = F.normalize(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)), dim=-1)
    images[2] = -texts("the sea")  # the opposite of its caption
    fits, both = clip_scores(clip, images, captions, references)
    for image, caption, others, fit, mean in zip(images, captions, references, fits, both, strict=True):
        wanted = 2.5 * max(0.0, float(image @ texts(caption)))
        nearest = max(0.0, max(float(texts(caption) @ texts(other)) for other in others))
        assert fit == pytest.approx(wanted, abs=1e-5)
        assert mean == pytest.approx(statistics.harmonic_mean([wanted, nearest]), abs=1e-5)
    assert fits[2] == both[2] == 0
    assert fits[0] != fits[1]


def test_a_caption_unlike_every_reference_has_no_ref_clip_score(clip, monkeypatch):
    ways = {"x": (1.0, 0.0), "y": (-1.0, 0.0), "z": (0.6, 0.8)}
    vectors = lambda model, tokenizer, texts: torch.tensor([ways[text[-1]] for text in texts])
    monkeypatch.setattr("multimodal.tasks.evaluate.clip_score.text_features", vectors)
    fits, both = clip_scores(clip, torch.tensor([[1.0, 0.0]] * 2), ["x", "x"], [["y"], ["y", "z"]])
    assert fits == [2.5, 2.5]
    assert both == pytest.approx([0, 2 * 2.5 * 0.6 / 3.1])


def test_command_gives_figures_each_caption_and_a_report(captioner, clip, data, tmp_path, capsys):
    save_folder(captioner, tmp_path / "captioner")
    save_folder(clip, tmp_path / "clip")
    options = [
        "--model",
        tmp_path / "captioner",
        "--clip_model",
        tmp_path / "clip",
        "--agreement",
        "--beam_size",
        2,
        "--constant",
        data,
    ]
    code, out, err = run(capsys, data, *options, "--format", "json", "--report", tmp_path / "r.html", "--quiet")
    assert (code, err) == (0, "")
    told = json.loads(out)
    wanted = caption_scores([texts[0] for texts in SAID.values()], list(SAID.values()))
    assert {name: told[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)
    assert told["people"]["cider"] == pytest.approx(agreement(list(SAID.values()))["cider"], abs=1e-4)
    assert told["clip_score"] == pytest.approx(statistics.mean(row["clip_score"] for row in told["captions"]), abs=1e-3)
    assert [row["caption"] for row in told["captions"]] == [texts[0] for texts in SAID.values()]
    assert told["options"] == {"beam_size": 2}
    assert 0 < told["constant"]["cider"] < told["cider"]
    assert told["constant"]["text"] in [text for texts in SAID.values() for text in texts]
    page = (tmp_path / "r.html").read_text()
    assert "a deep blue sea" in page
    assert "ref_clip_score" in page
    lines(
        tmp_path / "p.jsonl",
        [{"file": "red.png", "caption": "<b>a red wall</b>"}, {"file": "lime.png", "caption": "a field"}],
    )
    code, out, err = run(capsys, data, "--predictions", tmp_path / "p.jsonl", "--report", tmp_path / "r.html")
    assert code == 1
    assert "blue.png: has no caption in" in err
    assert "2 captions, 2 different" in out
    assert "left out: 1" in out
    assert "<b>a red" not in (tmp_path / "r.html").read_text()


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("flags", "code", "cause"),
    [
        (["--model", "x", "--predictions", "y"], 2, "either --model or --predictions"),
        (["--predictions", "absent.jsonl"], 1, "absent.jsonl: cannot be read"),
        (["--predictions", "p.jsonl", "--beam_size", "2"], 1, "--beam_size: is for a captioner"),
        (["--predictions", "p.jsonl", "--report", "r.pdf"], 1, "--report r.pdf: must end in"),
        (["--model", "clip"], 1, "expected a captioner, got clip"),
        (["--predictions", "p.jsonl", "--clip_model", "captioner"], 1, "expected a CLIP model"),
        (["--predictions", "p.jsonl"], 1, "1 captions to score, at least 2"),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    captioner, clip, data, tmp_path, capsys, monkeypatch, flags, code, cause
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_folder(captioner, tmp_path / "captioner")
    save_folder(clip, tmp_path / "clip")
    lines(tmp_path / "p.jsonl", [{"file": "red.png", "caption": "a red wall"}])
    found, out, err = run(capsys, data, *flags)
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert cause in err


def test_a_checkpoint_without_its_tokenizer_gives_no_clip_score(clip, data, tmp_path):
    given = open_references(data)
    said = read_captions(lines(tmp_path / "p.jsonl", [{"file": f"{c}.png", "caption": c} for c in SAID]), given)
    with pytest.raises(UsageError, match="expected a CLIP model"):
        evaluate(given, said, Checkpoint(clip.model.image, TOKENIZER, RECORD))
