"""What `multimodal index` and `multimodal search` do with their flags."""

import glob
import os
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.cli.images import found
from multimodal.cli.output import fail, printable
from multimodal.cli.shared import Progress, print_results
from multimodal.errors import ImageError, TextError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.signals import at_stop
from multimodal.tasks.retrieve.index import Index, model_for, open_index, query_vectors
from multimodal.tokens.image.reading import SUFFIXES
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

if TYPE_CHECKING:
    from multimodal.tasks.retrieve.build import Built


def index(options: Namespace) -> int:
    files, code = found(options.images)
    if not files:
        return code
    if options.threads:
        torch.set_num_threads(options.threads)
    name = os.path.abspath(options.model) if os.path.exists(options.model) else options.model
    checkpoint = load(options.model, options.architecture, options.preprocessing)
    with _telling(options.output):
        built = _built(options, files, checkpoint, name)
    for error in built.refused:
        code = fail(error)
    for note in built.notes:
        warnings.warn(note, stacklevel=1)
    if built.record is None:
        return fail(f"--output {options.output}: no picture can be read; an index that was there is as it was")
    print(_told(options.output, built))
    return code


@contextmanager
def _telling(folder: str) -> Iterator[None]:
    """What a stop and a full disk mean for the index."""
    try:
        with at_stop(lambda: printable(f"multimodal: {folder}: stopped; the same command resumes")):
            yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise UsageError(f"--output {folder}: cannot be written ({error.strerror})") from None


def _built(options: Namespace, files: list[str], checkpoint: Checkpoint, name: str) -> "Built":
    from multimodal.tasks.retrieve.build import build

    shown = Progress(options.output)
    built = build(
        files, checkpoint, options.output, name=name, architecture=options.architecture, kind=options.kind,
        within=_searched(options.images, files), dtype=options.dtype, recall=options.recall, watch=shown,
        overwrite=options.overwrite, batch_size=options.batch_size, workers=options.workers,
        compute_type=options.compute_type, device=options.device,
    )  # fmt: skip
    shown.clear()
    return built


def _searched(arguments: list[str], files: list[str]) -> list[str]:
    """The folders that were looked through and had pictures: a disk that is not mounted looks empty."""
    from multimodal.tasks.retrieve.build import inside

    paths = [os.path.abspath(file) for file in files]
    roots = []
    for argument in arguments:
        parts = Path(argument).parts if glob.has_magic(argument) and not os.path.exists(argument) else ()
        fixed = [part for i, part in enumerate(parts) if not any(map(glob.has_magic, parts[: i + 1]))]
        root = os.path.abspath(os.path.join(*fixed) if fixed else "." if parts else argument)
        if any(inside(path, root) for path in paths):
            roots.append(root)
    return roots


def _told(folder: str, built: "Built") -> str:
    record = built.record
    search = "exact search" if record.kind == "flat" else f"{record.kind}, effort {record.effort}, " + ", ".join(
        f"recall@10 {share:.3f} by {name}" for name, share in record.recall.items() if name != "target"
    )  # fmt: skip
    return printable(
        f"{folder}: {record.count} pictures ({built.added} new, {built.changed} changed, {built.dropped} dropped); "
        f"{record.dimension} x {record.dtype}; {search}"
    )


class _Query(NamedTuple):
    kind: str  # text or picture
    text: str
    vector: Float[Tensor, "D"]


def search(options: Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    found = open_index(options.index)
    record = found.record
    checkpoint = model_for(found, load(options.model or record.model, options.architecture or record.architecture))
    queries, code = _queries(options, prepare_for_inference(checkpoint, options.compute_type, options.device))
    if options.top > len(found):
        warnings.warn(f"--top {options.top}: the index holds {len(found)} pictures", stacklevel=1)
    if not queries:
        return code
    results = list(_results(found, queries, options.top, options.exact))
    if options.format == "csv":
        rows = ([r["query"], r["kind"], hit["file"], hit["score"]] for r in results for hit in r["results"])
    else:
        rows = ([f"{r['kind']}: {r['query']}", hit["file"], hit["score"]] for r in results for hit in r["results"])
    print_results(results, rows, ["query", "kind", "file", "score"], options.format)
    return code


def _results(index: Index, queries: list[_Query], top: int, exact: bool) -> Iterator[dict[str, Any]]:
    scores, rows = index.search(torch.stack([query.vector for query in queries]), top, exact)
    for query, own, best in zip(queries, scores.tolist(), rows, strict=True):
        # six digits, which is what float32 has; a stored unit vector may be a little longer than 1
        scores = [float(f"{min(score, 1.0):.6g}") for score in own]
        hits = [{"file": file, "score": score} for file, score in zip(index.files(best), scores, strict=True)]
        yield {"query": query.text, "kind": query.kind, "results": hits}


def _queries(options: Namespace, checkpoint: Checkpoint) -> tuple[list[_Query], int]:
    """Those that can be used, in their order, each told apart; the others are said."""
    asked = [(kind_of(text), text) for text in options.queries]
    asked += [("picture", path) for path in options.image] + [("text", text) for text in options.text]
    found, code = [], 0
    for kind, text in asked:
        try:
            if kind == "missing":
                raise ImageError(f"{text}: no such picture (as a text: --text)")
            texts, pictures = ([text], []) if kind == "text" else ([], [text])
            found.append(_Query(kind, text, query_vectors(checkpoint, texts, pictures)[0]))
        except (ImageError, TextError) as error:
            code = fail(error)
    return found, code


def kind_of(query: str) -> str:
    """picture: there is such a file; missing: there is none, and it is called like a picture; else text."""
    try:
        if Path(query).is_file():
            return "picture"
    except (OSError, ValueError):  # too long for a name, or with a NUL
        return "text"
    return "missing" if Path(query).suffix.lower() in SUFFIXES else "text"
