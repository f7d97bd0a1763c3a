"""Results of a search as a page of images."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from multimodal.tasks.report.media import figure, grid, name_line, thumbnails
from multimodal.tasks.report.page import Section, escaped, html_lines, left_out
from multimodal.tokens.video.names import FrameName, is_video
from multimodal.tokens.video.options import VideoOptions
from multimodal.tokens.video.reading import frame_at, frames

MOST = 500  # images of a page, about 10 kB each


def gallery(results: Sequence[dict[str, Any]], index: str) -> Iterator[str]:
    """Lines of an HTML page. `results`: `query`, `kind` (text or image) and `results` with `file` and `score`."""
    room = max(1, MOST // max(1, len(results)))
    queries = [{**one, "results": one["results"][:room], "more": len(one["results"]) - room} for one in results[:MOST]]
    asked = [one["query"] for one in queries if one["kind"] != "text"]
    shown = thumbnails([*asked, *(hit["file"] for one in queries for hit in one["results"])], still)
    sections = [Section(f"{one['kind']}: {one['query']}", html=partial(_hits, one, shown)) for one in queries]
    if more := left_out(len(results), "queries", MOST):
        sections.append(Section("Left out", lines=more))
    return html_lines(f"Search in {index}", sections)


def _hits(one: dict[str, Any], shown: dict[str, str]) -> str:
    query = [f"<div class=pair>{figure(shown.get(one['query']), 'query')}</div>"] if one["kind"] != "text" else []
    cards = [figure(shown.get(hit["file"]), _caption(number, hit)) for number, hit in enumerate(one["results"], 1)]
    return "\n".join([*query, grid(cards), *left_out(one["more"], "images", 0)])


def still(name: str) -> Path | Image.Image:
    """An image file, a frame, or the middle frame of a video."""
    if isinstance(name, FrameName):
        return frame_at(name.path, name.time).image
    return next(frames(name, VideoOptions(max_frames=1))).image if is_video(name) else Path(name)


def _caption(number: int, hit: dict[str, Any]) -> str:
    name = hit["file"]
    moment = f"#t={name.time:g}" if isinstance(name, FrameName) else ""  # a media fragment: players start there
    path = name.path if isinstance(name, FrameName) else name
    link = escaped(Path(path).absolute().as_uri() + moment, 10_000)
    return f"{number}. <b>{hit['score']:.4f}</b><br><a href='{link}'>{name_line(hit['file'])}</a>"
