"""Phrases that must not come back in docstrings, comments, messages, README and docs, each with a better wording."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.house.sources import BENCHMARKS, PACKAGE, RECIPES, TESTS, Source, source

WORD = r"\b"
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
ANY = re.compile(rf"\b(?:{'|'.join(phrase.removeprefix(WORD) for phrase in PHRASES)})", re.I)  # a third of the time
FILES = [path for path in PACKAGE + RECIPES + BENCHMARKS + TESTS if path != Path(__file__)]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(file: Source) -> Iterator[tuple[int, str]]:
    """Comments and the literal parts of strings that read as text, with their lines."""
    yield from file.strings
    hashes = "\n".join(line.partition("#")[2] for line in file.lines if "#" in line)
    if ANY.search(hashes):  # in a comment, or in a string with a #; telling which takes most of the time
        yield from file.comments()


def written(page: Path) -> Iterator[tuple[int, str]]:
    """Lines outside the blocks of code."""
    text = page.read_text(encoding="utf-8")
    yield from enumerate(re.sub(r"(?s)```.*?```", lambda block: "\n" * block[0].count("\n"), text).splitlines(), 1)


def found_phrases() -> Iterator[str]:
    """Each place of a phrase, with the better wording."""
    places = [(file.name, *place) for file in map(source, FILES) for place in prose(file)]
    places += [(page.name, *place) for page in PAGES for place in written(page)]
    for name, number, text in places:
        for phrase, better in PHRASES.items() if ANY.search(text) else ():
            if match := re.search(phrase, text, re.I):
                yield f"{name}:{number}: {match[0]!r}; better: {better}"
