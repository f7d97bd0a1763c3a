"""The studies in their smallest form."""

import json

import pytest

from multimodal.errors import TrainingError
from multimodal.train.recipe_cli import start

SMALL = ["--layers", "1", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "2", "--threads", "1"]


@pytest.mark.ci
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
    assert b"</svg>" in (tmp_path / "run" / "study.svg").read_bytes()
    assert "clean from the start" in capsys.readouterr().out


@pytest.mark.slow
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


@pytest.mark.ci
def test_the_study_of_experts_compares_mixtures_of_equal_compute(load_recipe, tmp_path, drawn, capsys):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. a dog ran to the cat. " * 60)
    flags = ["--study", "experts", "--data", str(tmp_path / "text.txt"), "--run", str(tmp_path / "run"),
             "--mixtures", "3", "--judged", "200", "--width", "8", *SMALL]  # fmt: skip
    start(load_recipe("study").main, flags)
    results = json.loads((tmp_path / "run" / "study.json").read_text())
    assert [name.split(",")[0] for name in results] == ["one feed-forward", "2 of 3 experts"]
    assert "2 of 3 experts" in capsys.readouterr().out
    assert b"</svg>" in (tmp_path / "run" / "study.svg").read_bytes()


@pytest.mark.slow
def test_the_study_in_context_measures_heads_tasks_and_functions(load_recipe, tmp_path, drawn):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. a dog ran to the cat. " * 60)
    flags = ["--data", str(tmp_path / "text.txt"), "--run", str(tmp_path / "run"),
             "--widths", "8", "16", "--shots", "3",
             "--task_steps", "2", "--function_steps", "2", "--function_layers", "1", "--points", "5", "--judged", "6",
             "--evaluations", "2", "--ablate", "1", "--width", "8", *SMALL, "--context", "20"]  # fmt: skip
    start(load_recipe("study_in_context").main, flags)
    record = json.loads((tmp_path / "run" / "study.json").read_text())
    for run in record["phase"]["text"]:
        assert [row["step"] for row in run["rows"]] == [0, 1, 2]
        assert all(len(row["losses"]) == 20 and 0 < row["prefix"][0][1] < 1 for row in run["rows"])
        assert len(run["copying"][0]) == len(run["rows"][0]["prefix"][0]) == 2
        costs = run["ablated"]
        assert costs["none"] not in (costs["induction"], costs["random"][0])
    small, large = (record["shots"][width] for width in ("8", "16"))
    assert small[0]["parameters"] < large[0]["parameters"]
    assert [len(small[0]["accuracy"][task]) for task in ("copy", "antonym", "sum")] == [4, 4, 4]
    for kind in ("linear", "sparse"):
        for result in record["functions"][kind]:
            assert max(result["least squares"][3:]) < 1e-3 < min(result["transformer"])
    assert "| least squares |" in (tmp_path / "run" / "study.md").read_text()
    for name in ("phase", "shots"):
        assert 1000 < (tmp_path / "run" / f"{name}.png").stat().st_size < 60_000
        assert b"</svg>" in (tmp_path / "run" / f"{name}.svg").read_bytes()


@pytest.mark.slow
def test_the_study_of_translation_compares_models_of_equal_compute_and_of_equal_size(load_recipe, tmp_path, drawn):
    for language, noun in {"en": "the dog {}", "de": "der Hund {}", "fr": "le chien {}", "cs": "pes {}"}.items():
        for part, count in (("train", 20), ("test", 3)):
            (tmp_path / f"{part}.{language}").write_text("".join(f"{noun.format(n)}\n" for n in range(count)))
    flags = ["--train", str(tmp_path / "train"), "--test", str(tmp_path / "test"), "--run", str(tmp_path / "run"),
             "--vocabulary", "300", "--width", "16", "--heads", "2", "--hidden", "32", "--context", "24",
             "--seeds", "1", "--budget", "64", "--judged", "1", "--steps", "1", "--threads", "1"]  # fmt: skip
    recipe = load_recipe("study_translation")
    start(recipe.main, flags)
    cells = json.loads((tmp_path / "run" / "study.json").read_text())["cells"]
    dense, grouped, wider = (cell["parameters"] for cell in cells)
    assert dense < grouped
    assert abs(wider / grouped - 1) < 0.01
    assert all(len(cell["bleu"]) == 12 for cell in cells)
    assert "| BLEU, en → de |" in (tmp_path / "run" / "study.md").read_text()
    start(recipe.main, [*flags, "--resume"])  # finished cells are kept
    assert json.loads((tmp_path / "run" / "study.json").read_text())["cells"] == cells


