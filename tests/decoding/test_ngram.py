"""N-gram language models: ARPA files, probabilities with back-off, the recipe that makes them, and their scorer."""

import gzip
import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from multimodal.blocks.cache import Cache
from multimodal.data.sources import ListColumns
from multimodal.decoding.beam_search import beam_search
from multimodal.decoding.lm_fusion import ShallowFusion
from multimodal.decoding.ngram import WordScorer, read_arpa
from multimodal.errors import CheckpointError, DataError
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.hub.recognizers import LetterTokenizer, WithEnd
from multimodal.tokens.text.tiktokens import GPT2Tokenizer
from multimodal.train.recipe_cli import start
from tests.helpers.spread import thin

ARPA = """made by hand
\\data\\
ngram 1=5
ngram 2=5
ngram 3=1

\\1-grams:
-99\t<s>\t-0.5
-1.0\t</s>
-2.0\t<unk>
-0.6\ta\t-0.25
-0.7\tb\t-0.125

\\2-grams:
-0.2\t<s> a\t-0.3
-0.4\ta b\t-0.1
-0.9\tb </s>
-0.8\tb a
-0.3\tb <unk>

\\3-grams:
-0.1\t<s> a b

\\end\\
"""
SENTENCES = ["the cat sat", "the cat ran", "the dog sat on the cat", "a dog", "the theatre", "कि क का", "अब कि"]


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("train_ngram")


def made(recipe, folder: Path, texts: list[str], order: int) -> Path:
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    start(recipe.main, [str(folder / "lm.arpa"), "--texts", str(folder / "texts.txt"), "--order", str(order)])
    return folder / "lm.arpa"


@pytest.mark.parametrize("pack", [
    bytes, gzip.compress, lambda data: b"\xef\xbb\xbf" + data.partition(b"\n")[2],
    lambda data: data.replace(b"<unk>", b"<UNK>"),
])  # fmt: skip
def test_probabilities_with_back_off_are_those_by_hand(tmp_path, pack):
    (tmp_path / "lm.arpa").write_bytes(pack(ARPA.encode()))
    model = read_arpa(tmp_path / "lm.arpa")
    cases = {
        "a b": -0.2 - 0.1 - (0.1 + 0.9),  # the context "a b" backs off, "b </s>" is there
        "b": (-0.5 - 0.7) - 0.9,  # "<s> b" backs off
        "a a": -0.2 + (-0.3 - 0.25 - 0.6) + (-0.25 - 1.0),  # twice; the context "a a" is not there, so costs nothing
        "b a": (-0.5 - 0.7) - 0.8 + (-0.25 - 1.0),
        "b zebra": (-0.5 - 0.7) - 0.3 - 1.0,
        "a zebra": -0.2 + (-0.3 - 0.25 - 2.0) - 1.0,
        "": -0.5 - 1.0,
        "</s>": (-0.5 - 2.0) - 1.0,  # a control word in a text is a word like any that is not there
    }
    for text, log10 in cases.items():
        assert model.logprob(text) == pytest.approx(log10 * math.log(10), abs=1e-5), text


def test_a_file_without_unk_gives_unknown_words_next_to_nothing(tmp_path):
    text = ARPA.replace("-2.0\t<unk>\n", "").replace("1=5", "1=4").replace("-99\t<s>", "-inf\t<s>")
    (tmp_path / "lm.arpa").write_text(text)
    assert read_arpa(tmp_path / "lm.arpa").logprob("zebra") == pytest.approx((-0.5 - 100 - 1.0) * math.log(10))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ngram 1=5", "ngram 1=6", "line 13: 5 of the 6 1-grams"),
        ("ngram 1=5", "ngram 1=4", "line 12: expected \\2-grams: after 4 1-grams"),
        ("ngram 2=5", "ngram 3=5", "line 4: expected 'ngram 2=COUNT'"),
        ("ngram 2=5", "ngram 2=many", "line 4: expected 'ngram 2=COUNT'"),
        ("-0.6\ta\t", "x\ta\t", "line 11: no number"),
        ("-0.6\ta\t", "nan\ta\t", "line 11: no logarithm of a probability"),
        ("-0.6\ta\t", "0.6\ta\t", "line 11: no logarithm of a probability"),
        ("-0.7\tb\t", "-0.7\ta\t", "line 12: the word 'a' was given before"),
        ("-0.8\tb a", "-0.8\tb c", "line 18: the word 'c' is no 1-gram"),
        ("-0.8\tb a", "-0.8\tb a a a", "line 18: no 2-gram"),
        ("-0.8\tb a", "-0.8\ta b", "line 18: this n-gram was given before"),
        ("<s> a b", "a a b", "line 22: the context of this n-gram was not given"),
        ("\\end\\", "\\4-grams:", "line 24: expected \\end\\ after 1 3-grams"),
        ("\\end\\\n", "", "the file ends before \\end\\"),
        ("\\data\\", "data", "the file ends before \\end\\"),
        ("</s>\n", "x\n", "the 1-grams have no </s>"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, old, new, message):
    (tmp_path / "lm.arpa").write_text(ARPA.replace(old, new, 1))
    with pytest.raises(CheckpointError) as error:
        read_arpa(tmp_path / "lm.arpa")
    assert str(error.value).startswith(f"{tmp_path / 'lm.arpa'}: ")
    assert message in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "lm.arpa.gz"
    wrong = ARPA.replace("\tb", "\t\udcff").replace(" b", " \udcff").encode(errors="surrogateescape")
    for data in (gzip.compress(ARPA.encode() * 50)[:60], wrong):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"lm\.arpa\.gz"):
            read_arpa(path)
    with pytest.raises(CheckpointError, match="nowhere"):
        read_arpa(tmp_path / "nowhere.arpa")


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_the_probabilities_of_all_words_sum_to_one_after_any_words(recipe, tmp_path, order):
    chooser = random.Random(order)
    texts = [" ".join(chooser.choices("abcdefgh", weights=range(1, 9), k=chooser.randint(1, 9))) for _ in range(60)]
    model = read_arpa(made(recipe, tmp_path, texts, order))
    assert model.order == order
    ids = [*range(len(model.words))]
    longer = (tuple(chooser.choices(ids, k=4)) for _ in range(50))
    for history in [(), (model.start,), *itertools.product(ids, repeat=2), *longer]:
        chances = np.exp(model.logprobs(history).astype(float))
        assert chances.sum() - chances[model.start] == pytest.approx(1, abs=1e-5)


