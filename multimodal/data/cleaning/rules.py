"""C4's rules for lines and pages (Raffel et al. 2020, section 2.2)."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from multimodal.data.cleaning.language import LanguageRule
from multimodal.data.cleaning.options import CleanOptions
from multimodal.data.cleaning.sentences import sentences

# of Latin scripts, then Chinese and Japanese, Hindi, Arabic, Urdu
TERMINAL = (".", "!", "?", '"', "”", "»", "。", "！", "？", "」", "।", "؟", "۔")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]", re.I)
_WORD = re.compile(r"\w+")

Dropped = tuple[int, str, str]  # number of a line in its page, from 1; rule; text


class Judged(NamedTuple):
    """Lines that stay, with their numbers from 1 and their sentences. `rule`: the one that drops the page, or ''.
    `cited`: lines from which citation marks were removed."""

    lines: list[tuple[int, str, list[str]]]
    dropped: list[Dropped]
    rule: str
    cited: int


class BadWords:
    """Words and phrases that stand between characters that are no letters, digits or underscores, in any case."""

    def __init__(self, words: Iterable[str]):
        words = {" ".join(word.lower().split()) for word in words} - {""}
        self.words = {word for word in words if _WORD.fullmatch(word)}
        self.phrases = sorted(words - self.words)
        self._found = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, self.phrases))})(?!\w)")

    def __call__(self, text: str) -> bool:
        """Return True if the lower-case `text` has one."""
        if not self.words.isdisjoint(_WORD.findall(text)):
            return True
        return any(phrase in text for phrase in self.phrases) and self._found.search(text) is not None


class Rules:
    """Rules of one page at a time, with those that `options` turn on."""

    def __init__(self, options: CleanOptions, bad_words: Iterable[str] = ()):
        self.options, self.bad = options, BadWords(bad_words)
        self.language = LanguageRule(options.language, options.language_probability) if options.language else None

    def __call__(self, text: str) -> Judged:
        low = text.lower()
        if rule := self._page_rule(text, low):
            lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
            return Judged([], [(number, rule, line) for number, line in lines if line], rule, 0)
        kept, dropped, cited = self._lines(text, low)
        whole = [(number, line, sentences(line)) for number, line in kept]
        if sum(len(parts) for _, _, parts in whole) < max(1, self.options.min_sentences):
            rule = "sentences"
        elif self.language and not self.language("\n".join(line for _, line in kept)):
            rule = "language"
        if rule:
            dropped = sorted([*dropped, *((number, rule, line) for number, line in kept)])
        return Judged([] if rule else whole, dropped, rule, cited)

    def _page_rule(self, text: str, low: str) -> str:
        if self.options.curly_brackets and ("{" in text or "}" in text):
            return "curly_brackets"
        if self.options.lorem_ipsum and "lorem ipsum" in low:
            return "lorem_ipsum"
        return "bad_words" if self.options.bad_words and self.bad(low) else ""

    def _lines(self, text: str, low: str) -> tuple[list[tuple[int, str]], list[Dropped], int]:
        """Lines that stay, lines that do not, and how many lost citation marks."""
        options, kept, dropped, cited = self.options, [], [], 0
        punctuation, least = options.punctuation, options.min_words
        javascript = options.javascript and "javascript" in low
        policy = options.policy and any(phrase in low for phrase in POLICY)
        citations = options.citations and "[" in text
        for number, line in enumerate(text.split("\n"), 1):
            line = whole = line.strip()
            if not line:
                continue
            if citations and "[" in line:
                line = CITATION.sub("", line).strip()
                cited += line != whole
            if punctuation and not line.endswith(TERMINAL):
                dropped.append((number, "punctuation", whole))
            elif not line or (least and len(line.split(None, least - 1)) < least):
                dropped.append((number, "words", whole))
            elif javascript and "javascript" in line.lower():
                dropped.append((number, "javascript", whole))
            elif policy and any(phrase in line.lower() for phrase in POLICY):
                dropped.append((number, "policy", whole))
            else:
                kept.append((number, line))
        return kept, dropped, cited
