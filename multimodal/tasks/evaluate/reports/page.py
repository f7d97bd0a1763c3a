"""Reports as Markdown or as one self-contained HTML page. Texts are untrusted: escaped in HTML, fenced in Markdown."""

import base64
import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.system.outputs import write_output

STYLE = """body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:.5em 0}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left}
img{max-width:100%}"""
# would break a line, or steer a terminal
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Section:
    """A title over a table (its first row names the columns), or over lines."""

    title: str
    table: Sequence[Sequence[Any]] = ()
    lines: Sequence[str] = ()


def write_page(path: Path, title: str, sections: Iterable[Section], image: bytes | None = None) -> None:
    """`image`: a PNG, which HTML shows after the first section. Raises OSError."""
    made = _html(title, sections, image) if path.suffix.lower() == ".html" else _markdown(title, sections)
    write_output(path, ("\n".join(made) + "\n").encode())


def _markdown(title: str, sections: Iterable[Section]) -> Iterator[str]:
    yield f"# {title}"
    for part in sections:
        yield from ("", f"## {part.title}", "", *fenced([*aligned(part.table), *part.lines] or ["none"]))


def _html(title: str, sections: Iterable[Section], image: bytes | None) -> Iterator[str]:
    yield f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    yield f"<h1>{title}</h1>"
    for part in sections:
        yield f"<h2>{part.title}</h2>"
        if part.table:
            yield "<table>"
            for number, row in enumerate(part.table):
                tag = "td" if number else "th"
                yield f"<tr>{''.join(f'<{tag}>{escaped(cell_text(value))}' for value in row)}"
            yield "</table>"
        yield bullets(part.lines) if part.lines or not part.table else ""
        if image is not None:
            yield f"<img alt='confusion matrix' src='data:image/png;base64,{base64.b64encode(image).decode()}'>"
            image = None


def aligned(table: Sequence[Sequence[Any]]) -> list[str]:
    """Rows as lines of a fixed-pitch font; numbers to the right."""
    texts = [[clean(cell_text(value)) for value in row] for row in table]
    widths = [max(map(columns, column)) for column in zip(*texts, strict=True)]
    right = [all(isinstance(row[i], int | float | None) for row in table[1:]) for i in range(len(widths))]
    lines = []
    for row in texts:
        spaces = [" " * (width - columns(text)) for text, width in zip(row, widths, strict=True)]
        cells = [s + text if numeric else text + s for text, s, numeric in zip(row, spaces, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def cell_text(value: Any) -> str:
    """Format a table's value; None is a dash."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"


def fenced(lines: Iterable[str]) -> list[str]:
    """As code, in a fence that no text within can close."""
    inner = [clean(line) for line in lines]
    longest = max((len(run) for line in inner for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *inner, fence]


def clean(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


def escaped(text: str) -> str:
    return html.escape(clean(text))


def bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(line)}' for line in lines)}</ul>"


def columns(text: str) -> int:
    """Columns of a text in fixed pitch: none for marks over another letter, two for wide East Asian ones."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(c) in "FW")
        for c in text
    )
