"""Training sentence encoders: pairs, the objective beside a written-out InfoNCE, the recipe from files to vectors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import multimodal
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import ProjectionConfig
from multimodal.tasks.text.embed import embed
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.objectives.text.masked import EncoderSettings, bert
from multimodal.train.objectives.text.sentences import (
    CollateSentences,
    SentenceEncoder,
    SentencePairs,
    grown,
    sentence_encoder,
    without_heads,
)
from multimodal.train.objectives.text.translation import AlignedTexts
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers.data.contrast import EXACT, gradient
from tests.helpers.tiny import randomized
from tests.helpers.tiny_run import assert_same_states

TEXTS = {
    "en": ["a dog runs", "a cat sleeps here now", "two birds sing", "", "one fish swims"],
    "de": ["ein Hund rennt", "eine Katze schläft jetzt hier", "zwei Vögel singen", "leer", "ein Fisch schwimmt"],
    "fr": ["un chien court", "un chat dort ici", "deux oiseaux chantent", "vide", "un poisson nage"],
}
PAIRS = [("en", "de"), ("en", "fr"), ("de", "fr")]
SIZES = EncoderSettings(16, 1, 2, 24, dropout=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> WordPieceTokenizer:
    return WordPieceTokenizer.train([line for rows in TEXTS.values() for line in rows] * 2, 120, context=24)


@pytest.fixture
def corpus(tokenizer) -> AlignedTexts:
    return AlignedTexts(TEXTS, tokenizer, PAIRS, SIZES.context)


def test_each_sentence_must_find_its_line_among_all(tokenizer, corpus):
    """InfoNCE both ways, on vectors that `embed` gives each sentence alone."""
    encoder = SentenceEncoder(randomized(sentence_encoder(tokenizer.vocab_size, SIZES))).double()
    keys = [("en", "de", 0), ("de", "fr", 1), ("en", "fr", 2), ("en", "fr", 0)]  # line 0 twice
    collate = CollateSentences(tokenizer.pad_id, SIZES.context)
    loss, whole = gradient(SentencePairs(encoder), [collate([corpus.read(key) for key in keys])])
    made = Checkpoint(encoder.text, tokenizer)
    a, b = (
        torch.cat([embed([TEXTS[key[side]][key[2]]], made, "mean", True).double() for key in keys]) for side in (0, 1)
    )
    logits = a @ b.T / 0.05
    expected = 0.0
    for scores in (logits, logits.T):
        shares = [scores[row].softmax(0) for row in range(4)]
        same = (shares[0][0].log() + shares[0][3].log()) / 2, (shares[3][0].log() + shares[3][3].log()) / 2
        expected -= (shares[1][1].log() + shares[2][2].log() + sum(same)) / 8
    assert loss == pytest.approx(float(expected), abs=1e-5)
    parts = [collate([corpus.read(key) for key in part]) for part in (keys[:1], keys[1:])]
    again, found = gradient(SentencePairs(encoder), parts)
    assert again == pytest.approx(loss, abs=1e-9)
    for name, one in whole.items():
        assert_close(found[name], one, **EXACT)
    assert whole["logit_scale"].abs() > 1e-3


def test_a_new_encoder_is_a_bag_of_words(tokenizer):
    made = Checkpoint(sentence_encoder(tokenizer.vocab_size, SIZES), tokenizer)
    torch.nn.init.zeros_(made.model.positions)
    vectors = embed(["the dog sees a cat", "a cat sees the dog"], made)
    assert_close(vectors[0], vectors[1])
    ids = made.tokenizer.batch(["a cat sees the dog"]).ids[0]
    assert_close(vectors[1], made.model.embed.weight[ids].mean(0))


def test_blocks_grown_on_a_bag_of_words_change_nothing_yet(tokenizer):
    words = randomized(sentence_encoder(tokenizer.vocab_size, replace(SIZES, layers=0)))
    ids = tokenizer.batch(["a cat sees the dog"]).ids
    more = grown(words, replace(SIZES, width=8, layers=2)).eval()  # the width is that of the words
    assert len(more.stack.blocks) == 2
    assert_close(more.states(ids), words.states(ids))


def test_pairs_with_an_empty_side_are_left_out(corpus, tokenizer):
    assert len(corpus) == 4 * 3 + 1  # line 3 is empty in English
    assert corpus.left_out == 2
    pair = corpus.read(("de", "fr", 4))
    assert (pair.first[0], pair.first[-1], pair.line) == (tokenizer.bos_id, tokenizer.eos_id, 4)
    assert tokenizer.decode(pair.second) == "un poisson nage"


def write(folder: Path, name: str, texts: dict[str, list[str]]) -> str:
    for language, rows in texts.items():
        (folder / f"{name}.{language}").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return str(folder / name)


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("train_embedder")


def run(recipe, folder: Path, name: str, *flags: str):
    train = write(folder, "train", {language: rows[:-1] * 4 for language, rows in TEXTS.items()})
    val = write(folder, "val", {language: rows[2:3] + rows[-1:] for language, rows in TEXTS.items()})
    return recipe.start(recipe.main, [
        "--train", train, "--val", val, "--languages", *TEXTS, "--vocabulary", "120", "--width", "16", "--layers", "1",
        "--heads", "2", "--context", "24", "--dropout", "0.1", "--budget", "128", "--precision", "float32",
        "--run", str(folder / name), "--out", str(folder / f"{name}-out"), "--threads", "1", *flags,
    ])  # fmt: skip


def test_the_recipe_makes_an_encoder_that_finds_translations(recipe, tmp_path, caplog):
    seen = write(tmp_path, "seen", {language: rows[:2] for language, rows in TEXTS.items()})
    captions = tmp_path / "captions.jsonl"
    rows = [["A dog runs.", "something"], ["a fish", "the fish"], ["a bird", "the bird"]]
    lines = [json.dumps({"file_name": f"{i}.png", "captions": row}) for i, row in enumerate(rows)]
    captions.write_text("\n".join(lines))
    figures = run(recipe, tmp_path, "whole", "--steps", "8", "--test", seen, "--paraphrases", str(captions))
    assert "12 of 16 lines are left out" in caplog.text  # of the test sentences, and of those for validation
    assert set(figures["seen"]) == {f"{a}-{b}" for a in TEXTS for b in TEXTS if a != b}
    assert figures["captions.jsonl"]["images"] == 3  # the sentence about the dog was not trained on
    report = (tmp_path / "whole" / "report" / "report.md").read_text()
    assert " → " in report
    vectors = multimodal.Embedder(tmp_path / "whole-out").texts(["un chien court", "a dog runs"])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    card = load_folder(tmp_path / "whole-out").card
    assert (card["pooling"], card["normalize"]) == ("mean", True)


def test_held_out_sentences_that_are_all_there_are_leave_none(recipe, tmp_path, last_line):
    said = write(tmp_path, "seen", {language: rows[:4] for language, rows in TEXTS.items()})
    line = last_line(lambda: run(recipe, tmp_path, "none", "--test", said))
    assert line.endswith("train: no line is left: each of the 16 has a sentence that is held out")


@pytest.mark.ci
def test_a_resumed_run_equals_an_unbroken_one(recipe, tmp_path):
    for name, *flags in (("whole", "--steps", "4"), ("part", "--steps", "2"), ("part", "--steps", "4", "--resume")):
        run(recipe, tmp_path, name, "--schedule", "wsd", "--warmup", "0", *flags)
    assert_same_states(tmp_path / "whole", tmp_path / "part", 4)


@pytest.mark.ci
def test_words_and_masked_models_are_starts(recipe, tmp_path, tokenizer):
    model = randomized(TextTransformer(bert(tokenizer.vocab_size, SIZES, pairs=True)))
    known = Checkpoint(model, tokenizer)
    save_folder(known, tmp_path / "bert")
    headless = without_heads(known)
    more = replace(model.config, tags=3, spans=True, projections=(ProjectionConfig(5, "tanh"),))
    assert without_heads(replace(known, model=TextTransformer(more))).config == headless.config
    ids = tokenizer.batch(["a dog runs"]).ids
    assert_close(headless.states(ids), model.states(ids))
    run(recipe, tmp_path, "words", "--steps", "1", "--layers", "0", "--optimizer", "adamw")
    run(recipe, tmp_path, "more", "--steps", "1", "--init", str(tmp_path / "words-out"), "--layers", "2")
    assert load_folder(tmp_path / "more-out").model.config.stack.layers == 2
    run(recipe, tmp_path, "more", "--steps", "1", "--init", str(tmp_path / "bert"), "--run", str(tmp_path / "again"))
    made = load_folder(tmp_path / "more-out").model
    assert (made.pool, made.transform, made.classes, made.config.stack.block.post_norm) == (None, None, None, True)
    causal = TextTransformer(replace(model.config, causal=True))
    with pytest.raises(CheckpointError, match="expected a text encoder with a tokenizer, got text"):
        without_heads(replace(known, model=causal))
