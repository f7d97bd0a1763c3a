"""Few-shot prompts: demonstrations before the question (Brown et al. 2020, section 2)."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from multimodal.data.manifests import tsv_cells
from multimodal.errors import UsageError
from multimodal.system.files import read_text_lines, strict_json

QUESTION = "Input: {}\nOutput:"
EXAMPLE = QUESTION + " {}\n\n"
STOP = "\n\n"  # ends an answer


class Demonstration(NamedTuple):
    input: str
    output: str


def read_examples(path: str, flag: str) -> list[Demonstration]:
    """Read a .jsonl file (objects with "input" and "output") or a .tsv file (two columns, optionally with a header).
    Raises UsageError naming `flag`, file and line."""
    ending = Path(path).suffix.lower()
    if ending not in (".jsonl", ".tsv"):
        raise UsageError(f"{flag} {path}: must end in .jsonl or .tsv")
    read = _object if ending == ".jsonl" else _columns
    examples = []
    for number, line in enumerate(read_text_lines(path, flag), 1):
        if line.strip():
            pair = read(line.rstrip("\r"))
            if pair is None or not all(text.strip() for text in pair):
                expected = (
                    'an object with texts "input" and "output"' if ending == ".jsonl" else "two columns with text"
                )
                raise UsageError(f"{flag} {path}: line {number} is not {expected}")
            examples.append(pair)
    if ending == ".tsv" and examples and tuple(text.lower() for text in examples[0]) == Demonstration._fields:
        examples = examples[1:]
    if not examples:
        raise UsageError(f"{flag} {path}: has no example")
    return examples


def _object(line: str) -> Demonstration | None:
    try:
        row = strict_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in Demonstration._fields):
        return None
    return Demonstration(row["input"], row["output"])


def _columns(line: str) -> Demonstration | None:
    cells = tsv_cells(line)
    return Demonstration(*cells) if len(cells) == 2 else None


def with_examples(prompt: str, examples: list[Demonstration], fits: Callable[[str], bool]) -> tuple[str, int]:
    """(the question after as many of the first examples as fit, number of examples dropped)."""
    question, heads = QUESTION.format(prompt), [EXAMPLE.format(*example) for example in examples]
    least, most = 0, len(heads)
    while least < most:
        count = (least + most + 1) // 2
        least, most = (count, most) if fits("".join(heads[:count]) + question) else (least, count - 1)
    return "".join(heads[:least]) + question, len(heads) - least
