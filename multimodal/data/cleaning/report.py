"""Counts of a cleaning run."""

from dataclasses import asdict, dataclass, field
from typing import Any

RULES = ("punctuation", "words", "javascript", "policy", "lorem_ipsum", "curly_brackets", "bad_words", "sentences",
         "language", "near_duplicates", "duplicates", "not_utf8", "nul", "unusable")  # fmt: skip


@dataclass
class CleanReport:
    """Pages, lines that are not blank, and characters of both sides. `shortened`: lines that lost some of their
    sentences as duplicates. `citations`: lines that lost citation marks. `dropped`: by rule, lines and the pages that
    it dropped as a whole. `faults`: what cannot be used, by file: cause, times, first line."""

    pages: int = 0
    pages_kept: int = 0
    lines: int = 0
    lines_kept: int = 0
    characters: int = 0
    characters_kept: int = 0
    shortened: int = 0
    citations: int = 0
    dropped: dict[str, list[int]] = field(default_factory=lambda: {rule: [0, 0] for rule in RULES})
    faults: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def drop(self, rule: str, lines: int, page: bool = False) -> None:
        self.dropped[rule][0] += lines
        self.dropped[rule][1] += page

    def fault(self, file: str, cause: str, line: int = 0) -> None:
        self.faults.setdefault(file, {}).setdefault(cause, [0, line])[0] += 1

    def fault_lines(self) -> list[str]:
        """Each fault on one line that names the file."""
        return [
            f"{file}{f': line {line}' if line else ''}: {cause}{f', and {times - 1} more such' if times > 1 else ''}"
            for file, causes in self.faults.items() for cause, (times, line) in causes.items()
        ]  # fmt: skip

    def table(self) -> list[str]:
        """The counts for people."""
        rows = [(rule, *counts) for rule, counts in self.dropped.items() if any(counts)]
        return [
            f"{'dropped by':16}{'lines':>12}{'pages':>12}",
            *(f"{rule:16}{lines:>12,}{pages:>12,}" for rule, lines, pages in rows),
            f"{'kept':16}{self.lines_kept:>12,}{self.pages_kept:>12,}",
            f"{'of':16}{self.lines:>12,}{self.pages:>12,}",
            f"characters: {self.characters_kept:,} of {self.characters:,}; shortened lines: {self.shortened:,}; "
            f"lines without citation marks: {self.citations:,}",
        ]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