@pytest.fixture
def texts(tmp_path):
    for part, language, count in (("train", "en", 60), ("train", "de", 60), ("val", "en", 4), ("val", "de", 4)):
        noun = {"en": "the dog number {} runs to the house .", "de": "der hund nummer {} rennt zum haus ."}[language]
        (tmp_path / f"{part}.{language}").write_text("".join(f"{noun.format(n)}\n" for n in range(count)))
    (tmp_path / "films.tsv").write_text("".join(f"a fine film {n}\t1\na dull film {n}\t0\n" for n in range(20)))
    return [
        "--lines", str(tmp_path / "train.en"), str(tmp_path / "train.de"), "--labelled", str(tmp_path / "films.tsv"),
        "--labelled_val", str(tmp_path / "films.tsv"), "--pairs", str(tmp_path / "train"),
        "--pairs_val", str(tmp_path / "val"), "--run", str(tmp_path / "run"), "--vocabulary", "160", "--width", "8",
        "--heads", "2", "--context", "24", "--budget", "64", "--steps", "2", "--tune", "1", "--tune_labelled", "1",
        "--seeds", "1", "--shares", "0.5", "--spans", "2", "--repeats", "2", "--crossed", "spans", "--threads", "1",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_killed_study_of_t5_keeps_its_finished_cells(load_recipe, texts, tmp_path, monkeypatch, last_line):
    recipe = load_recipe("study_t5")
    monkeypatch.setattr(recipe, "OBJECTIVES", {name: recipe.OBJECTIVES[name] for name in ("spans", "deshuffle")})
    judge, judged = recipe.judged, []

    def third_fails(cell, *others):
        judged.append(cell)
        if len(judged) == 3:
            raise TrainingError("killed")
        return judge(cell, *others)

    monkeypatch.setattr(recipe, "judged", third_fails)
    assert last_line(lambda: start(recipe.main, texts)).endswith("killed")
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "cells").glob("*.json")}
    assert len(done) == 2
    assert "holds a study; resume it" in last_line(lambda: start(recipe.main, texts))
    assert "tune 2 (was 1)" in last_line(lambda: start(recipe.main, [*texts, "--resume", "--tune", "2"]))
    start(recipe.main, [*texts, "--resume"])
    found = json.loads((tmp_path / "run" / "study.json").read_text())["cells"]
    assert len(judged) == len(found) + 1 == 12  # cells, of which the third twice
    assert all((tmp_path / "run" / "cells" / name).stat().st_mtime_ns == time for name, time in done.items())
    assert {(row["architecture"], row["objective"]) for row in found} == {
        *((name, "spans") for name in recipe.ARCHITECTURES), *(("encdec", name) for name in recipe.OBJECTIVES),
        ("encdec", "none"), ("encdec", "replace"),
    }  # fmt: skip
    sizes = {row["architecture"]: row["parameters"] for row in found}
    assert sizes["half"] < sizes["encdec"] > sizes["shared"] > sizes["causal"] == sizes["prefix"]
    assert all(0 <= row["sst2"] <= 100 and 0 < row["nats"] < 9 for row in found)
    assert "| encoder-decoder, shared |" in (tmp_path / "run" / "study.md").read_text()


@pytest.mark.ci
def test_a_study_of_t5_needs_two_labels_and_enough_text(load_recipe, texts, last_line):
    recipe = load_recipe("study_t5")
    assert "too few for 500 steps" in last_line(lambda: start(recipe.main, [*texts, "--steps", "500"]))
