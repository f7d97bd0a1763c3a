"""Conversations to train and to evaluate any-to-text models: JSON lines of messages and the answers to the last one.

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "What is
    this?"}]}], "answers": ["a dog", "a puppy"], "task": "classes", "metric": "exact"}

Or the last message is the assistant's, its only answer. `task`, `metric` and `language` matter to `multimodal evaluate
answers`."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from multimodal.data.manifests import Line, read_list
from multimodal.data.remote.trust import OWN_FOLDER, Trust, is_remote
from multimodal.data.sources import PackedRows, Source, SourceRow, joined
from multimodal.errors import DataError, MultimodalError, UsageError, one_line
from multimodal.system.files import is_data_url, shown
from multimodal.system.outputs import is_ours, opened_output
from multimodal.tokens.chat.messages import SOURCES, read_messages

KINDS = ("image", "audio", "video")
FIELDS = ("task", "metric", "language")


def open_chats(data: str | Path | Sequence[str | Path], trust: Trust = OWN_FOLDER) -> Source:
    """Open JSON lines of conversations; `texts` of a row are its answers, `fields["messages"]` those before them with
    the paths of files resolved. `trust`: see `open_source`. Raises DataError."""
    if not isinstance(data, str | Path):
        return joined([open_chats(one, trust) for one in data])
    if not Path(data).is_file():
        raise DataError(f"{data}: no such file")
    base = str(Path(data).parent)
    return PackedRows(str(data), (_row(line, base, trust) for line in read_list(Path(data))))


def _row(line: Line, base: str, trust: Trust) -> SourceRow:
    if line.fault:
        return SourceRow("", fault=line.fault, place=line.number)
    try:
        messages, answers = _split(line.values)
        messages = [_placed(message, base, trust) for message in messages]
        read_messages(messages)
    except MultimodalError as error:
        return SourceRow("", fault=one_line(error), place=line.number)
    given = {name: line.values[name] for name in FIELDS if line.values.get(name) is not None}
    if odd := [name for name, value in given.items() if not isinstance(value, str)]:
        return SourceRow("", fault=f"{odd[0]}: expected text, got {shown(given[odd[0]])}", place=line.number)
    fields = {"messages": messages} | given
    return SourceRow("", "", None, answers, fields, place=line.number)


def _split(values: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages up to the last of the user, and the answers to it."""
    messages, answers = values.get("messages"), values.get("answers")
    read_messages(messages)
    if messages[-1]["role"] == "assistant":
        last = read_messages(messages[-1:])[0]
        if answers is not None or any(part.kind != "text" for part in last.parts):
            raise UsageError("answers: expected either them or a last message of the assistant, in text")
        messages, answers = messages[:-1], [last.text]
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise UsageError("answers: expected a list of texts, or a last message of the assistant")
    if not messages or messages[-1]["role"] != "user":
        raise UsageError("messages: the one before the answer must be the user's")
    return messages, answers


def _placed(message: dict[str, Any], base: str, trust: Trust) -> dict[str, Any]:
    """The message with the paths of its files. Raises DataError for one that leaves the folder."""
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        part = dict(part)
        for key in part.keys() & {*KINDS, *SOURCES} - {"base64"}:
            held = key == "url" and is_data_url(part[key])  # the content itself
            if part.get("type") in KINDS and isinstance(part[key], str) and not held:
                part[key], refused = trust.placed(part[key], base)
                if refused := refused or trust.strays(part[key], [os.path.realpath(base)]):
                    raise DataError(f"{part[key]}: {refused}")
        parts.append(part)
    return message | {"content": parts}


def media_of(row: SourceRow) -> list[str | bytes]:
    """The real paths or contents of the files that a conversation shows."""
    messages = read_messages(row.fields["messages"]) if row.fields and not row.fault else []
    values = [part.value for message in messages for part in message.parts if part.kind != "text"]
    local = lambda value: isinstance(value, str) and not is_remote(value)
    return [os.path.realpath(one) if local(one) else one for one in values if isinstance(one, str | bytes)]


def question(
    text: str, answers: Sequence[str], task: str, metric: str = "exact", **media: str | Path
) -> dict[str, Any]:  # fmt: skip
    """A row that asks about `media`, such as image="a.jpg", or about nothing."""
    parts = [{"type": kind, "path": str(path)} for kind, path in media.items()]
    content: Any = [*parts, {"type": "text", "text": text}] if parts else text
    return {"task": task, "metric": metric, "messages": [{"role": "user", "content": content}], "answers": [*answers]}


def refuse_foreign(path: Path) -> None:
    """Raise UsageError for a file that another program wrote or changed."""
    if os.path.lexists(path) and not is_ours(path):
        raise UsageError(f"{path}: exists and is not as multimodal wrote it; move it away")


def write_chats(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSON lines; return their number. Raises as `refuse_foreign` does."""
    refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with opened_output(path, "keep") as file:
        for row in rows:
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
            count += 1
    return count
