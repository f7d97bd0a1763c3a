"""`multimodal embed`: vectors of texts."""

import csv
import io
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from multimodal.cli import flags
from multimodal.cli.files import output_file, outputs_of, text_lines
from multimodal.cli.output import Progress, fail, print_json, printable
from multimodal.cli.parser import Parser, RawHelp
from multimodal.errors import TextError, UsageError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.outputs import write_output
from multimodal.tasks.text.options import EmbedOptions

if TYPE_CHECKING:
    import numpy as np

    from multimodal.weights.folder import Checkpoint

EXAMPLES = """examples:
  multimodal embed "a text" "another text" --model hf-hub:sentence-transformers/all-MiniLM-L6-v2
  multimodal embed --file texts.txt -o vectors.npy --model bert/    # one text per line, one row per text
"""
CHUNK = 4096  # texts that are sorted by length together


def add_flags(p: Parser) -> None:
    p.usage = "%(prog)s (TEXT [TEXT ...] | --file FILE) --model MODEL [flags]"
    p.epilog, p.formatter_class = EXAMPLES, RawHelp
    p.add_argument("texts", nargs="*", metavar="TEXT", help="texts, or - for the lines of stdin")
    p.add_argument("--file", metavar="FILE", help="one text per line (UTF-8; - for stdin)")
    p.add_argument("--output", "-o", metavar="FILE", help=".npy: one row per text, NaN for an unusable one; .jsonl or "
                   ".csv: line, text and vector (default: JSON lines on stdout)")  # fmt: skip
    flags.overwrite(p)
    add_option_flags(p, EmbedOptions, ["pooling", "normalize"])
    g = p.add_argument_group("model and machine")
    flags.model(g, None)
    flags.machine(g)
    add_option_flags(g, EmbedOptions, ["batch_tokens"])


def check(p: Parser, options: Namespace) -> None:
    if bool(options.texts) == (options.file is not None):
        p.error("give either TEXT or --file")
    if "-" in options.texts and len(options.texts) > 1:
        p.error("-: stands alone, for the lines of stdin")


class _InputText(NamedTuple):
    """`line`: of the file, or which of the arguments, from 1. `text` None: it is broken. `name`: for messages."""

    line: int
    text: str | None
    name: str


def run(options: Namespace) -> int:
    from multimodal.inference.prepare import prepare_for_inference
    from multimodal.tasks.encode.attempts import item_error
    from multimodal.weights.load import load

    outputs = outputs_of(options, but=("texts",))
    output = output_file(options.output, "--output", (".npy", ".jsonl", ".csv"), outputs)
    given = list(text_lines(options.texts, options.file))
    if not given:
        raise UsageError(f"{options.file or 'standard input'}: has no lines")
    checkpoint = prepare_for_inference(load(options.model, options.architecture), options.compute_type, options.device)
    texts, code = _usable(given)
    good = [one for one in texts if one.text is not None]
    if not good:
        return code
    made, failed = _embedded(options, checkpoint, good)
    for one, error in failed:
        code = fail(item_error(error, one.name, TextError))
    good = [one for one in good if one not in {one for one, _ in failed}]
    if not good:
        return code
    if output is None:
        for record in _records(good, made):
            print_json(record, indent=None)
        return code
    ending = output.suffix.lower()
    data = (
        _npy(len(texts), good, made)
        if ending == ".npy"
        else (_csv if ending == ".csv" else _jsonl)(good, made).encode()
    )
    write_output(output, data)
    print(printable(f"{options.output}: {len(good)} vectors of {made.shape[1]}"))
    return code


def _embedded(
    options: Namespace, checkpoint: "Checkpoint", texts: Sequence[_InputText]
) -> "tuple[np.ndarray, list[tuple[_InputText, Exception]]]":
    """A row for each text that can be computed; the others, and why."""
    import numpy as np

    from multimodal.tasks.encode.attempts import in_parts
    from multimodal.tasks.text.embed import embed

    def work(part: slice) -> "np.ndarray":
        chosen = [one.text for one in chunk[part]]
        return embed(chosen, checkpoint, **EmbedOptions.among(vars(options))).cpu().numpy()

    rows, failed, shown = [], [], Progress(options.file or "texts")
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        made = in_parts(work, len(chunk))
        failed += [(one, row) for one, row in zip(chunk, made, strict=True) if isinstance(row, Exception)]
        rows += [row for row in made if not isinstance(row, Exception)]
        shown(start + len(chunk), len(texts))
    shown.clear()
    return np.array(rows), failed


def _usable(given: Sequence[tuple[str, str | bytes]]) -> tuple[list[_InputText], int]:
    """Usable texts and the exit code; unusable ones are reported by name."""
    from multimodal.tasks.text.embed import check_text

    found, code = [], 0
    for number, (name, text) in enumerate(given, 1):
        try:
            text = text.decode("utf-8") if isinstance(text, bytes) else text
            check_text(text, name)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            text, code = None, fail(f"{name}: is not UTF-8 (byte {error.start + 1} is {byte:#x})")
        except TextError as error:
            text, code = None, fail(error)
        found.append(_InputText(number, text, name))
    return found, code


def _npy(count: int, good: Sequence[_InputText], made: "np.ndarray") -> bytes:
    import numpy as np

    rows = np.full((count, made.shape[1]), np.nan, np.float32)
    rows[[one.line - 1 for one in good]] = made
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()


def _numbers(vector: "np.ndarray") -> list[float]:
    """Nine digits, which is what float32 needs."""
    return [float(f"{value:.9g}") for value in vector.tolist()]


def _records(texts: Sequence[_InputText], made: "np.ndarray") -> Iterator[dict[str, Any]]:
    for one, vector in zip(texts, made, strict=True):
        yield {"line": one.line, "text": one.text, "vector": _numbers(vector)}


def _jsonl(texts: Sequence[_InputText], made: "np.ndarray") -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in _records(texts, made))


def _csv(texts: Sequence[_InputText], made: "np.ndarray") -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["line", "text", *range(1, made.shape[1] + 1)])
    writer.writerows([line, text, *vector] for line, text, vector in map(dict.values, _records(texts, made)))
    return file.getvalue()
