"""`multimodal search`: search an image index by text, by image or by video."""

import os
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multimodal.cli import flags
from multimodal.cli.loading import choose_device
from multimodal.cli.output import fail, printable, six_digits
from multimodal.cli.parser import Parser
from multimodal.cli.vision.images import ImageOutput
from multimodal.errors import ImageError, TextError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.retrieve.options import SearchOptions
from multimodal.tokens.video.names import SUFFIXES as VIDEOS
from multimodal.tokens.video.names import is_video

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from multimodal.tasks.retrieve.index import Index
    from multimodal.weights.folder import Checkpoint

EXAMPLES = """examples:
  multimodal search "two dogs on a beach" --index photos.index
  multimodal search holiday.jpg --index photos.index --top 5 --format csv
  multimodal search "two dogs" --index photos.index -o gallery.html
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s QUERY [QUERY ...] --index FOLDER [flags]", EXAMPLES
    p.add_argument("queries", nargs="*", metavar="QUERY", help="path of an existing image or video file, else a text")
    p.add_argument("--image", nargs="+", action="extend", default=[], metavar="IMAGE", help="image queries; a video "
                   "asks with the mean of its frames")  # fmt: skip
    p.add_argument("--text", nargs="+", action="extend", default=[], metavar="TEXT", help="text queries")
    p.add_argument("--index", required=True, metavar="INDEX", help="index built by multimodal index")
    add_option_flags(p, SearchOptions, ("top", "exact"), defaults=True)
    flags.videos(p, whole=False)
    flags.results(p, "table", "csv", "json", "jsonl", "html")
    g = p.add_argument_group("model and machine")
    g.add_argument("--model", "-m", metavar="MODEL", help="present path of the index's model (default: as recorded)")
    flags.architecture(g)
    flags.machine(g)


def check(p: Parser, options: Namespace) -> None:
    if not (options.queries or options.image or options.text):
        p.error("QUERY: give a text or an image")


class _Query(NamedTuple):
    kind: str  # text, image or video
    text: str
    vector: 'Float[Tensor, "D"]'


def run(options: Namespace) -> int:
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.retrieve.index import model_for, open_index
    from multimodal.weights.load import load

    choose_device(options)
    found = open_index(options.index)
    record = found.record
    checkpoint = model_for(found, load(options.model or record.model, options.architecture or record.architecture))
    prepared = prepare_for_inference(checkpoint, options.compute_type, options.device)
    queries, code = _queries(options, prepared, record.native)
    if options.top > len(found):
        images = "1 image" if len(found) == 1 else f"{len(found)} images"
        warnings.warn(f"--top {options.top}: the index holds {images}", stacklevel=1)
    if not queries:
        return code
    results = list(_results(found, queries, options.top, options.exact))
    if options.format == "html":
        from multimodal.tasks.retrieve.gallery import gallery

        for line in gallery(results, options.index):
            print(line)
        return code
    _tell_of_missing(results, options.index)
    rows = lambda one: ([one["query"], one["kind"], hit["file"], hit["score"]] for hit in one["results"])
    table = lambda one: (f"{hit['score']:8.4f}  {printable(str(hit['file']))}" for hit in one["results"])
    title = lambda one: f"{one['kind']}: {one['query']}"
    printed = ImageOutput(options.format, ["query", "kind", "file", "score"], rows, table, title)
    for result in results:
        printed.add(result)
    printed.end()
    return code


def _tell_of_missing(results: list[dict[str, Any]], index: str) -> None:
    """Warn of results whose files were moved or deleted."""
    files = {hit["file"] for result in results for hit in result["results"]}
    gone = sorted(file for file in files if not os.path.exists(getattr(file, "path", file)))
    if gone:
        cure = "multimodal index of their folder drops them, with --overwrite if it moved"
        found = f"{len(gone)} of {len(files)} files found are not there, such as {gone[0]}"
        warnings.warn(f"{index}: {found}; {cure}", stacklevel=1)


def _results(index: "Index", queries: list[_Query], top: int, exact: bool) -> Iterator[dict[str, Any]]:
    import torch

    from multimodal.tasks.encode.videos import time_of

    scores, rows = index.search(torch.stack([query.vector for query in queries]), top, exact)
    for query, own, found in zip(queries, scores.tolist(), rows, strict=True):
        scores = [six_digits(min(score, 1.0)) for score in own]  # a stored unit vector may be a little longer than 1
        files = index.files(found)
        best = sorted(zip(files, scores, strict=True), key=lambda hit: (-hit[1], hit[0]))  # equal scores by name
        hits = [{"file": file, **time_of(file), "score": score} for file, score in best]
        yield {"query": query.text, "kind": query.kind, "results": hits}


def _queries(options: Namespace, checkpoint: "Checkpoint", native: int | None) -> tuple[list[_Query], int]:
    """Usable queries in order and the exit code; unusable ones are reported."""
    from multimodal.tasks.retrieve.index import clip_vector, query_vectors

    video = SearchOptions(**SearchOptions.among(vars(options)))
    asked = [(kind_of(text), text) for text in options.queries]
    asked += [("image", path) for path in options.image] + [("text", text) for text in options.text]
    found, code = [], 0
    for kind, text in asked:
        try:
            if kind == "missing":
                raise ImageError(f"{text}: no such image (as a text: --text)")
            if kind == "image" and is_video(text):
                found.append(_Query("video", text, clip_vector(checkpoint, text, video, native)[0]))
                continue
            texts, images = ([text], []) if kind == "text" else ([], [text])
            found.append(_Query(kind, text, query_vectors(checkpoint, texts, images, native)[0]))
        except (ImageError, TextError) as error:
            code = fail(error)
    return found, code


def kind_of(query: str) -> str:
    """Kind of a query: image (an existing file), missing (no file, but an image's suffix) or text."""
    from multimodal.tokens.image.reading import SUFFIXES

    suffixes = SUFFIXES | VIDEOS
    try:
        if Path(query).is_file():
            return "image"
    except (OSError, ValueError):  # too long for a name, or with a NUL
        return "text"
    return "missing" if Path(query).suffix.lower() in suffixes else "text"
