"""Shared parts of commands over many images: input files, results as they come, resuming after a stop."""

import csv
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence, Set
from operator import itemgetter
from pathlib import Path
from typing import Any

from multimodal.cli.console import Progress, console
from multimodal.cli.output import fail, print_json, printable
from multimodal.errors import CheckpointError, ImageError, UsageError
from multimodal.system.outputs import Outputs
from multimodal.system.signals import at_stop
from multimodal.tasks.encode.attempts import item_error
from multimodal.tasks.encode.results import BESIDE, Results
from multimodal.tokens.video.names import FrameName
from multimodal.tokens.video.options import ClipOptions

APPENDED = ("csv", "jsonl")  # formats of files that a second call goes on with
UNREAD = {".heic", ".heif"}  # photos of phones, which Pillow does not read
Record = dict[str, Any]  # of one image, its name as `file`
Add = Callable[[Record], None]


def found(arguments: Iterable[str], options: Namespace | None = None) -> tuple[list[str], int]:
    """Images and videos that the arguments name, each once; an argument that names none, and a folder that cannot be
    listed, is reported, and the others go on. Folders and globs are searched for videos if `options` has a flag of
    videos; a glob that ends in a video's suffix too."""
    from multimodal.tokens.image.reading import SUFFIXES, find_images, walk_images
    from multimodal.tokens.video.names import SUFFIXES as VIDEOS

    names: dict[str, None] = {}
    code, shown = 0, Progress("finding images")
    asked = bool(ClipOptions.among(vars(options) if options else {}))

    def refused(error: OSError) -> None:
        nonlocal code
        code = fail(f"{error.filename}: cannot be listed ({error.strerror})")

    for argument in arguments:
        suffixes = SUFFIXES | VIDEOS if asked or os.path.splitext(argument)[1].lower() in VIDEOS else SUFFIXES
        try:
            if folder := os.path.isdir(argument):
                inside = walk_images(argument, refused, SUFFIXES | VIDEOS | UNREAD)
            else:
                inside = map(str, find_images([argument], suffixes))
            before, left, unread = len(names), 0, 0
            for name in inside:
                suffix = os.path.splitext(name)[1].lower()
                if folder and (suffix in UNREAD or (suffix in VIDEOS and not asked)):
                    left, unread = left + (suffix in VIDEOS), unread + (suffix in UNREAD)
                    continue
                names[name] = None
                if len(names) % 1000 == 0:
                    shown(len(names), len(names))
            if left:
                console.note(f"{argument}: videos left out: {left} (--max_frames, --every_s or --scenes reads them)")
            if unread:
                console.note(f"{argument}: HEIC images left out: {unread} (not read; convert them)")
            if len(names) == before and not code and folder:
                find_images([argument], suffixes)  # says what is missing
        except UsageError as error:
            code = fail(error)
    return list(names), code


def no_videos(files: Iterable[str], flag: str) -> None:
    """Raises UsageError for a video, of which `flag` cannot be made."""
    from multimodal.tokens.video.names import is_video

    for file in files:
        if is_video(file):
            raise UsageError(f"{flag}: is for images ({file})")


class ImageProgress:
    """Images done, on a terminal, unless the results themselves go to the screen."""

    def __init__(self, total: int, to_file: bool):
        on_screen = not to_file and sys.stdout is not None and sys.stdout.isatty()
        self.line = None if on_screen else Progress("images")
        self.total, self.done, self.video = total, 0, None

    def step(self, name: str) -> None:
        """Count an image, or a video with its first frame."""
        path = name.path if isinstance(name, FrameName) else None
        if path is None or path != self.video:
            self.done += 1
            if self.line is not None:
                self.line(self.done, self.total)
        self.video = path


def attempt(file: str, work: Callable[[], object]) -> int:
    """0, or 1 and one line where `work` fails by the image."""
    try:
        work()
    except (UsageError, CheckpointError):
        raise
    except Exception as error:
        return fail(item_error(error, file, ImageError))
    return 0


