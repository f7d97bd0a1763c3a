"""What `multimodal fill-mask` and `multimodal embed` do with their options."""

import csv
import io
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from multimodal.cli.output import fail, printable
from multimodal.cli.shared import Progress, output_file, outputs_of, print_json, text_lines
from multimodal.errors import TextError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.outputs import write_output
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.text.embed import check_text, embed
from multimodal.tasks.text.fill_mask import fill_mask, masked_model
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

CHUNK = 4096  # texts that are sorted by length together


def fill(options: Namespace) -> int:
    checkpoint = masked_model(load(options.model, options.architecture))
    checkpoint = _ready(options, checkpoint)
    results, code = [], 0
    for text in options.texts:
        try:
            results += fill_mask([text], checkpoint, options.top_k)
        except TextError as error:
            code = fail(error)
    if options.format == "json":
        print_json(results)
        return code
    for result in results:
        print(printable(result["filled"]))
        for number, guesses in enumerate(result["masks"], 1):
            for guess in guesses:
                mask = f"{number}  " if len(result["masks"]) > 1 else ""
                print(f"  {mask}{guess['probability']:.4f}  {printable(guess['token'].strip())}")
    return code


class _Text(NamedTuple):
    """`line`: of the file, or which of the arguments, from 1. `text` None: it is broken. `name`: for messages."""

    line: int
    text: str | None
    name: str


def vectors(options: Namespace) -> int:
    outputs = outputs_of(options, but=("texts",))
    output = output_file(options.output, "--output", (".npy", ".jsonl", ".csv"), outputs)
    given = list(text_lines(options.texts, options.file))
    if not given:
        raise UsageError(f"{options.file or 'standard input'}: has no line, so there is no text")
    checkpoint = _ready(options, load(options.model, options.architecture))
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
    options: Namespace, checkpoint: Checkpoint, texts: Sequence[_Text]
) -> tuple[np.ndarray, list[tuple[_Text, Exception]]]:
    """A row for each text that can be computed; the others, and why."""

    def work(part: slice) -> np.ndarray:
        chosen = [one.text for one in chunk[part]]
        return embed(chosen, checkpoint, options.pooling, options.normalize, options.batch_tokens).cpu().numpy()

    rows, failed, shown = [], [], Progress(options.file or "texts")
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        made = in_parts(work, len(chunk))
        failed += [(one, row) for one, row in zip(chunk, made, strict=True) if isinstance(row, Exception)]
        rows += [row for row in made if not isinstance(row, Exception)]
        shown(start + len(chunk), len(texts))
    shown.clear()
    return np.array(rows), failed


def _ready(options: Namespace, checkpoint: Checkpoint) -> Checkpoint:
    if options.threads:
        torch.set_num_threads(options.threads)
    return prepare_for_inference(checkpoint, options.compute_type, options.device)


def _usable(given: Sequence[tuple[str, str | bytes]]) -> tuple[list[_Text], int]:
    """The texts, and the exit code; those that cannot be used are said by their names."""
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
        found.append(_Text(number, text, name))
    return found, code


def _npy(count: int, good: Sequence[_Text], made: np.ndarray) -> bytes:
    rows = np.full((count, made.shape[1]), np.nan, np.float32)
    rows[[one.line - 1 for one in good]] = made
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()


def _numbers(vector: np.ndarray) -> list[float]:
    """Nine digits, which is what float32 needs."""
    return [float(f"{value:.9g}") for value in vector.tolist()]


def _records(texts: Sequence[_Text], made: np.ndarray) -> Iterator[dict[str, Any]]:
    for one, vector in zip(texts, made, strict=True):
        yield {"line": one.line, "text": one.text, "vector": _numbers(vector)}


def _jsonl(texts: Sequence[_Text], made: np.ndarray) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in _records(texts, made))


def _csv(texts: Sequence[_Text], made: np.ndarray) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["line", "text", *range(1, made.shape[1] + 1)])
    writer.writerows([line, text, *vector] for line, text, vector in map(dict.values, _records(texts, made)))
    return file.getvalue()
