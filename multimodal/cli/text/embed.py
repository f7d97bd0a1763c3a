"""`multimodal embed`: vectors of texts or images."""

import csv
import io
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.files import check_texts, decoded, output_file, outputs_of, text_lines
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, print_json, printable
from multimodal.cli.parser import Parser
from multimodal.cli.vision.images import found
from multimodal.errors import TextError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.outputs import write_output
from multimodal.tasks.text.options import EmbedOptions
from multimodal.tokens.video.options import ClipOptions

if TYPE_CHECKING:
    import numpy as np

    from multimodal.weights.folder import Checkpoint

EXAMPLES = """examples:
  multimodal embed "a text" "another text"                          # by sentence-mini
  multimodal embed --file texts.txt -o vectors.npy --model bge-small-en   # one text per line, one row per text
  multimodal embed --images photos/ -o vectors.npy                  # by clip-vit-16; one row per image, sorted by path
"""
FORMATS = ("jsonl", "csv", "npy")


def add_flags(p: Parser) -> None:
    p.usage = "%(prog)s (TEXT [TEXT ...] | --file FILE | --images IMAGE [IMAGE ...]) [flags]"
    p.epilog = EXAMPLES
    p.add_argument("texts", nargs="*", metavar="TEXT", help="texts, or - for the lines of stdin")
    p.add_argument("--file", metavar="FILE", help="one text per line (UTF-8); a line of .jsonl or .csv is a text as it "
                   "stands; - reads stdin")  # fmt: skip
    p.add_argument("--images", nargs="+", metavar="IMAGE", help="images, folders or globs; of a video, each sampled "
                   "frame is an image")  # fmt: skip
    p.add_argument("--output", "-o", metavar="FILE", help="default: stdout")
    p.add_argument("--format", choices=FORMATS, help="jsonl, csv: line and text, or file, then the vector; npy: one "
                   "row per text, image or frame, NaN for an unusable one (default: by the ending of --output; on "
                   "stdout jsonl)")  # fmt: skip
    flags.overwrite(p)
    flags.videos(p)
    add_option_flags(p, EmbedOptions, ["pooling", "normalize", "prompt"])
    g = p.add_argument_group("model and machine")
    flags.model(g, "embed", lambda options: "embed" if options.images is None else "embed-images")
    flags.machine(g)
    flags.native(g)
    add_option_flags(g, EmbedOptions, ["batch_tokens"])


def check(p: Parser, options: Namespace) -> None:
    if [bool(options.texts), options.file is not None, options.images is not None].count(True) != 1:
        p.error("give one of TEXT, --file, --images")
    if options.images is None:
        p.refuse(options, ("native", *ClipOptions.declared), "is for --images")
    else:
        p.refuse(options, ("pooling", "prompt"), "is for texts")
    options.format = options.format or flags.by_ending(options.output, FORMATS, "jsonl")
    if options.format is None:
        p.error(f"--output {options.output}: must end in .jsonl, .csv or .npy, or --format says what it holds")
    flags.check_ending(p, options)
    if options.format == "npy" and options.output is None:
        p.error("--format npy: needs --output FILE")
    check_texts(p, options.texts, "--images or --file read")


class _Input(NamedTuple):
    """A text, or the name of an image or frame. `line`: of the file, or number of the argument or image, from 1. `text`
    None: it is broken. `name`: for messages."""

    line: int
    text: str | None
    name: str


def run(options: Namespace) -> int:
    images = options.images is not None
    files, code = found(options.images, options) if images else ([], 0)
    if images and not files:  # before torch is imported
        return code
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.encode.attempts import item_error

    outputs = outputs_of(options, files, but=("texts", "images"))
    output = output_file(options.output, "--output", (), outputs)
    if not images:
        given = list(text_lines(options.texts, options.file))
    checkpoint = prepare_for_inference(
        loaded(options, "embed-images" if images else "embed"), options.compute_type, options.device
    )
    if images:
        good, made, failed = _embedded(options, checkpoint, files)
        count = len(good) + len(failed)
    else:
        inputs, code = _usable(given)
        usable, count = [one for one in inputs if one.text is not None], len(inputs)
        if not usable:
            return code
        good, made, failed = _embedded(options, checkpoint, [one.text for one in usable], usable)
        failed = [(one, error.__cause__ or error) for one, error in failed]  # named by the line, not the position
    for one, error in failed:
        code = fail(item_error(error, one.name, TextError))
    if good:
        _write(options, output, count, good, made)
    return code


