"""`multimodal index` and `multimodal search` as a person uses them."""

import csv
import io
import json
import signal
from pathlib import Path

import pytest

from multimodal.cli.vision.search import kind_of
from multimodal.tasks.retrieve.gallery import MOST, gallery
from tests.helpers.commands import Page, one_line, run
from tests.helpers.data.index_files import cut, write_image
from tests.helpers.processes.programs import LIMIT, forked
from tests.helpers.spread import thin

pytestmark = pytest.mark.filterwarnings("always")  # a warning is a line, as outside of pytest


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of eight images; the tests run beside it."""
    for number in range(8):
        write_image(tmp_path / "photos" / f"{number}.png", number)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


@pytest.fixture
def made(capsys, models, photos):
    code, out, err = run(capsys, "index", "photos", "-o", "made", "-m", models / "clip")
    assert (code, err) == (0, "")
    assert out == "made: 8 images (8 new, 0 changed, 0 dropped); 16 x float16; exact search\n"
    return Path("made")


@pytest.mark.ci
def test_formats_name_each_query_its_kind_and_the_best_first(capsys, made, photos):
    flags = ["search", "a red square", "photos/3.png", "--index", made, "--top", 3, "--format"]
    code, out, err = run(capsys, *flags, "json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [(r["query"], r["kind"]) for r in found] == [("a red square", "text"), ("photos/3.png", "image")]
    scores = [[hit["score"] for hit in r["results"]] for r in found]
    assert all(len(s) == 3 and s == sorted(s, reverse=True) for s in scores)
    assert found[1]["results"][0]["file"] == str(photos / "3.png")
    assert found[1]["results"][0]["score"] == pytest.approx(1, abs=1e-3)
    assert [json.loads(line) for line in run(capsys, *flags, "jsonl")[1].splitlines()] == found
    rows = list(csv.DictReader(io.StringIO(run(capsys, *flags, "csv")[1])))
    assert [(r["query"], r["kind"], r["file"], float(r["score"])) for r in rows] == [
        (r["query"], r["kind"], hit["file"], hit["score"]) for r in found for hit in r["results"]
    ]
    table = run(capsys, *flags, "table")[1].splitlines()
    assert (table[0], table[4]) == ("text: a red square", "image: photos/3.png")
    assert table[5] == f"    {scores[1][0]:.4f}  {photos / '3.png'}"
    assert json.loads(run(capsys, *flags, "json", "--exact")[1]) == found
    page = Page(run(capsys, *flags, "html")[1])
    links = [values["href"] for tag, values in page.attributes if tag == "a"]
    assert links == [Path(hit["file"]).as_uri() for r in found for hit in r["results"]]
    assert page.tags.count("img") == 7  # the query of the second, too
    assert all(f"{score:.4f}" in page.text for each in scores for score in each)


def test_files_that_are_gone_are_told(capsys, made, photos):
    (photos / "3.png").rename(photos.parent / "3.png")
    code, out, err = run(capsys, "search", "a red square", "--index", made, "--top", 8)
    assert code == 0
    assert f"made: 1 of 8 files found are not there, such as {photos / '3.png'};" in err
    assert "3.png" in out
    (photos.parent / "3.png").rename(photos / "3.png")
    assert run(capsys, "search", "a red square", "--index", made, "--top", 8) == (0, out, "")


def test_a_gallery_is_escaped_bounded_and_says_what_is_gone(photos, recwarn):
    evil = "javascript:alert(1)//<b>.png"
    hits = [{"file": str(photos / f"{n % 8}.png"), "score": 0.5} for n in range(MOST + 20)]
    hits[1] = {"file": evil, "score": 0.5}
    page = Page("\n".join(gallery([{"query": "<b>", "kind": "text", "results": hits}] * 2, "made")))
    assert "b" in page.tags  # scores
    assert page.text.count("<b>") == 2 + 2  # two queries, two names
    assert page.text.count(f"{MOST // 2 + 20} more images are left out.") == 2
    assert page.tags.count("figure") == MOST
    assert page.tags.count("img") == MOST - 2
    assert {values["href"].partition(":")[0] for tag, values in page.attributes if tag == "a"} == {"file"}
    (warning,) = recwarn
    assert str(warning.message).startswith("cannot show 1 of 9 images (")


@pytest.mark.ci
def test_the_search_takes_the_model_of_the_index_or_the_same_one_elsewhere(capsys, models, made, tmp_path):
    search = ["search", "red", "--index", made, "--format", "json"]
    plain = run(capsys, *search)
    assert run(capsys, *search, "-m", models / "clip") == plain
    code, out, err = run(capsys, *search, "-m", "clip-vit-16")
    assert (code, out) == (1, "")
    assert "other weights" in one_line(err)
    code, _, err = run(capsys, "index", "photos", "-o", made)
    assert code == 1
    assert "--overwrite" in one_line(err)


def test_a_text_that_is_a_file_is_a_image_unless_it_is_said(capsys, made, photos):
    Path("cat").write_bytes((photos / "2.png").read_bytes())
    Path("photos.dir").mkdir()
    assert [kind_of(q) for q in ("cat", "dog", "photos.dir", "none.jpg", "a" * 5000, "a\0b")] == [
        "image", "text", "text", "missing", "text", "text",
    ]  # fmt: skip
    flags = ["--index", made, "--top", 1, "--format", "json"]
    found = json.loads(run(capsys, "search", "cat", "--text", "cat", "--image", "cat", *flags)[1])
    assert [r["kind"] for r in found] == ["image", "image", "text"]
    assert found[0]["results"] == found[1]["results"] != found[2]["results"]


def test_bad_queries_are_told_and_the_others_are_answered(capsys, made):
    Path("broken.png").write_bytes(b"no image")
    code, out, err = run(capsys, "search", "none.jpg", "broken.png", " ", "red", "--index", made, "--format", "json")
    assert code == 1
    assert [r["query"] for r in json.loads(out)] == ["red"]
    assert [line.split(": ")[2] for line in err.splitlines()[:2]] == ["none.jpg", "broken.png"]
    assert "empty" in err.splitlines()[2]
    assert err.count("\n") == 4  # and that there are only eight images for --top 10
    assert "--top 10: the index holds 8 images" in err
    code, out, err = run(capsys, "search", "a " * 200, "--index", made, "--top", 1)
    assert code == 0
    assert "is cut to 40 tokens" in err


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("flags", "code", "cause"),
    [
        (["red", "--index", "nowhere"], 1, "no index ("), (["red", "--index", "photos"], 1, "no index ("),
        (["--index", "made"], 2, "QUERY"), (["red"], 2, "--index"), (["red", "--index", "made", "--top", "0"], 2, "0"),
        (["red", "--index", "made", "--device", "abacus"], 1, "abacus"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_used_are_one_line(capsys, made, flags, code, cause):
    found, out, err = run(capsys, "search", *flags)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert cause in err


@pytest.mark.ci
def test_index_goes_on_after_broken_files_and_a_missing_folder_drops_nothing(capsys, models, photos):
    (photos / "broken.jpg").write_bytes(b"no image")
    index = ["index", "photos", "nowhere", "-o", "made", "-m", models / "clip"]
    code, out, err = run(capsys, *index)
    assert (code, out) == (1, "made: 8 images (8 new, 0 changed, 0 dropped); 16 x float16; exact search\n")
    assert ["nowhere" in line or "broken.jpg" in line for line in err.splitlines()] == [True, True]
    (photos / "broken.jpg").unlink()
    (photos / "0.png").unlink()
    code, out, _ = run(capsys, *index[:2], *index[3:])
    assert (code, out.split(";")[0]) == (0, "made: 7 images (0 new, 0 changed, 1 dropped)")
    write_image(Path("photos2/new.png"), 9)
    photos.rename("moved")  # as a disk that is not mounted
    code, out, err = run(capsys, *index[:2], *index[3:])
    assert (code, out) == (1, "")
    one_line(err)
    code, out, err = run(capsys, *index[:2], "photos2", *index[3:])
    assert (code, out.split(";")[0]) == (1, "made: 8 images (1 new, 0 changed, 0 dropped)")
    assert len(run(capsys, "search", "red", "--index", "made", "--format", "csv")[1].splitlines()) == 9


def test_a_damaged_index_is_one_line(capsys, made):
    cut(made / "vectors-1.npy")
    code, out, err = run(capsys, "search", "red", "--index", made)
    assert (code, out) == (1, "")
    assert "vectors-1.npy: cut off" in one_line(err)


KILLED = """
import os, signal, sys
from multimodal.cli.vision import index
from multimodal.cli.main import main
class Killer:
    def __init__(self, name): pass
    def __call__(self, done, of, broken=None):
        if done >= 4:
            os.kill(os.getpid(), signal.{})
            signal.pause()
index.Progress = Killer
main()
"""


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGINT"])
def test_a_killed_call_is_gone_on_with(capsys, models, photos, kind):
    index = ["index", "photos", "-o", "made", "-m", str(models / "clip"), "--batch_size", "2"]
    with forked(KILLED.format(kind), *index) as done:
        out, err = done.communicate(timeout=LIMIT)
    assert (done.returncode, out) == ({"SIGKILL": -signal.SIGKILL, "SIGINT": 130}[kind], "")
    said = "multimodal: made: stopped; the same command resumes\n"
    assert err == {"SIGKILL": "", "SIGINT": said}[kind]
    code, out, _ = run(capsys, *index)
    assert (code, out.split(";")[0]) == (0, "made: 8 images (4 new, 0 changed, 0 dropped)")
