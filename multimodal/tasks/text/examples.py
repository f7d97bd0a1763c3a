"""Few-shot prompts: pairs of input and output that stand before the question (Brown et al. 2020, section 2)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from multimodal.errors import UsageError

QUESTION = "Input: {}\nOutput:"  # as which a prompt is asked
EXAMPLE = QUESTION + " {}\n\n"  # as which an example stands before it
STOP = "\n\n"  # where an answer in this form ends


class Example(NamedTuple):
    input: str
    output: str


def read_examples(path: str, flag: str) -> list[Example]:
    """The pairs of a .jsonl file (objects with "input" and "output") or a .tsv file (two columns, which the first line
    may name). Raises UsageError naming `flag`, file and line."""
    ending = Path(path).suffix.lower()
    if ending not in (".jsonl", ".tsv"):
        raise UsageError(f"{flag} {path}: ends in neither .jsonl nor .tsv")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path}: is not UTF-8 text (byte {error.start})") from None
    read = _object if ending == ".jsonl" else _columns
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            pair = read(line.rstrip("\r"))
            if pair is None or not all(text.strip() for text in pair):
                told = 'an object with texts "input" and "output"' if ending == ".jsonl" else "two columns with text"
                raise UsageError(f"{flag} {path}: line {number} is not {told}")
            found.append(pair)
    if ending == ".tsv" and found and tuple(text.lower() for text in found[0]) == Example._fields:
        found = found[1:]
    if not found:
        raise UsageError(f"{flag} {path}: has no example")
    return found


def _object(line: str) -> Example | None:
    try:
        made = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(made, dict) or not all(isinstance(made.get(name), str) for name in Example._fields):
        return None
    return Example(made["input"], made["output"])


def _columns(line: str) -> Example | None:
    cells = line.split("\t")
    return Example(*cells) if len(cells) == 2 else None


def with_examples(prompt: str, examples: list[Example], fits: Callable[[str], bool]) -> tuple[str, int]:
    """The question after as many of the first examples as fit, and how many were left out."""
    question, heads = QUESTION.format(prompt), [EXAMPLE.format(*example) for example in examples]
    least, most = 0, len(heads)
    while least < most:
        count = (least + most + 1) // 2
        least, most = (count, most) if fits("".join(heads[:count]) + question) else (least, count - 1)
    return "".join(heads[:least]) + question, len(heads) - least
