"""Phrases that must not come back in docstrings, comments, messages, README and docs, each with a better wording."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PHRASES = {
    r"\b(is|are|was|were) told\b": "gets, is passed, is reported",
    r"\b(is|are) said\b": "is reported; or name who writes it",
    r"\b(is|are) looked at\b": "is checked, is read",
    r"\banew\b": "again, overwrite, rerun",
    r"\bfor ever\b": "forever, without a limit",
    r"\bit is no (?!longer|better|faster|more)": "it is not a …, expected a … (got …)",
    r"\bhas it not\b": "does not have it",
    r"\bthere is to say\b": "drop it",
    r"\b(not|is not|lies not) from 0 to 1\b": "must be in [0, 1] (got …)",
    r"\bends not in\b": "must end in",
    r"\bgoes? on there\b": "resumes",
    r"\bof which there are\b": "say the number",
    r"\bleave\b[^.]{0,40}\balone\b": "skip, do not change",
    r"\bleaves? (it|them) out\b": "skips it",
    r"\b(was|were|is|are) not known, and\b": "say what is missing",
    r"\bdo not compare\b": "are not comparable",
    r"\bwhat a person sees\b": "terminal output",
    r"\bwhat somebody says\b": "speech",
    r"\bwhere somebody speaks\b": "voice activity",
    r"\ba shorter way\b": "a fast path",
    r"\band the way back\b": "save and restore",
    r"\bin which we are behind\b": "where we are slower",
    r"(?<![\"a] )(?<!\")\bpictures?\b(?! of a)": "image",
    r"\bhas to say\b": "reports",
    r"\bof a sudden\b": "suddenly",
    r"\bbesides? that\b": "also",
}
FIRST = re.compile(r"^(What|Where|Whether|How|That|Of|Those|Whatever)\b(?!.*\?$)")  # a noun phrase, or an imperative
FOLDERS = ("multimodal", "recipes", "benchmarks", "tests")
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name != Path(__file__).name
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and the literal parts of strings that read as text, with their lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(re.sub(r"(?s)```.*?```", lambda block: "\n" * block[0].count("\n"), text).splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_prose_is_plain(path):
    found = [
        f"line {number}: {match[0]!r}; better: {better}"
        for number, text in prose(path)
        for phrase, better in PHRASES.items()
        if (match := re.search(phrase, text, re.I))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_begins_with_a_noun_or_an_imperative(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    found = [text.splitlines()[0] for node in nodes if FIRST.match(text := ast.get_docstring(node) or "")]
    assert not found, "\n".join(found)
