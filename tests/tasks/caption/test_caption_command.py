"""`multimodal caption`: formats, resuming, texts beside images, errors."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multimodal import caption
from multimodal.weights.folder import save_folder
from tests.helpers.commands import run
from tests.helpers.data.captions import written
from tests.helpers.spread import thin

pytestmark = pytest.mark.filterwarnings("ignore:.*the caption is empty")
MIN = ("--min_tokens", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_folder(written(end=2.0), folder / "captioner")
    save_folder(replace(written(end=2.0), card={"caption": {"beam_size": 3, "prompt": "a red"}}), folder / "own")
    return folder / "captioner"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "inside").mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("a.png", "b.png", "c.png", "inside/a.png"):
        Image.fromarray(random.integers(0, 255, (20, 30, 3), np.uint8)).save(folder / name)
    return folder


@pytest.mark.ci
def test_every_format_says_the_same(capsys, model, images):
    flags = (images, "-m", model, "--beam_size", 3, "--num_captions", 2, *MIN)
    code, out, err = run(capsys, "caption", *flags, "--format", "json")
    records = json.loads(out)
    files = [images / "a.png", images / "b.png", images / "c.png", images / "inside" / "a.png"]
    expected = caption(files, model, beam_size=3, num_captions=2, min_tokens=1)
    cut = sum(not r["finished"] for r in records)
    assert code == 0
    assert err == f"multimodal: captions cut at 19 tokens, which are flagged as not finished: {cut}\n" * (cut > 0)
    assert [r["caption"] for r in records] == [r["caption"] for r in expected]
    assert [r["score"] for r in records] == pytest.approx([r["score"] for r in expected], rel=1e-5)
    _, out, _ = run(capsys, "caption", *flags, "--format", "jsonl")
    assert [json.loads(line) for line in out.splitlines()] == records
    _, out, _ = run(capsys, "caption", *flags, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    flat = [(r["file"], one["caption"], str(one["finished"])) for r in records for one in r["captions"]]
    assert [(row["file"], row["caption"], row["finished"]) for row in rows] == flat
    assert rows[0].keys() == {"file", "caption", "score", "logprob", "tokens", "finished", "count"}
    _, out, _ = run(capsys, "caption", *flags)
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [r["file"] for r in records]
    assert all(text in out for _, text, _ in flat)


@pytest.mark.ci
@pytest.mark.parametrize("style", ["csv", "jsonl"])
def test_a_second_call_goes_on_and_a_broken_image_stops_nobody(capsys, model, images, tmp_path, style):
    (images / "b.png").rename(tmp_path / "b.png")
    (images / "b.png").write_bytes(b"no image")
    target = tmp_path / f"out.{style}"
    flags = (images, "-m", model, "-o", target, *MIN, "--batch_size", 2)
    code, out, err = run(capsys, "caption", *flags)
    assert (code, out) == (1, "")
    assert sum("error" in line for line in err.splitlines()) == 1
    assert "b.png" in err
    first = target.read_text()
    assert len(first.splitlines()) == 3 + (style == "csv")
    (tmp_path / "b.png").replace(images / "b.png")
    code, _, err = run(capsys, "caption", *flags)
    assert code == 0
    assert "3 of 4 images are there already" in err
    assert target.read_text().startswith(first)
    assert "b.png" in target.read_text()[len(first) :]
    code, _, err = run(capsys, "caption", *flags, "--beam_size", 2)
    assert code == 1
    assert "was written with other beam_size" in err
    code, _, _ = run(capsys, "caption", *flags, "--beam_size", 2, "--overwrite")
    assert code == 0


@pytest.mark.ci
def test_texts_lie_beside_the_images_and_are_left_alone(capsys, model, images):
    kept = images / "c.txt"
    kept.write_text("my own words\n")
    flags = ("-m", model, "--format", "txt-per-image", *MIN)
    code, out, err = run(capsys, "caption", images, *flags)
    assert (code, out) == (0, "")
    assert "1 of 4 images have their .txt already (--overwrite rewrites them)" in err
    assert f"; 1 not as multimodal wrote it, such as {kept}\n" in err
    assert "3 texts written beside the images" in err
    assert "not as multimodal" not in run(capsys, "caption", images / "a.png", *flags)[2]
    assert kept.read_text() == "my own words\n"
    texts = {path.relative_to(images).as_posix(): path.read_text() for path in images.rglob("*.txt")}
    assert set(texts) == {"a.txt", "b.txt", "c.txt", "inside/a.txt"}
    records = caption([images / "a.png", images / "inside" / "a.png"], model, min_tokens=1)
    assert [texts["a.txt"], texts["inside/a.txt"]] == [r["caption"] + "\n" for r in records]
    run(capsys, "caption", images, "-m", model, "--format", "txt-per-image", *MIN, "--overwrite")
    assert kept.read_text() != "my own words\n"
    assert not list(images.rglob("*.part"))


@pytest.mark.ci
def test_two_images_never_share_a_text(capsys, model, images, tmp_path):
    Image.open(images / "b.png").save(images / "a.jpg")
    code, _, err = run(capsys, "caption", images, "-m", model, "--format", "txt-per-image", *MIN)
    assert code == 1
    assert f"{images / 'a.png'}: would be written to {images / 'a.txt'}, as {images / 'a.jpg'}" in err
    (row,) = caption(images / "a.jpg", model, min_tokens=1)
    assert (images / "a.txt").read_text() == row["caption"] + "\n"
    assert (images / "b.txt").exists()
    code, _, err = run(capsys, "caption", images / "b.png", images / "inside", "-m", model, "--format", "txt-per-image",
                       "-o", tmp_path / "texts", *MIN)  # fmt: skip
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "texts").iterdir()) == ["a.txt", "b.txt"]
    run(capsys, "caption", images, "-m", model, "--format", "txt-per-image", "-o", tmp_path / "all", *MIN)
    assert (tmp_path / "all" / "inside" / "a.txt").exists()  # the folders are made again


@pytest.mark.ci
def test_several_captions_are_lines(capsys, model, images):
    run(
        capsys,
        "caption",
        images / "a.png",
        "-m",
        model,
        "--format",
        "txt-per-image",
        "--beam_size",
        3,
        "--num_captions",
        3,
    )
    (row,) = caption(images / "a.png", model, beam_size=3, num_captions=3)
    assert (images / "a.txt").read_text().splitlines() == [one["caption"] for one in row["captions"]]


@pytest.mark.ci
def test_regions_are_drawn_and_change_no_caption(capsys, model, images, tmp_path):
    flags = (images, "-m", model, "-o", tmp_path / "out.csv", *MIN)
    run(capsys, "caption", *flags)
    plain = (tmp_path / "out.csv").read_text()
    regions = tmp_path / "regions"
    code, _, _ = run(capsys, "caption", *flags, "--regions", regions)
    assert code == 0
    assert (tmp_path / "out.csv").read_text() == plain  # finished captions stay, regions were missing
    drawn = sorted(path.relative_to(regions).as_posix() for path in regions.rglob("*.png"))
    assert drawn == ["a.regions.png", "b.regions.png", "c.regions.png", "inside/a.regions.png"]
    before = {path: path.stat().st_mtime_ns for path in regions.rglob("*.png")}
    run(capsys, "caption", *flags, "--regions", regions)
    assert {path: path.stat().st_mtime_ns for path in regions.rglob("*.png")} == before
    run(capsys, "caption", *flags, "--regions", regions, "--overwrite")
    assert (tmp_path / "out.csv").read_text() == plain


@pytest.mark.ci
def test_the_cards_defaults_give_way_to_flags(capsys, model, images):
    own = model.with_name("own")
    _, out, _ = run(capsys, "caption", images / "a.png", "-m", own, "--format", "json")
    (expected,) = caption(images / "a.png", model, beam_size=3, prompt="a red")
    assert json.loads(out)[0]["caption"] == expected["caption"]
    _, out, _ = run(
        capsys, "caption", images / "a.png", "-m", own, "--format", "json", "--prompt", "", "--beam_size", 1
    )
    assert json.loads(out)[0]["caption"] == caption(images / "a.png", model)[0]["caption"]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("flags", "code", "cause"),
    [
        (["--beam_size", "0"], 2, "must be an integer in [1, 1000] (got 0)"),
        (["--min_tokens", "-1"], 2, "must be an integer in [0, "),
        (["--format", "json", "-o", "x.csv"], 2, "results are appended to csv or jsonl"),
        (["-o", "x.txt"], 2, "results are appended to csv or jsonl"),
        (["--overwrite"], 2, "names no file"),
        (["--top_p", "2"], 2, "--top_p: must be a number in (0, 1] (got 2.0)"),
        (["--temperature", "1", "--beam_size", "2"], 1, "--beam_size 2 searches, and temperature 1 samples"),
        (["--min_tokens", "9", "--max_new_tokens", "5"], 1, "--min_tokens 9 is above max_new_tokens (5)"),
        (["--device", "nowhere"], 1, "nowhere"),
        (["--compute_type", "float16"], 1, "float16"),
        (["--prompt", "long " * 30], 1, "the model's context is 20"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(capsys, model, images, flags, code, cause):
    found, out, err = run(capsys, "caption", images / "a.png", "-m", model, *flags)
    assert (found, out) == (code, "")
    assert cause in err
    assert err.count("\n") == 1
