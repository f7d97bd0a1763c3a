"""An evaluation of transcripts for people: a summary, and a report as Markdown or as one HTML page with nothing to
load. Texts come from anywhere: they are escaped in HTML, and stand in code fences in Markdown."""

import html
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from multimodal.tasks.evaluate_asr import Edit, Evaluation, Utterance
from multimodal.tasks.subtitles import write_whole
from multimodal.train.report import versions

TITLE = "Transcripts against their references"
LETTERS = {"substitution": "S", "deletion": "D", "insertion": "I", "same": ""}
WIDTH = 100  # columns of an aligned line
SHARES = ("wer", "cer", "sentence_error_rate")
STYLE = """body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:.5em 0}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left}
.u{margin:1.2em 0}.u>span{display:inline-block;margin-right:.35em;vertical-align:top}.u i{font-style:normal;
display:block;min-height:1.5em}.S{background:#fde3b0}.D{background:#f7c6c5}.I{background:#c9dcf7}small{color:#555}"""
# would break a line, or steer a terminal
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def summary(result: Evaluation) -> list[str]:
    """Lines for a terminal."""
    f = result.figures()
    lines = [
        f"WER {_percent(f['wer'])}   CER {_percent(f['cer'])}   ({f['utterances']} utterances, {f['words']} words; "
        f"normalizer: {f['normalizer']})",
        f"substitutions {f['substitutions']}   deletions {f['deletions']}   insertions {f['insertions']}   "
        f"utterances with errors {_percent(f['sentence_error_rate'])}",
        f"RTFx {f['rtfx']}   ({f['audio_seconds']} s of sound in {f['compute_seconds']} s)",
        *(f"{name}: {', '.join(found)}" for name, found in _frequent(result) if found),
    ]
    lines += [f"damaged, heard as far as they go: {f['damaged']}"] if f["damaged"] else []
    return lines + ([f"left out as broken: {f['broken']}"] if f["broken"] else [])


def record(result: Evaluation) -> dict[str, Any]:
    """For JSON: the figures, the most frequent errors with their counts, and what was left out."""
    kinds = [kind for kind in LETTERS if kind != "same"]
    return {
        **result.figures(),
        **{f"frequent_{kind}s": [list(pair) for pair in result.common(kind)] for kind in kinds},
        "left_out": result.broken,
    }


def write_report(result: Evaluation, path: Path, facts: dict[str, Any]) -> None:
    """Figures, the most frequent errors of each kind, the worst utterances aligned, what was left out, and `facts`
    (model, options, …) with the versions. Raises OSError."""
    shown = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
             for name, value in (facts | {"versions": versions()}).items()}  # fmt: skip
    lines = (_html if path.suffix.lower() == ".html" else _markdown)(result, shown)
    write_whole(path, ("\n".join(lines) + "\n").encode())


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _figures(result: Evaluation) -> dict[str, str]:
    return {name: _percent(v) if name in SHARES else str(v) for name, v in result.figures().items()}


def _frequent(result: Evaluation) -> Iterator[tuple[str, list[str]]]:
    for kind in LETTERS:
        if kind != "same":
            yield f"most frequent {kind}s", [f"{what} ({count})" for what, count in result.common(kind)]


def _heading(one: Utterance) -> str:
    return f"{one.name}: {100 * one.rate:.0f} % ({one.errors} of {one.words} words)"


def _markdown(result: Evaluation, facts: dict[str, str]) -> Iterator[str]:
    yield from (f"# {TITLE}", "", "| figure | value |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in _figures(result).items())
    for name, found in _frequent(result):
        yield from ("", f"## {name.capitalize()}", "", *_fenced(found or ["none"]))
    if worst := result.worst():
        yield from ("", "## Worst utterances", "")
    for one in worst:
        yield from (*_fenced([_heading(one), *text_rows(one.edits)]), "")
    if result.broken:
        yield from ("", "## Left out as broken", "", *_fenced(result.broken))
    yield from ("", "## Facts", "", *_fenced(f"{name}: {value}" for name, value in facts.items()))


def _fenced(lines: Iterable[str]) -> list[str]:
    """As code, in a fence that no text within can close."""
    inner = [_clean(line) for line in lines]
    longest = max((len(run) for line in inner for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *inner, fence]


def _clean(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


def text_rows(edits: list[Edit]) -> Iterator[str]:
    """Words wanted over words found over S, D or I, in columns, wrapped; asterisks for a word that is not there."""
    rows: list[list[str]] = [[], [], []]
    used = 0
    for edit in edits:
        width = max(columns(edit.wanted), columns(edit.found))
        if used and used + width > WIDTH:
            yield from _titled(rows)
            rows, used = [[], [], []], 0
        used += width + 1
        texts = edit.wanted or "*" * width, edit.found or "*" * width, LETTERS[edit.kind]
        for row, text in zip(rows, texts, strict=True):
            row.append(text + " " * (width - columns(text)))
    yield from _titled(rows)


def _titled(rows: list[list[str]]) -> Iterator[str]:
    for title, row in zip(("wanted", "found", "error"), rows, strict=True):
        if "".join(row).strip():
            yield f"{title:<7} {' '.join(row)}".rstrip()


def columns(text: str) -> int:
    """Columns of a text in fixed pitch: none for marks over another letter, two for wide East Asian ones."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(c) in "FW")
        for c in text
    )


def _html(result: Evaluation, facts: dict[str, str]) -> Iterator[str]:
    yield f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{TITLE}</title><style>{STYLE}</style>"
    yield f"<h1>{TITLE}</h1>\n<table>"
    yield from (f"<tr><th>{name}<td>{_escaped(value)}" for name, value in _figures(result).items())
    yield "</table>"
    for name, found in _frequent(result):
        yield f"<p><b>{name.capitalize()}</b>: {_escaped(', '.join(found) or 'none')}"
    if worst := result.worst():
        yield "<h2>Worst utterances</h2>\n<p>Wanted above, found below: <span class=S>substituted</span> "
        yield "<span class=D>deleted</span> <span class=I>inserted</span>"
    for one in worst:
        yield f"<div class=u><small>{_escaped(_heading(one))}</small><br>"
        yield "\n".join(
            f"<span class='{LETTERS[kind]}'><i>{_escaped(wanted)}</i><i>{_escaped(found)}</i></span>"
            for kind, wanted, found in one.edits
        )
        yield "</div>"
    if result.broken:
        yield "<h2>Left out as broken</h2>"
        yield _list(result.broken)
    yield "<h2>Facts</h2>"
    yield _list(f"{name}: {value}" for name, value in facts.items())


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_escaped(line)}' for line in lines)}</ul>"


def _escaped(text: str) -> str:
    return html.escape(_clean(text))
