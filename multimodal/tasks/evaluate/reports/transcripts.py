"""An evaluation of transcripts for people: a summary, and a report as Markdown or as one HTML page with nothing to
load. Texts come from anywhere: they are escaped in HTML, and stand in code fences in Markdown."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimodal.system.files import versions
from multimodal.system.outputs import write_output
from multimodal.tasks.evaluate.reports.page import STYLE, bullets, columns, escaped, fenced, percent
from multimodal.tasks.evaluate.transcripts import TranscriptEvaluation, Utterance, WordEdit

TITLE = "Transcripts against their references"
LETTERS = {"substitution": "S", "deletion": "D", "insertion": "I", "same": ""}
WIDTH = 100  # columns of an aligned line
SHARES = ("wer", "cer", "sentence_error_rate")
WORDS = """.u{margin:1.2em 0}.u>span{display:inline-block;margin-right:.35em;vertical-align:top}.u i{font-style:normal;
display:block;min-height:1.5em}.S{background:#fde3b0}.D{background:#f7c6c5}.I{background:#c9dcf7}small{color:#555}"""


def summary(result: TranscriptEvaluation) -> list[str]:
    """Lines for a terminal."""
    f = result.figures()
    lines = [
        f"WER {percent(f['wer'])}   CER {percent(f['cer'])}   ({f['utterances']} utterances, {f['words']} words; "
        f"normalizer: {f['normalizer']})",
        f"substitutions {f['substitutions']}   deletions {f['deletions']}   insertions {f['insertions']}   "
        f"utterances with errors {percent(f['sentence_error_rate'])}",
        f"RTFx {f['rtfx']}   ({f['audio_seconds']} s of sound in {f['compute_seconds']} s)",
        *(f"{name}: {', '.join(found)}" for name, found in _frequent(result) if found),
    ]
    lines += [f"damaged, heard as far as they go: {f['damaged']}"] if f["damaged"] else []
    return lines + ([f"left out as broken: {f['broken']}"] if f["broken"] else [])


def record(result: TranscriptEvaluation) -> dict[str, Any]:
    """For JSON: the figures, the most frequent errors with their counts, and what was left out."""
    kinds = [kind for kind in LETTERS if kind != "same"]
    return {
        **result.figures(),
        **{f"frequent_{kind}s": [list(pair) for pair in result.common(kind)] for kind in kinds},
        "left_out": result.broken,
    }


def write_report(result: TranscriptEvaluation, path: Path, facts: dict[str, Any]) -> None:
    """Figures, the most frequent errors of each kind, the worst utterances aligned, what was left out, and `facts`
    (model, options, …) with the versions. Raises OSError."""
    shown = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
             for name, value in (facts | {"versions": versions()}).items()}  # fmt: skip
    lines = (_html if path.suffix.lower() == ".html" else _markdown)(result, shown)
    write_output(path, ("\n".join(lines) + "\n").encode())


def _figures(result: TranscriptEvaluation) -> dict[str, str]:
    return {name: percent(v) if name in SHARES else str(v) for name, v in result.figures().items()}


def _frequent(result: TranscriptEvaluation) -> Iterator[tuple[str, list[str]]]:
    for kind in LETTERS:
        if kind != "same":
            yield f"most frequent {kind}s", [f"{what} ({count})" for what, count in result.common(kind)]


def _heading(one: Utterance) -> str:
    return f"{one.name}: {100 * one.rate:.0f} % ({one.errors} of {one.words} words)"


def _markdown(result: TranscriptEvaluation, facts: dict[str, str]) -> Iterator[str]:
    yield from (f"# {TITLE}", "", "| figure | value |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in _figures(result).items())
    for name, found in _frequent(result):
        yield from ("", f"## {name.capitalize()}", "", *fenced(found or ["none"]))
    if worst := result.worst():
        yield from ("", "## Worst utterances", "")
    for one in worst:
        yield from (*fenced([_heading(one), *text_rows(one.edits)]), "")
    if result.broken:
        yield from ("", "## Left out as broken", "", *fenced(result.broken))
    yield from ("", "## Facts", "", *fenced(f"{name}: {value}" for name, value in facts.items()))


def text_rows(edits: list[WordEdit]) -> Iterator[str]:
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


def _html(result: TranscriptEvaluation, facts: dict[str, str]) -> Iterator[str]:
    yield f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{TITLE}</title><style>{STYLE}{WORDS}</style>"
    yield f"<h1>{TITLE}</h1>\n<table>"
    yield from (f"<tr><th>{name}<td>{escaped(value)}" for name, value in _figures(result).items())
    yield "</table>"
    for name, found in _frequent(result):
        yield f"<p><b>{name.capitalize()}</b>: {escaped(', '.join(found) or 'none')}"
    if worst := result.worst():
        yield "<h2>Worst utterances</h2>\n<p>Wanted above, found below: <span class=S>substituted</span> "
        yield "<span class=D>deleted</span> <span class=I>inserted</span>"
    for one in worst:
        yield f"<div class=u><small>{escaped(_heading(one))}</small><br>"
        yield "\n".join(
            f"<span class='{LETTERS[kind]}'><i>{escaped(wanted)}</i><i>{escaped(found)}</i></span>"
            for kind, wanted, found in one.edits
        )
        yield "</div>"
    if result.broken:
        yield "<h2>Left out as broken</h2>"
        yield bullets(result.broken)
    yield "<h2>Facts</h2>"
    yield bullets(f"{name}: {value}" for name, value in facts.items())
