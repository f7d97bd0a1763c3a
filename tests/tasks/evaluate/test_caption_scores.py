"""BLEU, ROUGE-L and CIDEr-D are those of their definitions and of coco-caption's programs."""

import json
import math
import random

import pytest

from multimodal.data.datasets.class_names import words
from multimodal.errors import DataError
from multimodal.tasks.evaluate.caption_scores import References, agreement, caption_scores

NAMES = ["bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider"]


def coco(captions: list[str], references: list[list[str]]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The same by pycocoevalcap, with our words: of all, and of each image."""
    pytest.importorskip("pycocoevalcap")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    said = {i: [words(text)] for i, text in enumerate(captions)}
    wanted = {i: [words(text) for text in own] for i, own in enumerate(references)}
    bleu, bleus = Bleu(4).compute_score(wanted, said, verbose=0)
    rouge, rouges = Rouge().compute_score(wanted, said)
    cider, ciders = Cider().compute_score(wanted, said)
    rows = zip(*bleus, rouges, ciders, strict=True)
    named = lambda row: {name: 100 * float(value) for name, value in zip(NAMES, row, strict=True)}
    return named([*bleu, rouge, cider]), [named(row) for row in rows]


def agree(captions: list[str], references: list[list[str]]) -> None:
    found, (total, each) = References(references).score(captions), coco(captions, references)
    assert found.total == pytest.approx(total, rel=1e-9, abs=1e-9)
    for own, wanted in zip(found.each, each, strict=True):
        assert own == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("vocabulary", [2, 8, 60])
def test_random_sentences_score_as_in_coco_caption(vocabulary):
    draw = random.Random(vocabulary)

    def sentence(least: int) -> str:
        return " ".join(f"w{draw.randrange(vocabulary)}" for _ in range(draw.randrange(least, 14)))

    references = [[sentence(1) for _ in range(draw.randrange(1, 6))] for _ in range(40)]
    captions = [sentence(0) for _ in references]
    captions[3], captions[7] = references[3][0], ""
    agree(captions, references)


@pytest.mark.ci
def test_what_people_wrote_scores_as_in_coco_caption(shared_data):
    lines = (shared_data / "vision/flickr8k-1000/test.jsonl").read_text().splitlines()
    texts = [json.loads(line)["captions"] for line in lines]
    agree([own[0] for own in texts], [own[1:] for own in texts])
    agree([texts[(i + 1) % len(texts)][0] for i in range(len(texts))], texts)
    people = agreement(texts)
    assert list(people) == NAMES
    assert people["bleu1"] > people["bleu2"] > people["bleu3"] > people["bleu4"] > 5


def test_a_case_worked_out_by_hand():
    """Two images with two references each.

    Image 1, "a red dog runs here fast" (6 words) against "the red dog runs" (4) and "a dog runs here now" (5).
    Words found in a reference: a red dog runs here, 5 of 6; pairs: red dog, dog runs, runs here, 3 of 5; triples: red
    dog runs, dog runs here, 2 of 4; fours: none of 3. Closest length: 5.
    Image 2, "a cat" (2) against "a cat sat" (3) and "cat" (1): words 2 of 2, pairs 1 of 1, no triples. Lengths 3 and
    1 are as close: the shorter.
    Together 7 of 8 words, 4 of 6 pairs, 2 of 4 triples, 0 of 3 fours; 8 words against 6 wanted: no penalty.

    ROUGE-L of image 1: common subsequences "red dog runs" (3 of 4) and "a dog runs here" (4 of 5): precision 4/6,
    recall 4/5. Of image 2: "a cat" 2 of 3, and "cat" 1 of 1: precision 2/2, recall 1/1.

    CIDEr-D of image 2: "a" is in the references of both images and weighs nothing, all others weigh log 2. Against
    "a cat sat": words cat · (cat, sat) = 1/√2; pairs (a cat) · (a cat, cat sat) = 1/√2; no triples said. 2 words
    against 3, so e^(-1/72). Against "cat": words 1; no pairs; 2 words against 1, e^(-1/72) too.
    """
    captions = ["A red dog runs here, fast.", "a cat"]
    references = [["The red dog runs.", "a dog runs here now"], ["a cat sat", "Cat!"]]
    total, (first, second) = References(references).score(captions)
    assert total["bleu1"] == pytest.approx(100 * 7 / 8)
    assert total["bleu2"] == pytest.approx(100 * (7 / 8 * 4 / 6) ** (1 / 2))
    assert total["bleu3"] == pytest.approx(100 * (7 / 8 * 4 / 6 * 2 / 4) ** (1 / 3))
    assert 0 < total["bleu4"] < 0.02  # no match of four words
    assert first["bleu2"] == pytest.approx(100 * (5 / 6 * 3 / 5) ** (1 / 2))
    assert second["bleu2"] == pytest.approx(100)
    rouge = (1 + 1.2**2) * (4 / 6) * (4 / 5) / (4 / 5 + 1.2**2 * 4 / 6)
    assert first["rouge_l"] == pytest.approx(100 * rouge)
    assert second["rouge_l"] == pytest.approx(100)
    assert total["rouge_l"] == pytest.approx(50 * (1 + rouge))
    cider = 10 * math.exp(-1 / 72) * (2 / math.sqrt(2) + 1) / 4 / 2
    assert second["cider"] == pytest.approx(100 * cider)
    assert total["cider"] == pytest.approx((first["cider"] + second["cider"]) / 2)
    agree(captions, references)


def test_a_short_text_pays_for_its_brevity():
    """3 words against 5: e^(1 - 5/3)."""
    scores = caption_scores(["one two three", "x"], [["one two three four five"], ["x"]])
    assert scores["bleu1"] == pytest.approx(100 * math.exp(1 - 6 / 4))  # 4 words against 6 in both images
    each = References([["one two three four five"], ["x"]]).score(["one two three", "x"]).each
    assert each[0]["bleu1"] == pytest.approx(100 * math.exp(1 - 5 / 3))


def test_nothing_said_scores_nothing_and_what_cannot_be_scored_is_refused():
    total, each = References([["a dog", ""], ["a cat"]]).score(["", "..."])
    assert each[0]["rouge_l"] == each[0]["cider"] == total["cider"] == 0
    assert total["bleu1"] < 1e-9
    for captions, references, cause in (
        (["a"], [["a"], ["b"]], "1 for 2 images"),
        (["a"], [["a"]], "two or more"),
        (["a", "b"], [["a"], ["...", ""]], "image 1 has no reference"),
        (["a", "b"], [["a"], []], "image 1 has no reference"),
    ):
        with pytest.raises(DataError, match=cause):
            caption_scores(captions, references)
