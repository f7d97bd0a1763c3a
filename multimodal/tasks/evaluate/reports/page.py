"""Reports as Markdown or as one self-contained HTML page. Texts are untrusted: escaped in HTML and in Markdown's
tables, fenced elsewhere."""

import base64
import html
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.system.files import versions
from multimodal.system.outputs import write_output

STYLE = """body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:.5em 0}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left}
img{max-width:100%}.u{margin:1.2em 0}.u>span{display:inline-block;margin-right:.35em;vertical-align:top}
.u i{font-style:normal;display:block;min-height:1.5em}small{color:#555}
.S{background:#fde3b0}.D{background:#f7c6c5}.I{background:#c9dcf7}"""
# would break a line, or steer a terminal
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
ACTIVE = re.compile(r"([\\`*<>\[\]|&~$])")  # in a cell of a Markdown table


@dataclass(frozen=True)
class Section:
    """A title over a table (its first row names the columns), lines, and an image: a PNG that HTML embeds, or a file's
    name that Markdown links. `html`: trusted HTML in place of the lines."""

    title: str
    table: Sequence[Sequence[Any]] = ()
    lines: Sequence[str] = ()
    image: bytes | str = ""
    html: str = ""


def facts_section(facts: Mapping[str, Any]) -> Section:
    """A section of what the results depend on, with the versions."""
    texts = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
             for name, value in {**facts, "versions": versions()}.items()}  # fmt: skip
    return Section("Facts", lines=[f"{name}: {text}" for name, text in texts.items()])


def write_page(path: Path, title: str, sections: Iterable[Section]) -> None:
    """Write a page: HTML for .html, else Markdown. Raises OSError."""
    made = (_html if path.suffix.lower() == ".html" else _markdown)(title, sections)
    write_output(path, ("\n".join(made) + "\n").encode(errors="backslashreplace"))


def _markdown(title: str, sections: Iterable[Section]) -> Iterator[str]:
    yield f"# {title}"
    for part in sections:
        yield from ("", f"## {clean(part.title)}", "")
        for number, row in enumerate(part.table):
            cells = [ACTIVE.sub(r"\\\1", clean(cell_text(value))) for value in row]
            yield f"| {' | '.join(cells)} |"
            if not number:
                yield "|" + "---|" * len(cells)
        if isinstance(part.image, str) and part.image:
            yield f"![{part.title}]({part.image})"
        elif part.lines or not part.table:
            yield from fenced(part.lines or ["none"])


def _html(title: str, sections: Iterable[Section]) -> Iterator[str]:
    yield f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    yield f"<h1>{title}</h1>"
    for part in sections:
        yield f"<h2>{escaped(part.title)}</h2>"
        if part.table:
            yield "<table>"
            for number, row in enumerate(part.table):
                tag = "td" if number else "th"
                yield f"<tr>{''.join(f'<{tag}>{escaped(cell_text(value))}' for value in row)}"
            yield "</table>"
        yield part.html or (bullets(part.lines or ["none"]) if part.lines or not part.table else "")
        if isinstance(part.image, bytes):
            data = base64.b64encode(part.image).decode()
            yield f"<img alt='{escaped(part.title)}' src='data:image/png;base64,{data}'>"


def aligned(table: Sequence[Sequence[Any]]) -> list[str]:
    """Align rows as lines for a terminal; numbers to the right."""
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
    """Fence lines as code; no text within can close the fence."""
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
    """Width of a text in a terminal: 0 for marks over another letter, 2 for wide East Asian letters."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(c) in "FW")
        for c in text
    )