def results_place(options: Namespace, outputs: Outputs) -> None:
    """Raises UsageError where `--output`, or a file beside it, is an input."""
    for ending in ("", BESIDE) if options.output is not None else ():
        outputs.spare(Path(options.output + ending), f"--output {options.output}{ending}")


class ImageOutput:
    """Results on stdout: JSON at the end, all else as it comes. `rows`: a record as CSV; `title` and `table`: its lines
    for people."""

    def __init__(
        self, style: str, header: Sequence[str], rows: Callable[[Record], Iterable[list]],
        table: Callable[[Record], Iterable[str]], title: Callable[[Record], str] = itemgetter("file"),
    ):  # fmt: skip
        self.style, self.rows, self.table, self.title = style, rows, table, title
        self.records: list[Record] = []
        self.writer = csv.writer(sys.stdout, lineterminator="\n") if style == "csv" else None
        if self.writer:
            self.writer.writerow(header)

    def add(self, record: Record) -> None:
        if self.style == "json":
            self.records.append(record)
            return
        if self.style == "jsonl":
            print_json(record, indent=None)
        elif self.writer:
            self.writer.writerows(self.rows(record))
        else:
            print(printable(self.title(record)))
            for line in self.table(record):
                print(f"  {line}")
        sys.stdout.flush()

    def end(self) -> None:
        if self.style == "json":
            print_json(self.records)


def append_to(
    options: Namespace, header: Sequence[str], settings: Record, files: list[str],
    rows: Callable[[Record], Iterable[list]], work: Callable[[list[str], Add, "There"], int],
    whole: Callable[[str], bool] = lambda file: True,
) -> int:  # fmt: skip
    """To the file `--output`, with which a second call goes on. `work(files, add, there)` makes the records; those of
    images and frames that are `there` are not added. `whole`: whether all else that belongs to an image is there."""
    written = _changed_at(options.output)
    with Results(options.output, options.format, header, settings, options.overwrite) as results:
        there = {file for file in files if results.has(file) and whole(file)}
        if there:
            console.note(f"{options.output}: {len(there)} of {len(files)} images are there already")
            if newer := sorted(file for file in there if _changed_at(file) > written):
                warnings.warn(f"{options.output}: keeps the rows of {len(newer)} images that have changed since, such "
                              f"as {newer[0]}; --overwrite replaces them", stacklevel=1)  # fmt: skip

        def add(record: Record) -> None:
            if not results.has(record["file"]):
                results.append(record["file"], list(rows(record)), record)

        def stopped() -> str:
            results.close()
            there = len(results.done)
            return printable(f"multimodal: {options.output}: stopped with {there} images in it; "
                             "the same command resumes")  # fmt: skip

        with at_stop(stopped):
            parts = remaining(files, there, options.batch_size)
            return max([work(part, add, There(there, results)) for part in parts])


def _changed_at(path: str) -> float:
    """Seconds since 1970; 0 for what is not there."""
    try:
        return os.stat(path).st_mtime
    except (OSError, ValueError):
        return 0.0


class There:
    """Names of the finished images, and of the finished frames of videos."""

    def __init__(self, images: Set[str] = frozenset(), results: Results | None = None):
        self.images, self.results = images, results

    def __contains__(self, name: object) -> bool:
        frame = isinstance(name, FrameName) and self.results is not None
        return self.results.has(name) if frame else name in self.images


NOTHING = There()


def remaining(files: list[str], there: Set[str], batch_size: int) -> tuple[list[str], list[str]]:
    """Images to do again, such as broken ones, and those from the batch on in which a stop came. That batch is made
    whole again, though some of it is there, so that all after it are the same batches as without a stop: the last digit
    of an image's scores depends on how many are computed at once."""
    last = next((number for number in reversed(range(len(files))) if files[number] in there), -1)
    start = max(last, 0) // batch_size * batch_size
    if there.issuperset(files[start : start + batch_size]):
        start += batch_size
    return [file for file in files[:start] if file not in there], files[start:]
