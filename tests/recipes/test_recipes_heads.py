"""finetune_text.py on words' tags, answers and choices: what it learns, how it resumes, and the commands after it."""

import json
import random

import pytest

from multimodal.blocks.stack import transformer
from multimodal.cli.main import main
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers.spread import spread
from tests.helpers.tiny_run import assert_same_states

PLACES, VERBS, NAMES = ("vienna", "york", "paris", "oslo"), ("left", "saw"), ("ann", "bob", "eve")


def texts() -> dict[str, list[dict]]:
    """Sentences such as "bob saw old vienna" with tags, a question and choices."""
    dice = random.Random(1)
    found: dict[str, list[dict]] = {"tagging": [], "qa": [], "choice": []}
    for _ in range(60):
        name, verb, place = dice.choice(NAMES), dice.choice(VERBS), dice.choice(PLACES)
        old = dice.random() < 0.5
        words = [name, verb, *["old"] * old, place]
        tags = ["B-PER", "O", *["B-LOC"] * old, "I-LOC" if old else "B-LOC"]
        found["tagging"].append({"tokens": words, "tags": tags})
        context = " ".join(words)
        answers = [{"text": place, "answer_start": context.index(place)}]
        found["qa"].append({"question": f"who {verb} where", "context": context, "answers": answers})
        choices = [place, name]
        found["choice"].append({"question": f"{name} {verb}", "choices": choices[:: dice.choice((1, -1))], "label": 0})
        found["choice"][-1]["label"] = found["choice"][-1]["choices"].index(place)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    for task, rows in texts().items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = " ".join([*PLACES, *VERBS, *NAMES, "who where old"])
    tokenizer = WordPieceTokenizer.train([words] * 3, 90, context=32)
    config = TextConfig(tokenizer.vocab_size, 32, transformer(32, 2, 2, 64), causal=False, segments=2)
    save_folder(Checkpoint(TextTransformer(config), tokenizer), folder / "encoder")
    return folder


def run(recipe, home, task, name, **changes):
    values = {"model": home / "encoder", "data": home / f"{task}.jsonl", "val": home / f"{task}.jsonl", "task": task,
              "out": home / f"{name}-out", "run": home / name, "steps": 60, "warmup": 2, "rate": 1e-2, "budget": 600,
              "dropout": 0, "evaluate_every": 100, "threads": 1, "precision": "float32", "average": 0.8}  # fmt: skip
    pairs = ((f"--{key}", str(value)) for key, value in (values | changes).items())
    figures = start(recipe.main, [word for pair in pairs for word in pair if word != "True"])
    return figures[f"from {home / 'encoder'}"]


TASKS = [("tagging", "f1"), ("qa", "exact"), ("choice", "accuracy")]


@pytest.mark.parametrize(("task", "figure"), spread(TASKS, 3, pytest.mark.slow, pytest.mark.ci))
def test_a_head_is_learned_measured_and_used(home, load_recipe, capsys, task, figure):
    figures = run(load_recipe("finetune_text"), home, task, task)
    assert figures[figure] > 0.9
    made, out = load_folder(home / f"{task}-out"), str(home / f"{task}-out")
    assert made.card["fine_tuned"]["task"] == task
    capsys.readouterr()
    data = str(home / f"{task}.jsonl")
    commands = {
        "tagging": ["tag", "eve saw old oslo", "-m", out, "--merge", "first"],
        "qa": ["answer", "who saw where", "--context", "eve saw old oslo", "-m", out, "--top_k", "2"],
        "choice": ["answer", "eve saw", "--choices", "eve", "oslo", "-m", out],
    }
    results = []
    for words in (["evaluate", task, data, "-m", out], commands[task]):
        with pytest.raises(SystemExit) as end:
            main([*words, "--format", "json", "--quiet"])
        assert end.value.code == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["sets"][data][figure] == pytest.approx(figures[figure])
    if task == "tagging":
        assert [(one["label"], one["word"]) for one in results[1][0]["entities"]] == [
            ("PER", "eve"),
            ("LOC", "old oslo"),
        ]
    else:
        assert results[1]["answers"][0]["text"] == "oslo"
        assert results[1]["answers"][0]["score"] > 0.5


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(home, load_recipe):
    recipe = load_recipe("finetune_text")
    for name, changes in (("whole", {}), ("part", {"steps": 3}), ("part", {"resume": True})):
        run(recipe, home, "qa", name, **({"steps": 6, "dropout": 0.2} | changes))
    assert_same_states(home / "whole", home / "part", 6)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tag", "a", "--file", "b", "-m", "x"], "give one of TEXT and --file"),
        (["answer", "a", "-m", "x"], "give one of --context, --file and --choices"),
        (["answer", "a", "--context", "b", "--choices", "c", "-m", "x"], "give one of --context, --file and --choices"),
        (["answer", "a", "--choices", "b", "c", "--null", "-m", "x"], "--null: is for --context and --file"),
        (["tag", "a", "-m", "ENCODER"], "expected a token classifier, got text without one"),
        (["answer", "a", "--context", "b", "-m", "ENCODER"], "expected a model that finds answers in a text"),
        (["answer", "a", "--choices", "b", "b", "-m", "ENCODER"], "'b' is repeated"),
        (["tag", "a"], "no model ships for tag"),
        (["evaluate", "qa", __file__, "-m", "ENCODER"], "expected a model that finds answers in a text"),
    ],
)
def test_what_a_command_cannot_use_is_one_line(home, capsys, words, line):
    with pytest.raises(SystemExit) as end:
        main([str(home / "encoder") if word == "ENCODER" else word for word in words])
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code in (1, 2)
    assert line in last
