"""`multimodal caption` as a person uses it: formats, files that are gone on with, texts beside pictures, errors."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_caption_decoding import written

from multimodal import caption
from multimodal.cli.main import main
from multimodal.weights.folder import save_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*the caption is empty")
MIN = ("--min_tokens", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_folder(written(end=2.0), folder / "captioner")
    save_folder(replace(written(end=2.0), card={"caption": {"beam_size": 3, "prompt": "a red"}}), folder / "own")
    return folder / "captioner"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "inside").mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("a.png", "b.png", "c.png", "inside/a.png"):
        Image.fromarray(random.integers(0, 255, (20, 30, 3), np.uint8)).save(folder / name)
    return folder


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["caption", *(str(a) for a in arguments)])
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def test_every_format_says_the_same(capsys, model, pictures):
    flags = (pictures, "-m", model, "--beam_size", 3, "--num_captions", 2, *MIN)
    code, out, err = run(capsys, *flags, "--format", "json")
    records = json.loads(out)
    files = [pictures / "a.png", pictures / "b.png", pictures / "c.png", pictures / "inside" / "a.png"]
    expected = caption(files, model, beam_size=3, num_captions=2, min_tokens=1)
    cut = sum(not r["finished"] for r in records)
    assert code == 0
    assert err == f"multimodal: captions cut at 19 tokens, which are flagged as not finished: {cut}\n" * (cut > 0)
    assert [r["caption"] for r in records] == [r["caption"] for r in expected]
    assert [r["score"] for r in records] == pytest.approx([r["score"] for r in expected], rel=1e-5)
    _, out, _ = run(capsys, *flags, "--format", "jsonl")
    assert [json.loads(line) for line in out.splitlines()] == records
    _, out, _ = run(capsys, *flags, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    flat = [(r["file"], one["caption"], str(one["finished"])) for r in records for one in r["captions"]]
    assert [(row["file"], row["caption"], row["finished"]) for row in rows] == flat
    assert rows[0].keys() == {"file", "caption", "score", "logprob", "tokens", "finished", "count"}
    _, out, _ = run(capsys, *flags)
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [r["file"] for r in records]
    assert all(text in out for _, text, _ in flat)


@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_a_second_call_goes_on_and_a_broken_picture_stops_nobody(capsys, model, pictures, tmp_path, style):
    (pictures / "b.png").rename(tmp_path / "b.png")
    (pictures / "b.png").write_bytes(b"no picture")
    target = tmp_path / f"out.{style}"
    flags = (pictures, "-m", model, "-o", target, *MIN, "--batch_size", 2)
    code, out, err = run(capsys, *flags)
    assert (code, out) == (1, "")
    assert sum("error" in line for line in err.splitlines()) == 1
    assert "b.png" in err
    first = target.read_text()
    assert len(first.splitlines()) == 3 + (style == "csv")
    (tmp_path / "b.png").replace(pictures / "b.png")
    code, _, err = run(capsys, *flags)
    assert code == 0
    assert "3 of 4 pictures are there already" in err
    assert target.read_text().startswith(first)
    assert "b.png" in target.read_text()[len(first) :]
    code, _, err = run(capsys, *flags, "--beam_size", 2)
    assert code == 1
    assert "was made with another beam_size" in err
    code, _, _ = run(capsys, *flags, "--beam_size", 2, "--overwrite")
    assert code == 0


def test_texts_lie_beside_the_pictures_and_are_left_alone(capsys, model, pictures):
    kept = pictures / "c.txt"
    kept.write_text("my own words\n")
    code, out, err = run(capsys, pictures, "-m", model, "--format", "txt-per-image", *MIN)
    assert (code, out) == (0, "")
    assert "1 of 4 pictures have their .txt already" in err
    assert kept.read_text() == "my own words\n"
    texts = {path.relative_to(pictures).as_posix(): path.read_text() for path in pictures.rglob("*.txt")}
    assert set(texts) == {"a.txt", "b.txt", "c.txt", "inside/a.txt"}
    records = caption([pictures / "a.png", pictures / "inside" / "a.png"], model, min_tokens=1)
    assert [texts["a.txt"], texts["inside/a.txt"]] == [r["caption"] + "\n" for r in records]
    run(capsys, pictures, "-m", model, "--format", "txt-per-image", *MIN, "--overwrite")
    assert kept.read_text() != "my own words\n"
    assert not list(pictures.rglob("*.part"))


def test_two_pictures_never_share_a_text(capsys, model, pictures, tmp_path):
    Image.open(pictures / "b.png").save(pictures / "a.jpg")
    code, _, err = run(capsys, pictures, "-m", model, "--format", "txt-per-image", *MIN)
    assert code == 1
    assert f"{pictures / 'a.png'}: would be written to {pictures / 'a.txt'}, as {pictures / 'a.jpg'}" in err
    (row,) = caption(pictures / "a.jpg", model, min_tokens=1)
    assert (pictures / "a.txt").read_text() == row["caption"] + "\n"
    assert (pictures / "b.txt").exists()
    code, _, err = run(capsys, pictures / "b.png", pictures / "inside", "-m", model, "--format", "txt-per-image",
                       "-o", tmp_path / "texts", *MIN)  # fmt: skip
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "texts").iterdir()) == ["a.txt", "b.txt"]
    run(capsys, pictures, "-m", model, "--format", "txt-per-image", "-o", tmp_path / "all", *MIN)
    assert (tmp_path / "all" / "inside" / "a.txt").exists()  # the folders are made again


def test_several_captions_are_lines(capsys, model, pictures):
    run(capsys, pictures / "a.png", "-m", model, "--format", "txt-per-image", "--beam_size", 3, "--num_captions", 3)
    (row,) = caption(pictures / "a.png", model, beam_size=3, num_captions=3)
    assert (pictures / "a.txt").read_text().splitlines() == [one["caption"] for one in row["captions"]]


def test_regions_are_drawn_and_change_no_caption(capsys, model, pictures, tmp_path):
    flags = (pictures, "-m", model, "-o", tmp_path / "out.csv", *MIN)
    run(capsys, *flags)
    plain = (tmp_path / "out.csv").read_text()
    regions = tmp_path / "regions"
    code, _, _ = run(capsys, *flags, "--regions", regions)
    assert code == 0
    assert (tmp_path / "out.csv").read_text() == plain  # what is there is there, but was not drawn
    drawn = sorted(path.relative_to(regions).as_posix() for path in regions.rglob("*.png"))
    assert drawn == ["a.regions.png", "b.regions.png", "c.regions.png", "inside/a.regions.png"]
    before = {path: path.stat().st_mtime_ns for path in regions.rglob("*.png")}
    run(capsys, *flags, "--regions", regions)
    assert {path: path.stat().st_mtime_ns for path in regions.rglob("*.png")} == before
    run(capsys, *flags, "--regions", regions, "--overwrite")
    assert (tmp_path / "out.csv").read_text() == plain


def test_the_cards_defaults_give_way_to_flags(capsys, model, pictures):
    own = model.with_name("own")
    _, out, _ = run(capsys, pictures / "a.png", "-m", own, "--format", "json")
    (expected,) = caption(pictures / "a.png", model, beam_size=3, prompt="a red")
    assert json.loads(out)[0]["caption"] == expected["caption"]
    _, out, _ = run(capsys, pictures / "a.png", "-m", own, "--format", "json", "--prompt", "", "--beam_size", 1)
    assert json.loads(out)[0]["caption"] == caption(pictures / "a.png", model)[0]["caption"]


@pytest.mark.parametrize(
    ("flags", "code", "cause"),
    [
        (["--beam_size", "0"], 2, "expected 1 or more"),
        (["--min_tokens", "-1"], 2, "whole number of 0 or more"),
        (["--format", "json", "-o", "x.csv"], 2, "results are appended to csv or jsonl"),
        (["-o", "x.txt"], 2, "results are appended to csv or jsonl"),
        (["--overwrite"], 2, "names no file"),
        (["--top_p", "2"], 1, "top_p: must be a number from above 0 to 1"),
        (["--temperature", "1", "--beam_size", "2"], 1, "does not draw"),
        (["--min_tokens", "9", "--max_tokens", "5"], 1, "min_tokens 9: is above max_tokens 5"),
        (["--device", "nowhere"], 1, "nowhere"),
        (["--compute_type", "float16"], 1, "float16"),
        (["--prompt", "long " * 30], 1, "the model's context is 20"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(capsys, model, pictures, flags, code, cause):
    found, out, err = run(capsys, pictures / "a.png", "-m", model, *flags)
    assert (found, out) == (code, "")
    assert cause in err
    assert err.count("\n") == 1