def test_counts_and_discounts_are_those_of_modified_kneser_ney(recipe):
    texts = [text.split() for text in ("a b", "a b", "c b", "d a")]
    low, high = recipe.adjusted_counts(texts, 2)
    assert high["a", "b"] == 2
    assert low[("b",)] == 2  # stands after a and c
    assert low[("a",)] == 2  # after <s> and d
    assert low[("</s>",)] == 2  # after a and b
    assert ("<s>",) not in low
    counts = {(str(i),): count for i, count in enumerate([1] * 8 + [2] * 4 + [3] * 2 + [4])}
    share = 8 / (8 + 2 * 4)
    assert recipe.discounts(counts) == pytest.approx((1 - 2 * share * 4 / 8, 2 - 3 * share * 2 / 4, 3 - 4 * share / 2))
    assert recipe.discounts({("a",): 1}) == recipe.FALLBACK


def test_discounts_without_a_count_of_four_are_those_of_lmplz(recipe):
    table = recipe.train([["a", "b", "b", "c", "c", "c"]], 1)[0]
    wanted = {"a": -0.6990, "b": -0.4649, "c": -0.8909}  # lmplz of KenLM 0.3, order 1
    found = {word: math.log10(table[word,].probability) for word in wanted}
    assert found == pytest.approx(wanted, abs=1e-4)


def test_texts_of_manifests_and_of_plain_files(recipe, tmp_path, capsys):
    usual = ListColumns()
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "It’s HERE, now_"}) + "\n" + json.dumps({"sentence": "b"}))
    assert [*recipe.sentences(tmp_path / "a.jsonl", usual, spelled=True)] == [["it's", "here", "now"], ["b"]]
    (tmp_path / "b.csv").write_text("text,said\nno,a b\n")
    assert [*recipe.sentences(tmp_path / "b.csv", ListColumns(text_column="said"))] == [["a", "b"]]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"It's HERE,\n\nb"))
    assert [*recipe.sentences(tmp_path / "a.txt.gz", usual)] == [["It's", "HERE,"], ["b"]]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert [*recipe.sentences(tmp_path / "a.jsonl.gz", usual)] == [["It’s", "HERE,", "now_"], ["b"]]
    for value, cause in ((5, "a text is not a string"), (None, "no text")):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": value}))
        with pytest.raises(DataError, match=f"line 2: {cause}"):
            [*recipe.sentences(tmp_path / "a.jsonl", usual)]
    with pytest.raises(DataError, match=r"nowhere\.txt: cannot be read"):
        [*recipe.sentences(tmp_path / "nowhere.txt", usual)]
    with pytest.raises(SystemExit):
        start(recipe.main, [str(tmp_path / "lm.txt"), "--texts", str(tmp_path / "a.txt.gz")])
    assert re.search(r"train_ngram.py: error: .*must end in", capsys.readouterr().err)


@pytest.fixture
def scorer(recipe, tmp_path) -> WordScorer:
    return WordScorer(read_arpa(made(recipe, tmp_path, SENTENCES, 3)), BytePairTokenizer.train(SENTENCES, 275))


