"""Results of a search as a page of images."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from multimodal.tasks.report.media import figure, grid, name_line, thumbnails
from multimodal.tasks.report.page import Section, escaped, html_lines, left_out

MOST = 500  # images of a page, about 10 kB each


def gallery(results: Sequence[dict[str, Any]], index: str) -> Iterator[str]:
    """Lines of an HTML page. `results`: `query`, `kind` (text or image) and `results` with `file` and `score`."""
    room = max(1, MOST // max(1, len(results)))
    queries = [{**one, "results": one["results"][:room], "more": len(one["results"]) - room} for one in results[:MOST]]
    asked = [one["query"] for one in queries if one["kind"] == "image"]
    shown = thumbnails([*asked, *(hit["file"] for one in queries for hit in one["results"])], Path)
    sections = [Section(f"{one['kind']}: {one['query']}", html=partial(_hits, one, shown)) for one in queries]
    if more := left_out(len(results), "queries", MOST):
        sections.append(Section("Left out", lines=more))
    return html_lines(f"Search in {index}", sections)


def _hits(one: dict[str, Any], shown: dict[str, str]) -> str:
    query = [f"<div class=pair>{figure(shown.get(one['query']), 'query')}</div>"] if one["kind"] == "image" else []
    cards = [figure(shown.get(hit["file"]), _caption(number, hit)) for number, hit in enumerate(one["results"], 1)]
    return "\n".join([*query, grid(cards), *left_out(one["more"], "images", 0)])


def _caption(number: int, hit: dict[str, Any]) -> str:
    link = escaped(Path(hit["file"]).absolute().as_uri(), 10_000)
    return f"{number}. <b>{hit['score']:.4f}</b><br><a href='{link}'>{name_line(hit['file'])}</a>"
