"""Duplicates among all pages, in their order; output and explanation of each chunk."""

import json
from typing import Any

from multimodal.data.cleaning.cleaner import CleanedPage
from multimodal.data.cleaning.duplicates import PageSentences, places, repeated
from multimodal.data.cleaning.near_duplicates import similarity
from multimodal.data.cleaning.options import CleanOptions
from multimodal.data.cleaning.pages import Chunk
from multimodal.data.cleaning.report import CleanReport
from multimodal.data.cleaning.sentences import sentences
from multimodal.data.cleaning.state import Near, Place, State

BAD = {"not_utf8": "is not UTF-8", "nul": "has a NUL"}


class Merge:
    """Bytes to write, as one chunk after the other comes from the workers. `json`: of each input file, whether it holds
    JSON lines; `to_json`: whether the output does."""

    def __init__(
        self, options: CleanOptions, state: State, report: CleanReport, files: list[str], json: list[bool],
        to_json: bool, explain: bool,
    ):  # fmt: skip
        self.options, self.state, self.report, self.files = options, state, report, files
        self.json, self.to_json, self.explain = json, to_json, explain
        self._seen: dict[int, Place] = {}  # spans of this chunk that stand before
        self._added: dict[int, Place] = {}
        self._explained: list[str] = []

    def __call__(self, chunk: Chunk, pages: list[CleanedPage]) -> tuple[bytes, bytes]:
        """The output and the explanation."""
        self._seen = self.state.spans({key for page in pages for key in page.spans}) if self.options.duplicates else {}
        self._added, self._explained = {}, []
        texts = [self._page(page) for page in pages]
        self.state.add_spans(self._added)
        for file, cause in chunk.faults:
            self.report.fault(self.files[file], cause)
        return "".join(texts).encode(), "".join(self._explained).encode()

    def _page(self, page: CleanedPage) -> str:
        """The page as it is written; '' if it is dropped."""
        self._count(page)
        if page.fault or page.rule:
            return ""
        if page.signature:
            found = (near for near in self.state.near(page.signature.bands)
                     if similarity(near.signature, page.signature.values) >= self.options.near_duplicates)  # fmt: skip
            if near := next(found, None):
                self.report.drop("near_duplicates", len(page.lines), page=True)
                for number, line, _ in page.lines:
                    self._note(page, number, "near_duplicates", line, near.place)
                return ""
        lines = self._once(page) if self.options.duplicates else [line for _, line, _ in page.lines]
        if not lines:
            return ""
        if page.signature:
            place = Place(page.file, page.line)
            self.state.add_page(Near(place, page.signature.values), page.signature.bands)
        return self._written(page, lines)

    def _count(self, page: CleanedPage) -> None:
        report, file = self.report, self.files[page.file]
        report.pages, report.lines = report.pages + 1, report.lines + page.given[0]
        report.characters, report.citations = report.characters + page.given[1], report.citations + page.cited
        for rule, count in page.counts:
            report.drop(rule, count)
        if page.rule:
            report.drop(page.rule, 0, page=True)
        for number, rule in page.bad:
            report.fault(file, BAD[rule], page.line if self.json[page.file] else page.line + number - 1)
        for number, rule, text in page.dropped:
            self._note(page, number, rule, text)
        if page.fault:
            report.fault(file, page.fault, page.line)
            report.lines += 1
            report.drop("unusable", 1, page=True)
            self._note(page, 1, "unusable", "")

    def _once(self, page: CleanedPage) -> list[str]:
        """The lines without spans of sentences that stand earlier; none if too few sentences are left."""
        own = PageSentences(page.keys, [n for n, _, size in page.lines for _ in range(size)], page.file, page.line)
        removed = repeated(own, page.spans, self._seen, self._find)
        left = [number for number in range(len(page.keys)) if number not in removed]
        short = len(left) < max(1, self.options.min_sentences)
        if not short:
            self._added |= (spans := places(own, left))
            self._seen |= spans
        if not removed:
            return [line for _, line, _ in page.lines]
        lines, first = [], 0
        for number, line, size in page.lines:
            gone = {at - first: removed[at] for at in range(first, first + size) if at in removed}
            if gone:
                line = self._shortened(page, number, line, gone)
            if line and short:
                self.report.drop("sentences", 1)
                self._note(page, number, "sentences", line)
            elif line:
                lines.append(line)
            first += size
        if short:
            self.report.drop("sentences" if left else "duplicates", 0, page=True)
        return lines

    def _find(self, spans: list[int]) -> dict[int, Place]:
        """Look up spans among those that stand before."""
        return self.state.spans(spans) | {key: self._added[key] for key in spans if key in self._added}

    def _shortened(self, page: CleanedPage, number: int, line: str, gone: dict[int, Place]) -> str:
        """The line without sentences that stand earlier; '' if none is left."""
        parts = sentences(line)
        rest = "".join(part for at, part in enumerate(parts) if at not in gone).strip()
        self._note(page, number, "duplicates", "".join(parts[at] for at in gone), next(iter(gone.values())), rest)
        if rest:
            self.report.shortened += 1
        else:
            self.report.drop("duplicates", 1)
        return rest

    def _note(
        self, page: CleanedPage, number: int, rule: str, text: str, first: Place | None = None, rest: str = ""
    ) -> None:
        if self.explain:
            record = {"place": self._shown(page.file, page.line, number), "rule": rule, "text": text.strip()}
            if first:
                record["first"] = self._shown(*first[:3])
            if rest:
                record["rest"] = rest
            self._explained.append(_json_line(record))

    def _shown(self, file: int, line: int, number: int) -> str:
        """FILE:LINE of a text, FILE:LINE:NUMBER of a page in JSON lines."""
        place = f"{line}:{number}" if self.json[file] else str(line + number - 1)
        return f"{self.files[file]}:{place}"

    def _written(self, page: CleanedPage, lines: list[str]) -> str:
        report, text = self.report, "\n".join(lines)
        between = "\n" if report.pages_kept else ""
        report.pages_kept, report.lines_kept = report.pages_kept + 1, report.lines_kept + len(lines)
        report.characters_kept += len(text)
        if not self.to_json:
            return f"{between}{text}\n"
        if page.record is None:
            return _json_line({"text": text, "source": f"{self.files[page.file]}:{page.line}"})
        return _json_line(page.record | {self.options.text_column: text})


def _json_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
