"""The studies of cleaning and of scaling, in their smallest form."""

import json

import pytest

from multimodal.train.recipe_cli import start

SMALL = ["--layers", "1", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "2", "--threads", "1"]


def test_the_study_of_cleaning_trains_on_each_kind_of_text(load_recipe, tmp_path, capsys, drawn):
    sentence = "The {} of the town {} was built of stone in the year {} . "
    lines = ["".join(sentence.format(a, b, n) for b in "abc") for n in range(100, 130) for a in ("mill", "hall")]
    (tmp_path / "text.txt").write_text("\n".join(["= Towns =", *lines]))
    start(load_recipe("study_cleaning").main, ["--data", str(tmp_path / "text.txt"), "--run", str(tmp_path / "run"),
          "--size", "3000", "--judged", "600", "--seeds", "1", "--width", "16", *SMALL])  # fmt: skip
    results = json.loads((tmp_path / "run" / "study.json").read_text())
    assert list(results) == ["dirty", "cleaned, with duplicates", "cleaned", "clean from the start"]
    assert all(1 < value < 100 for row in results.values() for value in row)
    dirty = "".join(json.loads(line)["text"] for line in (tmp_path / "run" / "dirty.jsonl").read_text().splitlines())
    clean = (tmp_path / "run" / "clean-True.txt").read_text()
    assert "cookies" in dirty
    assert not any(word in clean for word in ("cookies", "JavaScript", "ipsum", "{"))
    assert (tmp_path / "run" / "study.png").stat().st_size > 1000
    assert "clean from the start" in capsys.readouterr().out


def test_the_study_of_scaling_fits_a_law_to_each_kind(load_recipe, tmp_path, drawn):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. a dog ran to the cat. " * 60)
    start(load_recipe("study_scaling").main, ["--data", str(tmp_path / "text.txt"), "--run", str(tmp_path / "run"),
          "--widths", "8", "16", "--judged", "200", "--evaluate_every", "1", *SMALL])  # fmt: skip
    record = json.loads((tmp_path / "run" / "study.json").read_text())
    for kind in ("transformer", "LSTM"):
        runs = record["runs"][kind]
        assert runs["8"]["parameters"] < runs["16"]["parameters"]
        assert [len(runs["8"][name]) for name in ("steps", "places")] == [2, 16]
        (first, loss), (second, _) = runs["8"]["steps"]
        assert second == pytest.approx(2 * first) == pytest.approx(2 * 6 * runs["8"]["parameters"] * 2 * 16)
        assert 0 < loss < 4
        assert record["laws"][kind]["r2"] == pytest.approx(1)  # of two sizes
    assert (tmp_path / "run" / "study.png").stat().st_size > 1000
