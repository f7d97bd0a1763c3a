"""Entity F1 as seqeval and conlleval count it; exact match and F1 as SQuAD's script."""

import pytest

from multimodal.tasks.evaluate.text.answer_scores import answer_scores, entity_scores, normalized, spans_of


def test_entities_of_tags_are_those_of_conlleval():
    assert spans_of(["B-PER", "I-PER", "O", "B-LOC"]) == {("PER", 0, 2), ("LOC", 3, 4)}
    assert spans_of(["I-PER", "I-LOC", "I-LOC", "B-LOC"]) == {("PER", 0, 1), ("LOC", 1, 3), ("LOC", 3, 4)}
    assert spans_of(["O", "I-X-Y", "O"]) == {("X-Y", 1, 2)}
    assert spans_of(["S-LOC", "S-LOC", "B-PER", "I-PER", "E-PER", "E-PER"]) == {
        ("LOC", 0, 1), ("LOC", 1, 2), ("PER", 2, 5), ("PER", 5, 6)}  # fmt: skip
    assert spans_of(["U-LOC", "U-LOC", "B-PER", "L-PER", "I-PER"]) == {
        ("LOC", 0, 1), ("LOC", 1, 2), ("PER", 2, 4), ("PER", 4, 5)}  # fmt: skip
    assert spans_of(["O", "O"]) == spans_of([]) == set()


def test_entity_f1_equals_the_example_of_seqeval():
    """The example of seqeval's README: 0.50 micro F1, MISC 0, PER 1."""
    wanted = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    figures = entity_scores(wanted, found)
    assert figures == pytest.approx({"precision": 0.5, "recall": 0.5, "f1": 0.5, "f1 of MISC": 0, "f1 of PER": 1,
                                     "accuracy": 0.8})  # fmt: skip
    assert entity_scores([["O"]], [["O"]])["f1"] == 0
    wanted = [["S-LOC", "O", "B-PER", "I-PER", "E-PER", "O"]]  # f1 by seqeval 1.2.2
    assert entity_scores(wanted, [["S-LOC", "O", "B-PER", "I-PER", "I-PER", "O"]])["f1"] == 1
    assert entity_scores(wanted, [["S-LOC", "O", "B-PER", "E-PER", "O", "O"]])["f1"] == 0.5


def test_answers_are_scored_as_by_squad_s_script():
    assert normalized("The  U.S. Army, an army!") == "us army army"
    wanted = [["the old tower", "tower"], ["on a hill"], [], []]
    figures = answer_scores(wanted, ["Tower.", "a steep hill", "", "Vienna"])
    assert figures["exact"] == 0.5
    assert figures["f1"] == pytest.approx((1 + 2 * 1 / (2 + 2) + 1 + 0) / 4)
    assert answer_scores([["the", "cat"], ["the"]], ["", ""]) == {"exact": 0.5, "f1": 0.5}
