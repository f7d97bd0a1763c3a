"""Conversations from JSON lines."""

import json

import pytest

from multimodal.data.datasets.chats import open_chats, question, write_chats
from multimodal.data.remote.trust import Trust
from multimodal.errors import DataError, UsageError

ASKED = {"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is this?"}]}


def written(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_paths_are_of_the_list_and_the_last_answer_is_the_assistants(tmp_path):
    said = [ASKED, {"role": "assistant", "content": "a dog"}, {"role": "user", "content": "And its colour?"}]
    file = written(
        tmp_path / "q.jsonl",
        {"messages": [ASKED], "answers": ["a dog", "a puppy"], "task": "classes"},
        {"messages": [*said, {"role": "assistant", "content": "brown"}]},
    )
    source = open_chats(file)
    first, second = source.read(0), source.read(1)
    assert first.texts == ("a dog", "a puppy")
    assert first.fields["task"] == "classes"
    assert first.fields["messages"][0]["content"][0]["path"] == str(tmp_path / "a.png")
    assert second.texts == ("brown",)
    assert [message["role"] for message in second.fields["messages"]] == ["user", "assistant", "user"]


def test_what_is_written_is_read(tmp_path):
    rows = [question("Which word?", ["yes"], "speech", "wer", audio="a.wav"), question("2 + 2?", ["4"], "sums")]
    assert write_chats(tmp_path / "made" / "q.jsonl", rows) == 2
    source = open_chats(tmp_path / "made" / "q.jsonl")
    assert source.read(0).fields["metric"] == "wer"
    assert source.read(1).fields["messages"] == [{"role": "user", "content": "2 + 2?"}]
    assert write_chats(tmp_path / "made" / "q.jsonl", rows[1:]) == 1
    written(tmp_path / "made" / "q.jsonl", {"messages": [ASKED], "answers": ["by hand"]})
    with pytest.raises(UsageError, match="not as multimodal wrote it"):
        write_chats(tmp_path / "made" / "q.jsonl", rows)


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"answers": ["a"]}, "expected a list of messages"),
        ({"messages": [ASKED]}, "answers: expected a list of texts, or a last message of the assistant"),
        ({"messages": [ASKED], "answers": [""]}, "answers: expected a list of texts"),
        ({"messages": [ASKED], "answers": "a dog"}, "answers: expected a list of texts"),
        ({"messages": [{"role": "bot", "content": "a"}], "answers": ["a"]}, "role must be one of system, user"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the one before the answer must be the user's"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "../b.png"}]}], "answers": ["a"]},
         "a path outside of the folder of the list"),
        ({"messages": [ASKED], "answers": ["a"], "task": ["x"]}, r"task: expected text, got \['x'\]"),
        ({"messages": [ASKED], "answers": ["a"], "metric": 3}, "metric: expected text, got 3"),
    ],
)  # fmt: skip
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path, row, cause):
    source = open_chats(written(tmp_path / "q.jsonl", row, {"messages": [ASKED], "answers": ["a"]}))
    with pytest.raises(DataError, match=cause.replace("+", r"\+")) as error:
        source.read(0)
    assert "q.jsonl line 1" in str(error.value)
    assert source.read(1).texts == ("a",)


def test_other_files_need_trust(tmp_path):
    row = {"messages": [{"role": "user", "content": [{"type": "image", "path": "/b.png"}]}], "answers": ["a"]}
    source = open_chats(written(tmp_path / "q.jsonl", row), Trust(trust_paths=True))
    assert source.read(0).fields["messages"][0]["content"][0]["path"] == "/b.png"
    with pytest.raises(DataError, match="no such file"):
        open_chats(tmp_path / "none.jsonl")
