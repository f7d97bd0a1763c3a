"""Training translators: parallel files, pairs by direction, the loss, and the recipe from files to translations."""

import gzip
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from multimodal.errors import DataError
from multimodal.tasks.text.translate import translate
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.train.objectives.text.translation import (
    CollatePairs,
    ParallelTexts,
    Translating,
    pair_plan,
    read_parallel,
    translator,
)
from multimodal.weights.folder import Checkpoint, load_folder
from tests.helpers.spread import thin
from tests.helpers.tiny import randomized

TEXTS = {
    "en": ["a dog runs", "a cat sleeps", "two dogs run", "", "a cat runs"],
    "de": ["ein Hund rennt", "eine Katze schläft", "zwei Hunde rennen", "leer", "eine Katze rennt"],
    "fr": ["un chien court", "un chat dort", "deux chiens courent", "vide", "un chat court"],
}
DIRECTIONS = [("en", "de"), ("de", "en"), ("fr", "de")]


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    lines = [line for rows in TEXTS.values() for line in rows]
    return BytePairTokenizer.train(lines * 2, 300, languages=list(TEXTS))


def corpus(tokenizer: BytePairTokenizer, longest: int = 40) -> ParallelTexts:
    return ParallelTexts(TEXTS, tokenizer, DIRECTIONS, tokenizer.eos_id, longest)


def write(folder: Path, texts: dict[str, list[str]], name: str = "train") -> str:
    for language, rows in texts.items():
        (folder / f"{name}.{language}.gz").write_bytes(gzip.compress("".join(f"{row}\n" for row in rows).encode()))
    return str(folder / name)


def test_language_tokens_come_last_and_no_text_spells_them(tokenizer, tmp_path):
    ids = tokenizer.language_ids
    assert sorted(ids.values()) == list(range(tokenizer.vocab_size - 3, tokenizer.vocab_size))
    assert not set(ids.values()) & set(tokenizer.encode("<de> <en> <fr>"))
    assert tokenizer.decode([ids["de"], *tokenizer.encode("Hund")]) == "Hund"
    assert tokenizer.decode([ids["de"], *tokenizer.encode("Hund")], skip_control=False) == "<de>Hund"
    tokenizer.save(tmp_path)
    again = tokenizer_from(tmp_path)
    assert (again.language_ids, again.vocab_size) == (ids, tokenizer.vocab_size)
    assert len(again.token_bytes()) == again.vocab_size


def test_a_pair_is_told_its_languages(tokenizer):
    source = corpus(tokenizer)
    pair = source.read(("fr", "de", 2))
    ids = tokenizer.language_ids
    assert (pair.source[0], pair.source[-1]) == (ids["fr"], tokenizer.eos_id)
    assert pair.answer[:2] == [tokenizer.eos_id, ids["de"]]
    assert tokenizer.decode(pair.answer) == "zwei Hunde rennen"
    assert len(source) == 4 * 2 + 5  # lines with an empty side are left out
    assert source.left_out == 2
    assert source.sizes == [max(len(pair.source), len(pair.answer) - 1) for pair in map(source.read, source.keys)]


def test_directions_come_as_often_as_asked(tokenizer):
    source = corpus(tokenizer)
    plan = pair_plan(source, {("en", "de"): 2.0, ("fr", "de"): 0.5}, 64, 0)
    counted = [Counter(key for batch in plan(epoch) for key in batch) for epoch in range(40)]
    assert all(epoch[key] == 2 for epoch in counted for key in source.keys if key[:2] == ("en", "de"))
    assert all(epoch[key] == 1 for epoch in counted for key in source.keys if key[:2] == ("de", "en"))
    some = sum(n for epoch in counted for key, n in epoch.items() if key[:2] == ("fr", "de"))
    assert 60 < some < 140  # of 200
    assert plan(3) == pair_plan(source, {("en", "de"): 2.0, ("fr", "de"): 0.5}, 64, 0)(3)


def test_the_loss_is_that_of_the_answers_tokens_alone(tokenizer):
    source = corpus(tokenizer)
    model = randomized(translator(tokenizer, 16, (1, 1), 2, 32, 40, 0.0))
    pairs = [source.read(key) for key in source.keys[:6]]
    batch = CollatePairs(tokenizer.pad_id)(pairs)
    found = Translating(model, smoothing=0.1)
    expected = count = 0
    for pair in pairs:
        logits = model(torch.tensor([pair.source]), torch.tensor([pair.answer[:-1]]))[0]
        targets = torch.tensor(pair.answer[1:])
        expected += F.cross_entropy(logits[1:], targets[1:], reduction="sum", label_smoothing=0.1)
        count += len(targets) - 1
    assert_close(found(batch)["loss"], expected, atol=1e-3, rtol=1e-5)
    assert found.counts(batch)["loss"] == count
    assert 0 <= batch.padding < 1


