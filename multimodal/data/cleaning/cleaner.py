"""Rules of a chunk of pages, in a worker: all that needs no other page."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from multimodal.data.cleaning.near_duplicates import Signature, Signatures
from multimodal.data.cleaning.options import CleanOptions
from multimodal.data.cleaning.pages import PageText, RawPage, page_text
from multimodal.data.cleaning.rules import Dropped, Rules
from multimodal.data.cleaning.sentences import sentence_key, span_keys
from multimodal.errors import DataError


class CleanedPage(NamedTuple):
    """`lines`: number (from 1), text and count of sentences of each line that stays; `keys`, `spans`: of all their
    sentences. `given`: lines and characters before. `counts`: dropped lines by rule; `dropped`: the lines themselves,
    for an explanation; `bad`: those that cannot be used. `rule`: the one that dropped the page. `fault`: cause for
    which the page cannot be used."""

    file: int
    line: int
    lines: Sequence[tuple[int, str, int]] = ()
    keys: Sequence[int] = ()
    spans: Sequence[int] = ()
    given: tuple[int, int] = (0, 0)
    counts: Sequence[tuple[str, int]] = ()
    dropped: Sequence[Dropped] = ()
    bad: Sequence[tuple[int, str]] = ()
    rule: str = ""
    cited: int = 0
    record: dict[str, Any] | None = None
    signature: Signature | None = None
    fault: str = ""


class Cleaner:
    """`json`: of each input file, whether it holds JSON lines. `explain`: keep the lines that are dropped."""

    def __init__(self, options: CleanOptions, json: Sequence[bool], bad_words: Iterable[str], explain: bool):
        self.options, self.json, self.explain = options, json, explain
        self._rules = Rules(options, bad_words)
        self._signatures = Signatures(options.near_duplicates) if options.near_duplicates is not None else None

    def __call__(self, pages: Sequence[RawPage]) -> list[CleanedPage]:
        return [self._page(page) for page in pages]

    def _page(self, raw: RawPage) -> CleanedPage:
        if raw.fault:
            return CleanedPage(raw.file, raw.line, fault=raw.fault)
        try:
            text = page_text(raw, self.options.text_column if self.json[raw.file] else None)
        except DataError as error:
            return CleanedPage(raw.file, raw.line, fault=str(error))
        return self._cleaned(raw, text)

    def _cleaned(self, raw: RawPage, page: PageText) -> CleanedPage:
        judged = self._rules(page.text)
        dropped = [*judged.dropped, *((number, rule, "") for number, rule in page.bad.items())]
        keys, spans, signature = [], [], None
        if self.options.duplicates:
            keys = [sentence_key(part) for _, _, parts in judged.lines for part in parts]
            spans = span_keys(keys)
        if self._signatures and not judged.rule:
            signature = self._signatures("\n".join(line for _, line, _ in judged.lines))
        return CleanedPage(
            raw.file, raw.line, [(number, line, len(parts)) for number, line, parts in judged.lines], keys, spans,
            (len(judged.lines) + len(dropped), len(page.text)), [*Counter(rule for _, rule, _ in dropped).items()],
            sorted(dropped) if self.explain else (), [*page.bad.items()], judged.rule, judged.cited, page.record,
            signature,
        )  # fmt: skip
