"""Report on captions: scores, and the worst and the best captions beside their images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.data.sources import Source
from multimodal.tasks.evaluate.captions import CaptionEvaluation
from multimodal.tasks.report.media import figure, name_line, thumbnails
from multimodal.tasks.report.page import Section, escaped, facts_section, write_page

SHOWN = 20  # captions, the worst and the best
REFERENCES = 8


def write_report(found: CaptionEvaluation, source: Source, path: Path, facts: Mapping[str, Any]) -> None:
    """`source`: of the images. Raises OSError."""
    write_page(path, "Evaluation of captions", _sections(found, source, facts))


def score_table(found: CaptionEvaluation) -> list[tuple]:
    """Scores, beside those of people where they are known."""
    rows = [(name, round(value, 2)) for name, value in found.scores.items()]
    if found.people is None:
        return [("score", "captions"), *rows]
    people = {name: round(value, 2) for name, value in found.people.items()}
    return [("score", "captions", "people"), *((name, value, people.get(name)) for name, value in rows)]


def _sections(found: CaptionEvaluation, source: Source, facts: Mapping[str, Any]) -> Iterator[Section]:
    yield Section("Scores, in %", score_table(found))
    counts = {name: value for name, value in found.figures().items() if name not in {*found.scores, "people"}}
    yield Section("Captions", [("figure", "value"), *((name, str(value)) for name, value in counts.items())])
    ranked = sorted(range(len(found.rows)), key=lambda place: found.rows[place]["cider"])
    yield _examples("Lowest CIDEr-D", found, source, ranked[:SHOWN])
    yield _examples("Highest CIDEr-D", found, source, ranked[: -SHOWN - 1 : -1])
    if found.broken:
        yield Section("Left out", lines=found.broken)
    yield facts_section(facts)


def _examples(title: str, found: CaptionEvaluation, source: Source, places: Sequence[int]) -> Section:
    rows = {place: found.rows[place] for place in places}

    def html() -> str:
        shown = thumbnails(places, lambda place: source.read(found.keys[place]).media)
        return "\n".join(_row(row, shown.get(place)) for place, row in rows.items())

    lines = [f"{row['file']} ({_fit(row)}): {row['caption']}  —  people: {' | '.join(row['references'])}"
             for row in rows.values()]  # fmt: skip
    return Section(title, lines=lines, html=html)


def _row(row: dict[str, Any], uri: str | None) -> str:
    people = "".join(f"<li>{escaped(text, 400)}" for text in row["references"][:REFERENCES])
    said = f"<p><b>{escaped(row['caption'], 400)}</b><br><small>{_fit(row)}</small></p>references<ul>{people}</ul>"
    return f"<div class='row pair'>{figure(uri, name_line(row['file']))}<div>{said}</div></div>"


def _fit(row: dict[str, Any]) -> str:
    fits = f", CLIPScore {row['clip_score']:.1f}" if "clip_score" in row else ""
    return f"CIDEr-D {row['cider']:.1f}{fits}"