def test_files_that_do_not_go_together_are_named(tmp_path):
    prefix = write(tmp_path, {"en": ["a", "b"], "de": ["c"]})
    with pytest.raises(DataError, match=r"train\.de\.gz: expected 2 lines as in .*train\.en(\.gz)? \(got 1\)"):
        read_parallel(prefix, ["en", "de"])
    with pytest.raises(DataError, match=r"train\.fr: no such file, nor train\.fr\.gz"):
        read_parallel(prefix, ["en", "fr"])
    (tmp_path / "train.cs").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"train\.cs: "):
        read_parallel(prefix, ["cs"])


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("train_translation")


def run(recipe, folder: Path, *flags: str) -> None:
    prefix = write(folder, {name: rows * 3 for name, rows in TEXTS.items()})
    sizes = ["--width", "16", "--hidden", "32", "--encoder_layers", "1", "--decoder_layers", "1", "--heads", "2"]
    recipe.start(recipe.main, [
        "--train", prefix, "--val", prefix, "--languages", *TEXTS, "--vocabulary", "300", *sizes, "--budget", "128",
        "--run", str(folder / "run"), "--out", str(folder / "out"), "--judged", "1", "--beams", "2", "--threads", "1",
        "--context", "24",
        *flags,
    ])  # fmt: skip


@pytest.mark.ci
@pytest.mark.usefixtures("blank_figures")
def test_the_recipe_makes_a_translator(recipe, tmp_path):
    run(
        recipe, tmp_path, "--steps", "3", "--test", str(tmp_path / "train"), "--often", "en-de=2", "fr-en=0",
        "--resume",
        "--groups", "en,de", "fr", "--grouped", "0", "1",
    )  # fmt: skip
    made = load_folder(tmp_path / "out")
    assert set(made.card["bleu"]) == {"en-de", "de-en", "fr-de", "de-fr", "en-fr"}
    assert all(math.isfinite(score) for score in made.card["bleu"].values())
    assert translate("", made, "en", "de") == ""
    assert (tmp_path / "run" / "report" / "report.md").is_file()


@pytest.mark.ci
@pytest.mark.usefixtures("blank_figures")
def test_a_translator_is_trained_further(recipe, tmp_path):
    run(recipe, tmp_path, "--steps", "2")
    given = load_folder(tmp_path / "out")
    more = ["--run", str(tmp_path / "run-2"), "--out", str(tmp_path / "out-2"), "--rate", "1e-9"]
    run(recipe, tmp_path, "--init", str(tmp_path / "out"), "--steps", "1", *more)
    made = load_folder(tmp_path / "out-2")
    assert made.tokenizer.encode("a cat sleeps") == given.tokenizer.encode("a cat sleeps")
    # weights are stored in 16 bits
    for name, weight in given.model.state_dict().items():
        assert_close(made.model.state_dict()[name], weight, atol=1e-3, rtol=1e-2)


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("flags", "says"), [
    (("--init", "whisper-mini"), "--init whisper-mini: expected a model of this recipe, got speech_to_text"),
    (("--init", "translator-mini", "--languages", "en", "it", "--judge", "en-it"), "-mini: has no language it"),
    (("--often", "en-xx=2"), "--often en-xx=2: is no DIRECTION=NUMBER"),
    (("--often", "en-de=often"), "--often en-de=often: is no DIRECTION=NUMBER"),
    (("--judge", "en-cs"), "--judge must be one of en-de, en-fr"),
    (("--groups", "en,de", "fr"), "--groups needs --grouped"),
    (("--groups", "en,de", "--grouped", "0", "1"), "--groups en,de: expected each of en, de, fr once"),
    (("--groups", "en,de", "fr", "--grouped", "2", "0"), "--grouped must be 0 to 1, the encoder_layers"),
])  # fmt: skip
def test_wrong_flags_are_said_in_one_line(recipe, tmp_path, capsys, flags, says):
    with pytest.raises(SystemExit) as end:
        run(recipe, tmp_path, "--steps", "1", *flags)
    assert end.value.code in (1, 2)
    assert says in capsys.readouterr().err


@pytest.mark.ci
def test_a_translator_learns_its_few_sentences(tokenizer):
    model = translator(tokenizer, 32, (1, 1), 2, 64, 40, 0.0)
    source = corpus(tokenizer)
    objective = Translating(model.train(), smoothing=0.0)
    batch = CollatePairs(tokenizer.pad_id)([source.read(key) for key in source.keys if key[:2] == ("en", "de")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (objective(batch)["loss"] / objective.counts(batch)["loss"]).backward()
        optimizer.step()
    made = Checkpoint(model.eval(), tokenizer)
    assert translate(["a cat sleeps", "two dogs run"], made, "en", "de") == [TEXTS["de"][1], TEXTS["de"][2]]
