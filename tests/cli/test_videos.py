"""Videos in the commands that take images."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.commands import one_line, run
from tests.helpers.data.video_files import noise, ramp, video


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Current folder with two videos and two images."""
    (tmp_path / "in").mkdir()
    for name in ("a", "c"):
        (tmp_path / "in" / f"{name}.mp4").write_bytes(video(noise(20), g="10"))
        Image.effect_noise((40, 40), 50).convert("RGB").save(tmp_path / "in" / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "in"


@pytest.mark.ci
def test_classify_resumes_in_the_middle_of_a_video(capsys, models, folder):
    common = ("classify", "in", "--labels", "red", "blue", "-m", models / "clip", "--every_s", "0.2")
    common = (*common, "--batch_size", 4, "--top", 1)
    assert run(capsys, *common, "-o", "whole.csv") == (0, "", "")
    whole = Path("whole.csv").read_text()
    times = ["0", "0.2", "0.4", "0.6", "0.8", "1", "1.2", "1.4", "1.6", "1.8"]
    frames_of = lambda name: [f"in/{name}.mp4 @ {time} s" for time in times]
    found = [row["file"] for row in csv.DictReader(whole.splitlines())]
    assert found == [*frames_of("a"), "in/a.png", *frames_of("c"), "in/c.png"]
    code, _, err = run(capsys, *common, "-o", "whole.csv")
    assert (code, err) == (0, "multimodal: whole.csv: 2 of 4 images are there already\n")
    assert Path("whole.csv").read_text() == whole
    killed = 18  # lines
    Path("part.csv").write_text("".join(whole.splitlines(keepends=True)[:killed]))
    settings = json.loads(Path("whole.csv.settings.json").read_text())
    Path("part.csv.settings.json").write_text(json.dumps(settings | {"closed": False}))
    code, _, err = run(capsys, *common, "-o", "part.csv")
    assert (code, err) == (0, "multimodal: part.csv: 1 of 4 images are there already\n")
    assert Path("part.csv").read_text() == whole


@pytest.mark.ci
def test_folders_are_searched_for_videos_on_request(capsys, models, folder):
    common = ("--labels", "red", "blue", "-m", models / "clip", "--format", "jsonl")
    names = lambda out: [json.loads(line)["file"] for line in out.splitlines()]
    code, out, err = run(capsys, "classify", "in", *common)
    assert (code, names(out)) == (0, ["in/a.png", "in/c.png"])
    assert err == "multimodal: in: videos left out: 2 (--max_frames, --every_s or --scenes reads them)\n"
    _, out, err = run(capsys, "classify", "in", "--max_frames", 1, *common)
    assert (names(out), err) == (["in/a.mp4 @ 0.9 s", "in/a.png", "in/c.mp4 @ 0.9 s", "in/c.png"], "")
    _, out, _ = run(capsys, "classify", "in/*.mp4", "--per_clip", *common)
    assert names(out) == ["in/a.mp4", "in/c.mp4"]
    _, out, _ = run(capsys, "classify", "in/?.mp4", *common)
    assert len(names(out)) == 32
    _, out, _ = run(capsys, "classify", "in/*", *common)
    assert names(out) == ["in/a.png", "in/c.png"]


@pytest.mark.ci
def test_search_finds_the_moment(capsys, models, folder):
    stills = [*noise(20)[:10], *ramp(10)]
    (folder / "b.mp4").write_bytes(video(stills))
    assert run(capsys, "index", "in/b.mp4", "in/a.png", "--every_s", "0.1", "-m", models / "clip", "-o", "idx")[0] == 0
    Image.fromarray(stills[3]).save("query.png")
    code, out, _ = run(capsys, "search", "query.png", "in/b.mp4", "--index", "idx", "--top", 2, "--format", "json")
    asked, clip = json.loads(out)
    assert (code, asked["kind"], clip["kind"]) == (0, "image", "video")
    hit = asked["results"][0]
    assert hit["file"] == f"{folder / 'b.mp4'} @ {hit['time']:g} s"
    code, _, _ = run(capsys, "search", "in/b.mp4", "--index", "idx", "--top", 3, "-o", "page.html")
    page = Path("page.html").read_text()
    assert (code, page.count("<img"), "cannot be shown" in page) == (0, 4, False)
    assert "b.mp4#t=" in page


def test_embed_counts_frames_and_the_broken(capsys, models, folder):
    (folder / "cut.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(100))
    files = ("in/a.mp4", "in/cut.mp4", "in/a.png")
    code, _, err = run(capsys, "embed", "--images", *files, "--max_frames", 3, "-m", models / "clip", "-o", "v.npy")
    assert code == 1
    assert one_line(err).startswith("multimodal: error: in/cut.mp4: ")
    assert np.isnan(np.load("v.npy")).all(1).tolist() == [False, False, False, True, False]
    code, _, err = run(capsys, "embed", "a text", "--max_frames", 3)
    assert (code, "--max_frames: is for --images" in err) == (2, True)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--heatmap", "maps"), "--heatmap: is for images (in/a.mp4)"),
        (("--every_s", "1", "--scenes", "0.3"), "--scenes 0.3: cannot be combined with every_s"),
        (("--every_s", "0"), "argument --every_s/--every: must be a number in [0.001, 1000000]"),
        (("--max_frames", "0"), "argument --max_frames: must be an integer"),
    ],
)
def test_one_line(capsys, models, folder, flags, line):
    code, _, err = run(capsys, "classify", "in/a.mp4", "--labels", "red", "blue", "-m", models / "clip", *flags)
    assert code != 0
    assert line in err
    assert err.count("\n") == 1


def test_a_video_without_video_is_one_line(capsys, models, folder):
    (folder / "song.mp4").write_bytes(video(ramp(1), codec="mjpeg", sound=0.5, cover=True))
    code, _, err = run(capsys, "classify", "in/song.mp4", "--labels", "red", "blue", "-m", models / "clip")
    assert code == 1
    assert "in/song.mp4: no video stream" in one_line(err)
