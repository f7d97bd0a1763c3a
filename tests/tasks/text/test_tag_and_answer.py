"""Entities, answers and choices: equal to transformers on the same folder, and refusals in one line."""

import json
import warnings

import pytest
import torch

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.export.export import export
from multimodal.tasks.text.answer import Answerer, answer
from multimodal.tasks.text.tag import Tagger, tag
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load
from tests.helpers.commands import run
from tests.helpers.references.token_heads import (
    LABELS,
    TEXT,
    answers,
    byte_folder,
    byte_folder_of_segments,
    byte_folder_with_prefix,
    wordpiece_folder,
)
from tests.helpers.spread import thin

QUESTION = "Where did the orchestra of Vienna play ?"
PAIRS = {"wordpiece": wordpiece_folder, "bytes": byte_folder, "bytes, two segments": byte_folder_of_segments}
FOLDERS = {"wordpiece": wordpiece_folder, "bytes": byte_folder, "bytes, prefix": byte_folder_with_prefix}


@pytest.fixture(scope="module", params=FOLDERS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def taggers(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind)
    return folder, FOLDERS[kind](folder, "TokenClassification")


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("merge", ["simple", "first", "average", "max"])
def test_entities_equal_the_pipeline(taggers, merge):
    from transformers import AutoTokenizer
    from transformers.pipelines.token_classification import TokenClassificationPipeline

    folder, model = taggers
    pipeline = TokenClassificationPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(folder),
                                           aggregation_strategy=merge, device="cpu")  # fmt: skip
    texts = [TEXT, "Zzz Vienna", "New  York's Zoo, naïve!"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a byte vocabulary has no words
        theirs = pipeline(texts)
    for text, own, mine in zip(texts, theirs, tag(texts, folder, merge=merge), strict=True):
        assert [(e["entity_group"], e["word"], e["start"], e["end"]) for e in own] == [
            (e.label, e.word, e.start, e.end) for e in mine
        ], text
        assert [e["score"] for e in own] == pytest.approx([e.score for e in mine], abs=1e-5)
    assert len(theirs[0]) > 1


def test_a_long_text_is_tagged_in_windows_as_by_the_pipeline(tmp_path):
    from transformers import AutoTokenizer
    from transformers.pipelines.token_classification import TokenClassificationPipeline

    model = wordpiece_folder(tmp_path, "TokenClassification", context=40)
    pipeline = TokenClassificationPipeline(
        model=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path), aggregation_strategy="first", stride=7,
        device="cpu",
    )  # fmt: skip
    theirs, (mine,) = pipeline(TEXT), tag([TEXT], tmp_path, merge="first", overlap=7)
    assert [(e["entity_group"], e["start"], e["end"]) for e in theirs] == [(e.label, e.start, e.end) for e in mine]
    assert [e["score"] for e in theirs] == pytest.approx([e.score for e in mine], abs=1e-5)
    assert mine[-1].end > 150


@pytest.mark.filterwarnings("always")
def test_the_command_keeps_the_place_of_each_line(tmp_path, capsys):
    wordpiece_folder(tmp_path / "m", "TokenClassification")
    capsys.readouterr()  # transformers' progress
    file = tmp_path / "lines.jsonl"
    file.write_bytes(TEXT.encode() + b"\n\xff\n" + TEXT.encode())
    code, out, err = run(capsys, "tag", "--file", file, "-m", tmp_path / "m", "--format", "json")
    warning, error = err.splitlines()
    assert (code, [row["line"] for row in json.loads(out)]) == (1, [1, 3])
    assert f"warning: --file {file}: each line is a text as it stands, with its keys or columns" in warning
    assert f"{file}, line 2: is not UTF-8 text" in error
    out = run(capsys, "tag", "--file", file, "-m", tmp_path / "m", "--quiet")[1]
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [TEXT, "", TEXT]


@pytest.mark.parametrize("labels", [["LABEL_0", "LABEL_1"], ["S-ORG", "B-ORG", "E-ORG"], ["O", "X-O", "LOC-X"]])
def test_labels_of_other_kinds_equal_the_pipeline(tmp_path, labels):
    """The two that transformers leaves out of config.json, and other prefixes than B- and I-."""
    from transformers import pipeline

    wordpiece_folder(tmp_path, "TokenClassification", labels=labels)
    assert ("id2label" in json.loads((tmp_path / "config.json").read_text())) == (labels[0] != "LABEL_0")
    theirs = pipeline("token-classification", str(tmp_path), aggregation_strategy="simple", device="cpu")(TEXT)
    (mine,) = tag([TEXT], tmp_path)
    assert [(e["entity_group"], e["start"], e["end"]) for e in theirs] == [(e.label, e.start, e.end) for e in mine]
    assert len(mine) > 1


