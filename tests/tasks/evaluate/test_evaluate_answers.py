"""Figures of answers, by hand, and the command on a tiny model."""

import base64
import io
import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from sacrebleu.metrics import BLEU

from multimodal import Asker
from multimodal.data.datasets.chats import open_chats, question, write_chats
from multimodal.errors import DataError
from multimodal.tasks.evaluate.text.answers import AnsweredQuestion, AnswerEvaluation, evaluate_answers
from multimodal.weights.folder import save_folder
from tests.helpers.commands import run
from tests.helpers.data.chats import checkpoint


@pytest.fixture(scope="module")
def tiny():
    return checkpoint()


def row(answer: str, *references: str, task: str = "classes", metric: str = "exact") -> AnsweredQuestion:
    return AnsweredQuestion("", task, metric, "?", answer, references)


def test_figures_are_those_by_hand():
    rows = [
        row("A dog.", "a dog", "a puppy"), row("the puppy", "a dog", "a puppy"), row("cat", "a ship"),
        row("ship", "ship"), row("dogs run", "dogs run home", task="speech", metric="wer"),
        row("ein Hund", "ein Hund", task="german", metric="bleu"),
        AnsweredQuestion("", "text", "perplexity", "?", "", ("x",), (math.log(2) * 6, 6)),
    ]  # fmt: skip
    figures = AnswerEvaluation(rows, []).figures()
    assert figures["classes"] == {"questions": 4, "accuracy": 75, "constant": 50}
    assert figures["speech"]["wer"] == 33.33
    assert figures["text"]["perplexity"] == 2
    assert figures["german"] == {"questions": 1, "bleu": 0, "bleu_tokenizer": "13a"}
    rows = [AnsweredQuestion("", "zh", "bleu", "?", "我喜欢猫", ("我喜欢猫",), language="zh")]
    assert AnswerEvaluation(rows, []).figures()["zh"] == {"questions": 1, "bleu": 100, "bleu_tokenizer": "zh"}
    rows = [AnsweredQuestion("", code, "wer", "?", "funf", ("fünf",), language=code) for code in ("en", "de")]
    assert [one["wer"] for one in AnswerEvaluation(rows, []).figures().values()] == [0, 100]
    rows = [replace(one, task="speech") for one in rows]
    assert AnswerEvaluation(rows, []).figures()["speech"]["wer"] == 50
    rows = [row("a dog", "...", task="speech", metric="wer")]
    assert AnswerEvaluation(rows, []).figures()["speech"] == {"questions": 1, "wer": None, "cer": None}
    rows = [row("a dog", "a dog", task="image", metric="cider")]
    assert AnswerEvaluation(rows, []).figures()["image"] == {
        "questions": 1, "bleu4": None, "rouge_l": None, "cider": None}  # fmt: skip
    assert list(figures) == ["classes", "speech", "german", "text"]


def test_each_of_several_references_counts():
    first, second = ("the cat is sitting here now", "a cat sat"), ("two dogs run across the field",)
    answers = ["the cat is sitting here", "two dogs ran across the field"]
    likely = BLEU().corpus_score(answers, [[first[0], second[0]], [first[1], None]]).score
    for own in (first, first[::-1]):
        pairs = [(answers[0], own), (answers[1], second)]
        rows = [row(answer, *known, task=m, metric=m) for m in ("bleu", "wer") for answer, known in pairs]
        figures = AnswerEvaluation(rows, []).figures()
        assert figures["bleu"]["bleu"] == pytest.approx(likely, abs=0.005)
        assert figures["wer"]["wer"] == pytest.approx(100 * 2 / 12, abs=0.005)


@pytest.mark.parametrize(("answer", "reference", "right"), [
    ("The dog!", "dog", True), ("काला", "कील", False), ("ที่", "ทา", False), ("-5", "5", False), ("−5.", "-5", True),
    ("3-5", "3 5", True), ("well-known", "Well known", True), ("e\u0301te\u0301", "été", True),
    ("", "A", False), ("(a)", "A", True), ("the", "A", False), ("<", ">", False), ("+", "-", False), ("+", "+", True),
    ("don’t", "Don't", True),
])  # fmt: skip
def test_words_keep_their_marks_and_numbers_their_signs(answer, reference, right):
    assert row(answer, reference).right == right


def test_an_image_in_a_data_url_is_left_out_too(tiny, tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (12, 8), "red").save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    forms = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image", "url": url},
             {"type": "image", "base64": url.partition(",")[2]}]  # fmt: skip
    asked = [{"messages": [{"role": "user", "content": [form, {"type": "text", "text": "which?"}]}],
              "answers": ["red"]} for form in forms]  # fmt: skip
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, asked)))
    asker = Asker(tiny, compute_type="float32", max_new_tokens=3)
    source = open_chats(tmp_path / "q.jsonl")
    seen = evaluate_answers(source, asker)
    assert seen.broken == []
    assert [one.answer for one in seen.rows] == [asker("which?", file.getvalue())] * 3
    assert {one.question for one in seen.rows} == {"[image] which?"}
    alone = evaluate_answers(source, asker, ("image",))
    assert [(one.question, one.answer) for one in alone.rows] == [("which?", asker("which?"))] * 3