def _write(
    options: Namespace, output: Path | None, count: int, good: Sequence[_Input], made: "np.ndarray"
) -> None:  # fmt: skip
    records = _records(good, made, options.images is not None)
    if output is None and options.format == "jsonl":
        for record in records:
            print_json(record, indent=None)
        return
    data = _npy(count, good, made) if options.format == "npy" else WRITERS[options.format](records)
    if output is None:
        sys.stdout.write(data.decode("utf-8", "surrogateescape"))
        return
    write_output(output, data)
    print(printable(f"{options.output}: {len(good)} vectors of {made.shape[1]}"))


def _embedded(
    options: Namespace, checkpoint: "Checkpoint", sources: Sequence[str], texts: Sequence[_Input] = ()
) -> "tuple[list[_Input], np.ndarray, list[tuple[_Input, Exception]]]":
    """Images, frames or texts that can be computed and a row for each; the others, and why. `sources`: files, or what
    stands in `texts`."""
    import numpy as np

    from multimodal.tasks.text.embedder import Embedder

    good, rows, failed = [], [], []
    chosen = {"normalize": None} | EmbedOptions.among(vars(options)) | ClipOptions.among(vars(options))
    embedder = Embedder(checkpoint, device=None, native=options.native, **chosen)
    shown = Progress(options.file or "texts" if texts else "images")
    for line, (name, result) in enumerate(embedder.many(sources, "text" if texts else "image"), 1):
        one = texts[line - 1] if texts else _Input(line, name, name)
        if isinstance(result, Exception):
            failed.append((one, result))
        else:
            good.append(one)
            rows.append(result)
        shown(line, max(line, len(sources)))
    return good, np.array(rows), failed


def _usable(given: Sequence[tuple[str, str | bytes]]) -> tuple[list[_Input], int]:
    """Usable texts and the exit code; unusable ones are reported by name."""
    from multimodal.tasks.text.embed import check_text

    usable, code = [], 0
    for number, (name, text) in enumerate(given, 1):
        try:
            check_text(text := decoded(text, f"{name}: "), name)
        except TextError as error:
            text, code = None, fail(error)
        usable.append(_Input(number, text, name))
    return usable, code


def _npy(count: int, good: Sequence[_Input], made: "np.ndarray") -> bytes:
    import numpy as np

    rows = np.full((count, made.shape[1]), np.nan, np.float32)
    rows[[one.line - 1 for one in good]] = made
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()


def _numbers(vector: "np.ndarray") -> list[float]:
    """Nine digits, which is what float32 needs."""
    return [float(f"{value:.9g}") for value in vector.tolist()]


def _records(inputs: Sequence[_Input], made: "np.ndarray", images: bool) -> Iterator[dict[str, Any]]:
    for one, vector in zip(inputs, made, strict=True):
        facts = {"file": one.text} if images else {"line": one.line, "text": one.text}
        yield facts | {"vector": _numbers(vector)}


def _jsonl(records: Iterator[dict[str, Any]]) -> bytes:
    from multimodal.tasks.encode.results import json_line

    return b"".join(map(json_line, records))


def _csv(records: Iterator[dict[str, Any]]) -> bytes:
    rows, file = list(records), io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    *names, vector = rows[0]
    writer.writerow([*names, *range(1, len(rows[0][vector]) + 1)])
    writer.writerows([*(row[name] for name in names), *row[vector]] for row in rows)
    return file.getvalue().encode("utf-8", "surrogateescape")  # file names may not be UTF-8


WRITERS = {"jsonl": _jsonl, "csv": _csv}
