"""Lines on stderr, safe for a terminal."""

import sys


def fail(error: object) -> int:
    """One line on stderr."""
    print(f"multimodal: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return 1


def printable(text: str) -> str:
    """The text with what would break a line or steer a terminal as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
