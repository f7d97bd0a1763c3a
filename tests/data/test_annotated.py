"""Annotated texts: formats, what is refused in one line, and the tokens that carry the annotation."""

import json

import pytest

from multimodal.data.datasets.annotated.choices import ChoiceQuestions, read_choices
from multimodal.data.datasets.annotated.questions import QuestionWindows, read_questions
from multimodal.data.datasets.annotated.tagged import TaggedTexts, read_tagged, tags_of
from multimodal.data.datasets.labelled_texts import read_labelled
from multimodal.data.datasets.text import IGNORED, texts_in
from multimodal.errors import DataError, TextError
from multimodal.tokens.text.wordpiece import WordPieceTokenizer

CONTEXT = "The old tower of Vienna stood on a hill. Nobody climbed it."


@pytest.fixture(scope="module")
def tokenizer() -> WordPieceTokenizer:
    return WordPieceTokenizer.train([CONTEXT] * 3, 60, context=64)


def lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_conll_and_json_lines_are_the_same_texts(tmp_path, tokenizer):
    conll = lines(tmp_path / "a.conll", "-DOCSTART- -X- O", "", "Vienna NNP B-LOC", "hill NN I-LOC", "stood VBD O", "",
                  "Nobody PRP O")  # fmt: skip
    rows = [
        {"tokens": ["Vienna", "hill", "stood"], "tags": ["B-LOC", "I-LOC", "O"]},
        {"tokens": ["Nobody"], "tags": ["O"]},
    ]
    both = read_tagged(conll), read_tagged(lines(tmp_path / "a.jsonl", *rows))
    assert [one[:2] for one in both[0]] == [one[:2] for one in both[1]]
    assert both[0][0].where.endswith("a.conll: line 3")
    assert tags_of(both[0], conll) == ["O", "B-LOC", "I-LOC"]
    source = TaggedTexts(both[0], tokenizer, ["O", "B-LOC", "I-LOC"], 64)
    ids, targets = source.read(0)
    pieces = tokenizer.pieces("Vienna hill stood")
    first = [not piece.subword for piece in pieces]
    assert ids == [tokenizer.bos_id, *(piece.id for piece in pieces), tokenizer.eos_id]
    assert [target for target in targets if target != IGNORED] == [1, 2, 0]
    assert [target != IGNORED for target in targets] == [False, *first, False]
    windows = TaggedTexts(both[0][:1], tokenizer, ["O", "B-LOC", "I-LOC"], 4)
    assert [target for i in range(len(windows)) for target in windows.read(i).targets if target != IGNORED] == [1, 2, 0]


@pytest.mark.parametrize(
    ("name", "row", "cause"),
    [
        ("a.jsonl", {"tokens": ["a", "b"], "tags": ["O"]}, "line 1: has 2 tokens and 1 tags"),
        ("a.jsonl", {"tokens": "a b", "tags": ["O"]}, "line 1: tokens must be a list of texts"),
        ("a.jsonl", {"tokens": ["a"], "tags": [3]}, r"line 1: tags must be a list of texts \(got \[3\]\)"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object"),
        ("a.conll", "a O\nb", "line 2 has 1 columns, not 2"),
        ("a.conll", "a", "line 1 has 1 columns, not 2"),
        ("a.conll", "a O\nb I-PER", "line 1: word 2 has 'I-PER' after 'O'; an entity begins with B-"),
        ("a.conll", "a B-LOC\nb I-PER", "word 2 has 'I-PER' after 'B-LOC'"),
        ("a.conll", "\n\n", "holds no text"),
    ],
)
def test_tags_that_do_not_fit_are_refused(tmp_path, name, row, cause):
    with pytest.raises(DataError, match=cause) as error:
        read_tagged(lines(tmp_path / name, row))
    assert str(tmp_path / name) in str(error.value)


def squad(*answers, question="Where did it stand?", context=CONTEXT):
    asked = {"id": "q1", "question": question, "answers": [{"text": t, "answer_start": s} for t, s in answers]}
    return {"version": "2.0", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": [asked]}]}]}


def test_squad_and_json_lines_are_the_same_questions(tmp_path, tokenizer):
    start = CONTEXT.index("on a hill")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(squad(("on a hill", start), ("a hill", start + 3)), indent=1))
    row = {"question": "Where did it stand?", "context": CONTEXT,
           "answers": {"text": ["on a hill", "a hill"], "answer_start": [start, start + 3]}}  # fmt: skip
    (theirs,), (mine,) = read_questions(path), read_questions(lines(tmp_path / "a.jsonl", row))
    assert theirs[:3] == mine[:3]
    whole = QuestionWindows([mine], tokenizer, 64, 8).read(0)
    assert tokenizer.decode(whole.ids[whole.start : whole.end + 1]).replace(" ", "") == "onahill"
    assert whole.segments[whole.start] == 1
    parts = QuestionWindows([mine], tokenizer, 30, 4)
    found = [parts.read(i) for i in range(len(parts))]
    assert len(found) > 2
    held = [one for one in found if one.start]
    assert held
    assert all(one.end == 0 for one in found if not one.start)
    assert all(len(one.ids) <= 30 for one in found)
    assert all(tokenizer.decode(one.ids[one.start : one.end + 1]).replace(" ", "") == "onahill" for one in held)
    (without,) = read_questions(lines(tmp_path / "b.jsonl", row | {"answers": []}))
    assert QuestionWindows([without], tokenizer, 64, 8).read(0)[2:] == (0, 0)
    (long,) = read_questions(lines(tmp_path / "c.jsonl", row | {"answers": [{"text": CONTEXT, "answer_start": 0}]}))
    with pytest.raises(DataError, match=r"c.jsonl: line 1: answer '.*' is cut in each window of 30 tokens"):
        QuestionWindows([long], tokenizer, 30, 4)


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ([("hill", 500)], "q1'?: answer 'hill' begins outside the context of 59 characters"),
        ([("hill", -3)], "begins outside"),
        ([("it. And more", CONTEXT.index("it."))], "is cut by the end of the context"),
        ([("tower", 0)], "answer 'tower' at character 0 is 'The o' there"),
        ([("", 0)], "text must be a text"),
    ],
)
def test_answers_outside_the_context_are_refused(tmp_path, answers, cause):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(squad(*answers)))
    with pytest.raises(DataError, match=cause):
        read_questions(path)


