"""Reports as Markdown or as one self-contained HTML page. Texts are untrusted: escaped in HTML and in Markdown's
tables, fenced elsewhere."""

import base64
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.system.files import versions
from multimodal.system.outputs import write_output
from multimodal.tasks.report.style import HEAD, STYLE

MOST_ROWS = 1000  # of a table or a list
MOST_LETTERS = 2000  # of a cell or a line
# would break a line, or steer a terminal
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
ACTIVE = re.compile(r"([\\`*<>\[\]|&~$])")  # in a cell of a Markdown table


@dataclass(frozen=True)
class Section:
    """A title over a table (its first row names the columns), lines, and an image: a PNG that HTML embeds, or the name
    of a file beside the page, which Markdown links. `html`: makes trusted HTML in place of lines and image."""

    title: str
    table: Sequence[Sequence[Any]] = ()
    lines: Sequence[str] = ()
    image: bytes | str = ""
    html: Callable[[], str] | None = None


def facts_section(facts: Mapping[str, Any]) -> Section:
    """A section of what the results depend on, with the versions."""
    texts = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
             for name, value in {**facts, "versions": versions()}.items()}  # fmt: skip
    return Section("Facts", lines=[f"{name}: {text}" for name, text in texts.items()])


def write_page(path: Path, title: str, sections: Iterable[Section]) -> None:
    """Write a page: HTML for .html, else Markdown. Raises OSError."""
    made = (html_lines if path.suffix.lower() == ".html" else _markdown)(title, sections)
    write_output(path, ("\n".join(made) + "\n").encode(errors="backslashreplace"))


def _markdown(title: str, sections: Iterable[Section]) -> Iterator[str]:
    yield f"# {title}"
    for part in sections:
        yield from ("", f"## {clean(part.title)}", "")
        for number, row in enumerate(part.table[: MOST_ROWS + 1]):
            cells = [ACTIVE.sub(r"\\\1", short(clean(cell_text(value)))) for value in row]
            yield f"| {' | '.join(cells)} |"
            if not number:
                yield "|" + "---|" * len(cells)
        yield from (f"\n{line}" for line in left_out(len(part.table) - 1, "rows"))
        if isinstance(part.image, str) and part.image:
            yield f"![{part.title}]({part.image})"
        elif part.lines or not part.table:
            yield from fenced(part.lines or ["none"])


def html_lines(title: str, sections: Iterable[Section]) -> Iterator[str]:
    yield f"{HEAD}<title>{escaped(title)}</title><style>{STYLE}</style>"
    yield f"<h1>{escaped(title)}</h1>"
    for part in sections:
        yield f"<h2>{escaped(part.title)}</h2>"
        if part.table:
            yield "<div class=wide><table>"
            for number, row in enumerate(part.table[: MOST_ROWS + 1]):
                tag = "td" if number else "th"
                yield f"<tr>{''.join(f'<{tag}>{escaped(cell_text(value))}' for value in row)}"
            yield f"</table></div>{''.join(left_out(len(part.table) - 1, 'rows'))}"
        if part.html is not None:
            yield part.html()
        elif part.lines or not part.table:
            yield bullets(part.lines or ["none"])
        if part.html is None and part.image and isinstance(part.image, bytes):
            yield f"<img class=plot alt='{escaped(part.title)}' src='{data_uri(part.image, 'image/png')}'>"


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def left_out(count: int, what: str, most: int = MOST_ROWS) -> list[str]:
    """A line on what is not shown, if anything."""
    return [f"{count - most:,} more {what} are left out."] if count > most else []


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


def fenced(lines: Sequence[str]) -> list[str]:
    """Fence lines as code; no text within can close the fence."""
    inner = [*(short(clean(line)) for line in lines[:MOST_ROWS]), *left_out(len(lines), "lines")]
    longest = max((len(run) for line in inner for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *inner, fence]


def clean(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


def short(text: str, most: int = MOST_LETTERS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def escaped(text: str, most: int = MOST_LETTERS) -> str:
    return html.escape(short(clean(text), most))


def pre(text: str) -> str:
    """Lines as they are indented."""
    lines = text.splitlines()
    return "\n".join(["<pre>", *map(escaped, lines[:MOST_ROWS]), *left_out(len(lines), "lines"), "</pre>"])


def bullets(lines: Sequence[str]) -> str:
    items = [*map(escaped, lines[:MOST_ROWS]), *left_out(len(lines), "lines")]
    return f"<ul>{''.join(f'<li>{item}' for item in items)}</ul>"


def columns(text: str) -> int:
    """Width of a text in a terminal: 0 for marks over another letter, 2 for wide East Asian letters."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(c) in "FW")
        for c in text
    )