@pytest.mark.parametrize("kind", PAIRS)
@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("length", "overlap", "null", "top_k"),
                         [(384, 128, False, 1), (384, 128, True, 4), (70, 20, True, 3), (60, 8, False, 6)])  # fmt: skip
def test_answers_equal_the_pipeline(kind, tmp_path, length, overlap, null, top_k):
    model = PAIRS[kind](tmp_path, "QuestionAnswering")
    theirs = answers(tmp_path, model, QUESTION, TEXT, length, overlap, 15, top_k, null)
    mine = answer(QUESTION, TEXT, tmp_path, top_k=top_k, null=null, window=length, overlap=overlap)
    assert [(one.text, one.start, one.end) for one in mine] == [(text, *place) for text, _, *place in theirs]
    assert [one.score for one in mine] == pytest.approx([score for _, score, *_ in theirs], abs=1e-5)


@pytest.mark.parametrize("kind", PAIRS)
def test_choices_equal_the_reference(kind, tmp_path):
    from transformers import AutoTokenizer

    model = PAIRS[kind](tmp_path, "MultipleChoice").eval()
    choices = ["in the street", "at the university of the angels", "Zoo"]
    made = AutoTokenizer.from_pretrained(tmp_path)([QUESTION] * 3, choices, padding=True, return_tensors="pt")
    with torch.inference_mode():
        scores = model(**{name: rows[None] for name, rows in made.items()}).logits[0].softmax(-1).tolist()
    mine = Answerer(tmp_path).choose(QUESTION, choices)
    assert [scores[one.number] for one in mine] == pytest.approx([one.score for one in mine], abs=1e-5)
    assert [one.score for one in mine] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert [choices[one.number] for one in mine] == [one.text for one in mine]


def test_a_tagger_keeps_its_model_and_gives_equal_entities(taggers):
    folder, _ = taggers
    tagger = Tagger(folder, merge="first")
    for mine, single in zip(tagger([TEXT, "Vienna"]), tag([TEXT, "Vienna"], folder, merge="first"), strict=True):
        assert [one[:1] + one[2:] for one in mine] == [one[:1] + one[2:] for one in single]


def test_models_and_texts_that_do_not_fit_are_refused(tmp_path):
    wordpiece_folder(tmp_path / "tags", "TokenClassification", context=20)
    wordpiece_folder(tmp_path / "answers", "QuestionAnswering", context=20)
    for call, cause in (
        (lambda: tag(["a"], tmp_path / "answers"), "expected a token classifier, got text without one"),
        (lambda: answer("a", "b", tmp_path / "tags"), "expected a model that finds answers"),
        (lambda: Answerer(tmp_path / "tags").choose("a", ["b", "c"]), "expected a multiple-choice model"),
    ):
        with pytest.raises(UsageError, match=cause):
            call()
    with pytest.raises(TextError, match="leave no room in 20"):
        answer(TEXT, "the street", tmp_path / "answers")
    with pytest.raises(TextError, match="context: is empty"):
        answer("a", " ", tmp_path / "answers")
    with pytest.raises(TextError, match="text 2: is empty"):
        tag(["a", ""], tmp_path / "tags")
    config = json.loads((tmp_path / "tags" / "config.json").read_text())
    (tmp_path / "tags" / "config.json").write_text(json.dumps(config | {"id2label": {"0": "O"}}))
    with pytest.raises(CheckpointError, match=r"must name the 5 labels of the tokens \(has 1\)"):
        tag(["a"], tmp_path / "tags")


def test_a_saved_folder_keeps_labels_heads_and_the_pair_s_ends(taggers, tmp_path, kind):
    from transformers import AutoTokenizer

    folder, _ = taggers
    save_folder(load(folder), tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.card["labels"] == LABELS
    assert (again.tokenizer.pair_ends, again.tokenizer.pair_segment) == ((1, 1) if kind == "wordpiece" else (2, 0))
    assert tag([TEXT], tmp_path / "ours") == tag([TEXT], folder)
    export(tmp_path / "ours", tmp_path / "hf", to="hf")
    made = AutoTokenizer.from_pretrained(tmp_path / "hf")("a dog", "the street", return_token_type_ids=True)
    assert (made.input_ids, made.token_type_ids) == again.tokenizer.pair("a dog", "the street")