def test_inputs_can_be_left_out_and_a_broken_item_leaves_the_others(tiny, tmp_path):
    Image.new("RGB", (12, 8), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"none")
    rows = [question("which?", ["red"], "colours", image=name) for name in ("a.png", "b.png")]
    rows.append(question("which?", ["red"], "text", "perplexity"))
    write_chats(tmp_path / "q.jsonl", rows)
    asker = Asker(tiny, compute_type="float32", max_new_tokens=3)
    source = open_chats(tmp_path / "q.jsonl")
    found = evaluate_answers(source, asker)
    assert found.rows[0].answer == asker("which?", tmp_path / "a.png")
    assert len(found.rows) == 2
    assert "q.jsonl line 2" in found.broken[0]
    alone = evaluate_answers(source, asker, ("image",))
    assert [one.answer for one in alone.rows] == [asker("which?")] * 3
    nats, tokens = found.rows[1].loss
    ids = [*asker.writer.prompt([asker.message("which?")]).ids, *tiny.tokenizer.encode("red"), asker.writer.ends[0]]
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([ids]), [torch.zeros(0, 16)])[0].log_softmax(-1)
    assert tokens == 4
    assert nats == pytest.approx(-sum(float(logits[i - 1, ids[i]]) for i in range(len(ids) - 4, len(ids))), abs=1e-3)


@pytest.mark.parametrize(("metrics", "cause"), [
    (["f1"], r"line 1: unknown metric 'f1' \(known: exact, wer"),
    (["exact", "wer"], "line 2: metric 'wer' in task 'x', whose other questions have 'exact'"),
    (["cider"], "line 1: no answer has a word, which cider needs"),
])  # fmt: skip
def test_a_metric_that_cannot_be_computed_is_named(tiny, tmp_path, metrics, cause):
    write_chats(tmp_path / "q.jsonl", [question("?", ["..."], "x", metric) for metric in metrics])
    with pytest.raises(DataError, match=rf"q\.jsonl {cause}"):
        evaluate_answers(open_chats(tmp_path / "q.jsonl"), Asker(tiny))


def test_a_task_has_one_tokenizer_of_bleu(tiny, tmp_path):
    rows = [question("?", ["a"], "x", "bleu") | {"language": language} for language in ("en", "de", "zh")]
    write_chats(tmp_path / "q.jsonl", rows)
    with pytest.raises(DataError, match=r"line 3: metric 'bleu of zh tokens' .* other questions have 'bleu of 13a"):
        evaluate_answers(open_chats(tmp_path / "q.jsonl"), Asker(tiny))


def test_answers_are_written_up_to_where_the_command_stops(tiny, tmp_path, capsys, monkeypatch):
    save_folder(tiny, tmp_path / "tiny")
    write_chats(tmp_path / "q.jsonl", [question("1 + 1", ["2"], "sums")] * 3)
    whole = Asker.chat_many
    monkeypatch.setattr(
        Asker, "chat_many", lambda *given: (1 / i and one for i, one in zip((1, 0), whole(*given), strict=False))
    )
    with pytest.raises(ZeroDivisionError):
        run(capsys, "evaluate", "answers", str(tmp_path / "q.jsonl"), "--model", str(tmp_path / "tiny"),
            "--max_new_tokens", "3", "--answers", str(tmp_path / "a.jsonl"))  # fmt: skip
    (answer,) = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert answer["references"] == ["2"]


def test_the_command_prints_tasks_and_writes_answers(tiny, tmp_path, capsys):
    save_folder(tiny, tmp_path / "tiny")
    write_chats(tmp_path / "q.jsonl", [question("1 + 1", ["2"], "sums")])
    given = [str(tmp_path / "q.jsonl"), "--model", str(tmp_path / "tiny"), "--format", "json", "--max_new_tokens", "3",
             "--answers", str(tmp_path / "a.jsonl"), "--report", str(tmp_path / "r.md")]  # fmt: skip
    code, out, _ = run(capsys, "evaluate", "answers", *given)
    assert code == 0
    (figures,) = json.loads(out)["sets"].values()
    assert figures["sums"]["questions"] == 1
    (answer,) = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert answer["references"] == ["2"]
    assert "sums" in (tmp_path / "r.md").read_text()
    (tmp_path / "q.jsonl").write_text("{}\n")
    (tmp_path / "a.jsonl").unlink()
    code, _, err = run(capsys, "evaluate", "answers", *given)
    assert code == 1
    assert "q.jsonl: no usable item" in err
    assert not (tmp_path / "a.jsonl").exists()