def test_questions_in_no_known_form_are_refused(tmp_path):
    path = tmp_path / "a.json"
    for whole, cause in (
        ({"data": [{"paragraphs": [{"qas": [{}]}]}]}, "context must be a text"),
        ({"data": [{"title": "t"}]}, "not in SQuAD's format"),
        ({"question": "a", "context": "b", "answers": ["b"]}, "answers must have text and answer_start"),
        ({"question": "a", "context": "b", "answers": {"text": ["b"], "answer_start": []}}, "answers must have"),
    ):
        path.write_text(json.dumps(whole))
        with pytest.raises(DataError, match=cause):
            read_questions(path)


def test_choices_are_read_and_those_of_unlike_number_refused(tmp_path, tokenizer):
    row = {"question": "the hill", "choices": ["old", "tower", "Vienna"], "label": 1}
    path = lines(tmp_path / "a.jsonl", row, row | {"label": 2})
    source = ChoiceQuestions(read_choices(path), tokenizer, 64)
    example = source.read(1)
    assert (len(example.rows), example.label) == (3, 2)
    assert len({tuple(one.ids[: len(tokenizer.encode("the hill")) + 2]) for one in example.rows}) == 1
    with pytest.raises(TextError, match="beyond the context of 6"):
        ChoiceQuestions(read_choices(path), tokenizer, 6)
    for wrong, cause in (
        (row | {"choices": ["old", "tower"]}, "line 2: has 2 choices, those before it have 3"),
        (row | {"label": 3}, r"line 2: label must be a number from 0 to 2 \(got 3\)"),
        (row | {"label": "old"}, "label must be a number"),
        (row | {"choices": ["old"]}, "has 1 choices, expected at least two"),
    ):
        with pytest.raises(DataError, match=cause):
            read_choices(lines(tmp_path / "b.jsonl", row, wrong))


@pytest.mark.parametrize(("name", "rows"), [
    ("a.csv", ["label,text", '1,"good, truly"', "0,bad"]),
    ("a.jsonl", [{"text": "good, truly", "label": 1.0}, {"text": "bad", "label": "0"}]),
])  # fmt: skip
def test_labelled_texts_come_from_lists_too(tmp_path, name, rows):
    assert read_labelled(lines(tmp_path / name, *rows)) == [("good, truly", "1"), ("bad", "0")]


def test_the_columns_of_a_list_of_labelled_texts_are_named(tmp_path):
    path = lines(tmp_path / "a.csv", "review,stars", "good,5", "bad,1")
    with pytest.raises(DataError, match=r"a\.csv: line 2: expected a text and a label \(columns: review, stars\)"):
        read_labelled(path)
    assert read_labelled(path, ("review", "stars")) == [("good", "5"), ("bad", "1")]
    with pytest.raises(DataError, match=r"a\.csv: line 2: expected a label \(columns: text, label\)"):
        read_labelled(lines(path, "text,label", "good,"))


def test_a_list_without_a_column_of_texts_says_which_it_has(tmp_path):
    """As a TSV without a header, whose first row becomes one."""
    path = lines(tmp_path / "a.tsv", "a fine film\t1", "a dull one\t0")
    with pytest.raises(DataError, match=r"a\.tsv: line 2: expected a column text, .*, raw_text \(got a fine film, 1\)"):
        texts_in(path)
    with pytest.raises(DataError, match=r"a\.jsonl: line 1: no text"):
        texts_in(lines(tmp_path / "a.jsonl", {"text": None}))