def credited(scorer: WordScorer, ids: list[int]) -> list[float]:
    """Log-probability that each token of a text adds."""
    return [scorer(torch.tensor([ids[:at]], dtype=torch.long).view(1, at))[0, ids[at]].item() for at in range(len(ids))]


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    "text", [*SENTENCES, "", " the cat", "the  cat ", "zebra the zebra", "th cats sat", "कि कि की", "the é ran"]
)
def test_a_text_has_the_log_probability_of_its_words_and_none_is_paid_back(scorer, text):
    steps = credited(scorer, [*scorer.tokenizer.encode(text), scorer.tokenizer.eos_id])
    assert sum(steps) == pytest.approx(scorer.model.logprob(text), abs=1e-4)
    assert max(steps) <= 1e-5


def test_an_unfinished_word_has_the_chance_of_the_best_word_that_begins_so(scorer):
    model, encode = scorer.model, scorer.tokenizer.encode
    history = (model.start, model.word_id("the"))
    best = max(model.logprobs(history)[model.word_id(word)] for word in ("cat", "ca") if word in model.ids)
    first = credited(scorer, encode("the c"))
    assert sum(first) == pytest.approx(model.logprobs((model.start,))[model.word_id("the")] + best, abs=1e-5)
    # "x" begins no word: what an unknown word has
    unknown = model.logprobs(history)[model.unknown]
    assert sum(credited(scorer, encode("the x"))) == pytest.approx(sum(first) - best + unknown, abs=1e-5)


def test_scores_do_not_depend_on_the_other_rows_or_on_what_was_asked_before(scorer):
    rows = [scorer.tokenizer.encode(text)[:4] for text in ("the cat sat", "the theatre", "a dog ran", "zebra zebra")]
    rows = torch.tensor([row for row in rows if len(row) == 4])
    assert len(rows) > 2
    alone = torch.cat([WordScorer(scorer.model, scorer.tokenizer)(row[None]) for row in rows])
    for size in (2, 3, 4):  # goes on from what it knows
        scorer(rows[:, :size])
    torch.testing.assert_close(scorer(rows.flip(0)).flip(0), alone, rtol=0, atol=0)
    control = torch.tensor([[scorer.tokenizer.pad_id, *rows[0].tolist()]])
    torch.testing.assert_close(scorer(control), alone[:1], rtol=0, atol=0)


def test_in_a_beam_the_most_probable_text_of_the_model_wins(recipe, tmp_path):
    texts = ["we went home"] * 9 + ["we went out", "rain fell"]
    tokenizer = BytePairTokenizer.train(texts, 270)
    scorer = WordScorer(read_arpa(made(recipe, tmp_path, texts, 3)), tokenizer)
    rule = ShallowFusion(None, scorer, 1.0, 1)
    heard = torch.full((tokenizer.vocab_size,), -math.inf)
    heard[[tokenizer.eos_id, *tokenizer.encode("we went home")]] = 0  # these in any order
    prompt = torch.tensor([[tokenizer.bos_id]])
    found = beam_search(lambda ids, cache: heard.expand(*ids.shape, -1), prompt, Cache(0), eos=tokenizer.eos_id,
                        max_new=20, beams=8, patience=math.inf, length_penalty=0.0,
                        scorer=lambda ids, _: rule(ids, heard.expand(len(ids), -1)))  # fmt: skip
    assert tokenizer.decode(found.ids[0]) == "we went home"
    assert found.logprobs[0] == pytest.approx(scorer.model.logprob("we went home"), abs=1e-4)


@pytest.mark.parametrize(("spelled", "written"), [(str.upper, str.lower), (str.lower, str.upper), (str.lower, str)])
def test_words_in_the_other_letter_case_are_those_of_the_model(recipe, tmp_path, spelled, written):
    texts = [written(text) for text in ("the cat sat", "the cat ran")]
    tokenizer = WithEnd(LetterTokenizer(["<unk>", "|", *spelled("acehnrst")], "|", [], "<unk>"))
    scorer = WordScorer(read_arpa(made(recipe, tmp_path, texts, 2)), tokenizer)
    for text in (*texts, written("the cat can")):
        steps = credited(scorer, [*tokenizer.encode(spelled(text)), tokenizer.eos_id])
        assert sum(steps) == pytest.approx(scorer.model.logprob(text), abs=1e-4)
    foreign = read_arpa(made(recipe, tmp_path, ["мир", "дом"], 2))
    with pytest.raises(CheckpointError, match="the recognizer's tokens spell 0 of its 2"):
        WordScorer(foreign, tokenizer)


@pytest.mark.ci
def test_tokens_that_cannot_be_words_are_refused(scorer):
    class Joined(GPT2Tokenizer):
        def _decode(self, ids):
            return "of the"

    with pytest.raises(CheckpointError, match="'of the' has a space inside"):
        WordScorer(scorer.model, Joined())
