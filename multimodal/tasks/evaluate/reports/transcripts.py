"""Evaluation of transcripts: a summary for a terminal, and a report with the errors aligned."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.tasks.evaluate.reports.recordings import Recording
from multimodal.tasks.evaluate.transcripts import TranscriptEvaluation, Utterance, WordEdit
from multimodal.tasks.report.page import Section, columns, escaped, facts_section, left_out, percent, write_page
from multimodal.tasks.report.style import SEEK

Play = Callable[[Sequence[Utterance]], Mapping[int, Recording]]
TITLE = "Transcripts against their references"
LETTERS = {"substitution": "S", "deletion": "D", "insertion": "I", "same": ""}
WIDTH = 100  # columns of an aligned line
MOST_WORDS = 600  # of an utterance in HTML
LEGEND = """<p>Wanted above, found below: <span class=S>substituted</span> <span class=D>deleted</span>
<span class=I>inserted</span>"""
HINT = ". A click on an underlined word plays from there."
SHARES = ("wer", "cer", "sentence_error_rate")


def summary(result: TranscriptEvaluation) -> list[str]:
    """Lines for a terminal."""
    f = result.figures()
    lines = [
        f"WER {percent(f['wer'])}   CER {percent(f['cer'])}   ({f['utterances']} utterances, {f['words']} words; "
        f"normalizer: {f['normalizer']})",
        f"substitutions {f['substitutions']}   deletions {f['deletions']}   insertions {f['insertions']}   "
        f"utterances with errors {percent(f['sentence_error_rate'])}",
        f"RTFx {f['rtfx']}   ({f['audio_seconds']} s of audio in {f['compute_seconds']} s)",
        *(f"{name}: {', '.join(found)}" for name, found in _frequent(result) if found),
    ]
    lines += [f"damaged, heard as far as they go: {f['damaged']}"] if f["damaged"] else []
    return lines + ([f"left out as broken: {f['broken']}"] if f["broken"] else [])


def record(result: TranscriptEvaluation) -> dict[str, Any]:
    """Record for JSON: figures, the most frequent errors with their counts, and the utterances skipped."""
    kinds = [kind for kind in LETTERS if kind != "same"]
    return {
        **result.figures(),
        **{f"frequent_{kind}s": [list(pair) for pair in result.common(kind)] for kind in kinds},
        "left_out": result.broken,
    }


def write_report(
    result: TranscriptEvaluation, path: Path, facts: dict[str, Any], play: Play = lambda worst: {}
) -> None:
    """Write figures, the most frequent errors of each kind, the worst utterances aligned, the utterances skipped, and
    `facts` such as model and options. `play`: makes the recordings of an HTML page. Raises OSError."""
    write_page(path, TITLE, _sections(result, facts, play))


def _sections(result: TranscriptEvaluation, facts: dict[str, Any], play: Play) -> Iterator[Section]:
    figures = {name: percent(v) if name in SHARES else str(v) for name, v in result.figures().items()}
    yield Section("Figures", [("figure", "value"), *figures.items()])
    for name, found in _frequent(result):
        yield Section(name.capitalize(), lines=found)
    if worst := result.worst():
        lines = [line for one in worst for line in (_heading(one), *text_rows(one.edits), "")]
        yield Section("Worst utterances", lines=lines[:-1], html=lambda: _utterances(worst, play(worst)))
    if result.broken:
        yield Section("Left out as broken", lines=result.broken)
    yield facts_section(facts)


def _frequent(result: TranscriptEvaluation) -> Iterator[tuple[str, list[str]]]:
    for kind in LETTERS:
        if kind != "same":
            yield f"most frequent {kind}s", [f"{what} ({count})" for what, count in result.common(kind)]


def _heading(one: Utterance) -> str:
    return f"{one.name}: {100 * one.rate:.0f} % ({one.errors} of {one.words} words)"


def _utterances(worst: Sequence[Utterance], players: Mapping[int, Recording]) -> str:
    timed = any(time is not None for player in players.values() for time in player.times)
    blocks = [_marked(one, players.get(one.key)) for one in worst]
    script = f"<script>{SEEK}</script>" if timed else ""
    return "\n".join([f"{LEGEND}{HINT if timed else ''}</p>", *blocks, script])


def _marked(one: Utterance, player: Recording | None) -> str:
    """Words wanted over words found, coloured by error, under their recording."""
    times = iter(player.times if player else ())
    words = []
    for kind, wanted, found in one.edits[:MOST_WORDS]:
        time, text = next(times, None) if found else None, escaped(found)
        below = text if time is None else f"<button data-t={time:.2f}>{text}</button>"
        words.append(f"<span class='{LETTERS[kind]}'><i>{escaped(wanted)}</i><i>{below}</i></span>")
    more = left_out(len(one.edits), "words", MOST_WORDS)
    sound = player.html() if player else "<br>"
    return "\n".join([f"<div class='u row'><small>{escaped(_heading(one))}</small>", sound, *words, *more, "</div>"])


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
