"""`multimodal index`: build or update a search index of images."""

import glob
import os
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, printable
from multimodal.cli.parser import Parser
from multimodal.cli.vision.images import found
from multimodal.errors import UsageError
from multimodal.inference.options import BatchOptions
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.signals import at_stop
from multimodal.tasks.retrieve.options import IndexOptions

if TYPE_CHECKING:
    from multimodal.tasks.retrieve.build import BuildResult
    from multimodal.weights.folder import Checkpoint

EXAMPLES = """examples:
  multimodal index photos/ -o photos.index        # rerun to update: reads only new and changed images
  multimodal index photos/ --every_s 5 -o photos.index         # videos too: a row for every fifth second
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s IMAGE [IMAGE ...] --output FOLDER [flags]", EXAMPLES
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs; of a video, each "
                   "sampled frame is an image")  # fmt: skip
    p.add_argument("--output", "-o", required=True, metavar="FOLDER",
                   help="folder of the index; an existing index is updated with new and changed images")  # fmt: skip
    add_option_flags(p, IndexOptions, ("kind", "recall", "dtype"), defaults=True)
    p.add_argument("--overwrite", action="store_true", help="rebuild the index")
    flags.videos(p)
    g = flags.model_and_machine(p, "index", BatchOptions)
    flags.native(g)


def run(options: Namespace) -> int:

    files, code = found(options.images, options)
    if not files:
        return code
    name = os.path.abspath(options.model) if os.path.exists(options.model) else options.model
    checkpoint = loaded(options, "classify")
    with _reporting(options.output):
        built = _built(options, files, checkpoint, name)
    for error in built.refused:
        code = fail(error)
    for note in built.notes:
        warnings.warn(note, stacklevel=1)
    if built.record is None:
        return fail(f"--output {options.output}: no image could be read; an existing index is unchanged")
    print(_summary(options.output, built))
    return code


@contextmanager
def _reporting(folder: str) -> Iterator[None]:
    """Report a stop or a full disk while the index is built."""
    try:
        with at_stop(lambda: printable(f"multimodal: {folder}: stopped; the same command resumes")):
            yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise UsageError(f"--output {folder}: cannot be written ({error.strerror})") from None


def _built(options: Namespace, files: list[str], checkpoint: "Checkpoint", name: str) -> "BuildResult":
    from multimodal.tasks.retrieve.build import build

    return build(
        files, checkpoint, options.output, name=name, architecture=options.architecture,
        within=_searched(options.images, files), watch=Progress(options.output), overwrite=options.overwrite,
        compute_type=options.compute_type, device=options.device, native=options.native,
        **IndexOptions.among(vars(options)),
    )  # fmt: skip


def _searched(arguments: list[str], files: list[str]) -> list[str]:
    """Folders searched that had images: a disk that is not mounted looks empty."""
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


def _summary(folder: str, built: "BuildResult") -> str:
    record = built.record
    images = "1 image" if record.count == 1 else f"{record.count} images"
    search = "exact search" if record.kind == "flat" else f"{record.kind}, effort {record.effort}, " + ", ".join(
        f"recall@10 {share:.3f} by {name}" for name, share in record.recall.items() if name != "target"
    )  # fmt: skip
    return printable(
        f"{folder}: {images} ({built.added} new, {built.changed} changed, {built.dropped} dropped); "
        f"{record.dimension} x {record.dtype}; {search}"
    )
