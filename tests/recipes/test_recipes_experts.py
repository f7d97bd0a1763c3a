"""train_lm.py with a mixture of experts: it learns, balances, resumes to the bit, and has more experts than tokens."""

import json

import pytest

from multimodal.train.recipe_cli import start
from multimodal.weights.folder import load_folder
from tests.helpers.tiny_run import assert_same_states


def train(recipe, home, name, **changes):
    (home / "text.txt").write_text("the cat sat on the mat. a dog ran to the sea.\n" * 40)
    values = {"data": home / "text.txt", "run": home / name, "out": home / f"{name}-out", "steps": 60, "warmup": 5,
              "rate": 1e-2, "batch": 4, "width": 16, "layers": 2, "heads": 2, "context": 16, "experts": 4, "threads": 1,
              "precision": "float32", "evaluate_every": 30, "samples": 1, "sample_tokens": 4,
              "log_every": 1}  # fmt: skip
    values |= changes
    start(recipe.main, [word for key, value in values.items() for word in (f"--{key}", str(value)) if word != "True"])
    return [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ci
def test_experts_learn_and_are_balanced(tmp_path, load_recipe):
    rows = [row for row in train(load_recipe("train_lm"), tmp_path, "moe", balance=0.1) if "balance" in row]
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert 2.0 <= rows[-1]["balance"] < 2.3  # 2, the experts of a token, is the least
    config = load_folder(tmp_path / "moe-out").model.config.stack.block.experts
    assert (config.count, config.top) == (4, 2)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path, load_recipe):
    recipe = load_recipe("train_lm")
    for name, changes in (("whole", {}), ("part", {"steps": 3}), ("part", {"resume": True})):
        train(recipe, tmp_path, name, **({"steps": 6, "experts": 3, "dropout": 0.1} | changes))
    assert_same_states(tmp_path / "whole", tmp_path / "part", 6)


@pytest.mark.ci
def test_more_experts_than_tokens_of_a_batch_train(tmp_path, load_recipe):
    rows = train(load_recipe("train_lm"), tmp_path, "many", experts=12, batch=1, context=4, steps=5)
    assert all(row["loss"] < 20 for row in rows if "loss" in row)


def test_more_experts_a_token_than_experts_are_one_line(tmp_path, load_recipe, capsys):
    with pytest.raises(SystemExit) as end:
        train(load_recipe("train_lm"), tmp_path, "bad", experts=2, experts_per_token=3)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--experts_per_token must be 1 to 2, the number of experts (got 3)" in last
