"""Meaning of a model's outputs: what a state shares with a run that may go on from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from multimodal.errors import few
from multimodal.system.files import sha256
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint

Meaning = Mapping[str, Sequence[str]]


def meaning_of(start: Checkpoint) -> dict[str, list[str]]:
    """Return the labels, colours and table columns of the card, in order, and the sums of the tokenizer's files."""
    table = start.card.get("table", {})
    parts = {
        "classes": start.card.get("labels") or table.get("labels"),
        "colours": start.card.get("palette"),
        "target": [table["target"]] if table else [],
        "columns": [*table.get("numbers", ()), *table.get("categories", ())],
        **{f"categories of {name}": known for name, known in table.get("categories", {}).items()},
        "tokenizer files": start.tokenizer and _sums(start.tokenizer),
    }
    return {name: [str(one) for one in part] for name, part in parts.items() if part}


def check_meaning(saved: Meaning, now: Meaning) -> None:
    """Raise ValueError that names the first difference. What only one of them has is not compared."""
    for name in [name for name in saved if name in now]:
        old, new = list(saved[name]), list(now[name])
        if old != new:
            first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            place = f" from number {first + 1}" if first else ""
            raise ValueError(f"{name}{place} were {few(old[first:], 3)}, now {few(new[first:], 3)}")


def _sums(tokenizer: Tokenizer) -> list[str]:
    with TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return [f"{path.name} {sha256(path)[:16]}" for path in sorted(Path(folder).iterdir())]
