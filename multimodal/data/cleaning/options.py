"""Options of text cleaning; the defaults are C4's (Raffel et al. 2020, section 2.2)."""

from multimodal.system.options import OptionSet, option


class CleanOptions(OptionSet):
    """Each rule has a switch: False, 0 or None turns it off."""

    documents: str = option("none", "page of a text file. none: the file; lines: each line; blank: each part between "
                            "blank lines", choices=("none", "lines", "blank"))  # fmt: skip
    text_column: str = option("text", "field of a JSON line that holds the page's text", "NAME")
    punctuation: bool = option(True, "drop lines without a final . ! ? or closing quotation mark (default: True)")
    min_words: int = option(5, "drop lines with fewer words", "N", low=0)
    min_sentences: int = option(3, "drop pages with fewer sentences", "N", low=0)
    javascript: bool = option(True, "drop lines with the word javascript (default: True)")
    policy: bool = option(True, 'drop lines such as "privacy policy" or "use of cookies" (default: True)')
    citations: bool = option(True, "remove citation marks: [1], [edit], [citation needed] (default: True)")
    lorem_ipsum: bool = option(True, 'drop pages with "lorem ipsum" (default: True)')
    curly_brackets: bool = option(True, "drop pages with a curly bracket (default: True)")
    bad_words: str | None = option(None, "drop pages with a word or phrase of FILE, one per line", "FILE")
    language: str | None = option(None, "drop pages not in this language: en, de …", "CODE")
    language_probability: float = option(0.99, "least probability of the language", "P", low=0, high=1)
    duplicates: bool = option(True, "drop all but the first of each span of three sentences (default: True)")
    near_duplicates: float | None = option(None, "drop pages whose word 5-grams overlap with an earlier page's by this "
                                           "Jaccard similarity, by MinHash; 0.8 is usual", "J",
                                           low=0.1, high=1)  # fmt: skip


class CleanMachineOptions(OptionSet):
    workers: int = option(1, "processes; the result is the same", "N", low=1)
    memory: int = option(256, "of the set of sentence spans, the rest of which is on disk", "MB", low=1, high=1 << 30)
