"""Sentences of a line, and keys of spans of three."""

import re
from hashlib import blake2b

SPAN = 3  # sentences of a span that may stand once
# the end of a sentence: a mark, closing quotes and brackets, a space (none in Chinese and Japanese); a lower-case
# letter continues, as after "e.g."
_END = re.compile(r"""[.!?…。！？]["'”’»)\]」』）]*(?:\s+(?=[^a-z\s])|(?<=[。！？」』）])(?=[^"'”’»)\]」』）\s]))""")


def sentences(line: str) -> list[str]:
    """Split a line; the parts, with the space after each, make the line. An abbreviation before a capital, as in "Dr.
    Smith", ends a sentence."""
    found, start = [], 0
    for match in _END.finditer(line):
        found.append(line[start : match.end()])
        start = match.end()
    found.append(line[start:])
    return found


def sentence_key(sentence: str) -> int:
    """64 bits of a sentence, regardless of its case and of space around it."""
    return int.from_bytes(blake2b(sentence.lower().strip().encode(), digest_size=8).digest(), "little")


def span_keys(keys: list[int]) -> list[int]:
    """Signed 64 bits of each span of three sentences. Python hashes tuples of integers alike in all processes."""
    return list(map(hash, zip(keys, keys[1:], keys[2:], strict=False)))
