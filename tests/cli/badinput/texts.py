"""Texts and examples for language models."""

from pathlib import Path

from .rows import Row, silent

EXAMPLES = "generate a --examples {} -m {{lm}} --max_new_tokens 2"
TSV = "examples.tsv: line 1 is not two columns with text"
JSONL = 'examples.jsonl: line 1 is not an object with texts "input" and "output"'

ROWS = [
    Row("a field beyond csv's limit", EXAMPLES.format("examples.tsv"),
        lambda: Path("examples.tsv").write_text("x" * 200_000), [f"--examples {TSV}"], silent),
    Row("a line too deep for JSON", EXAMPLES.format("examples.jsonl"),
        lambda: Path("examples.jsonl").write_text("[" * 100_000), [f"--examples {JSONL}"], silent),
]  # fmt: skip
