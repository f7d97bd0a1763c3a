"""What `multimodal translate` does with its flags (`cli_translate.py`)."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from multimodal.cli.output import fail
from multimodal.cli.shared import Progress, output_file, outputs_of, print_json, text_lines
from multimodal.errors import TextError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.outputs import opened_output
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.text.translate import Source, TranslateOptions, Translation, Translator, tell_cuts
from multimodal.weights.load import load

BATCHES = 8  # that are sorted by length together, and written once they are done


def translate(options: Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.output is not None and not Path(options.output).parent.is_dir():
        raise UsageError(f"--output {options.output}: cannot be written (no such folder)")
    output = output_file(options.output, "--output", (), outputs_of(options, but=("texts", "source", "target")))
    lines = list(text_lines(options.texts, options.file))
    checkpoint = prepare_for_inference(load(options.model, options.architecture), options.compute_type, options.device)
    names = ("beam_size", "length_penalty", "max_tokens", "batch_size", "on_long")
    chosen = TranslateOptions(**{name: getattr(options, name) for name in names})
    translator = Translator(checkpoint, options.source, options.target, chosen)
    told: list[tuple[str, Source, Translation]] = []
    code, size, shown = 0, BATCHES * options.batch_size, Progress("texts")
    with _writing(output) as write:
        for first in range(0, len(lines), size):
            part = lines[first : first + size]
            sources = [_read(translator, name, text) for name, text in part]
            code = code or int(None in sources)
            found = iter(_translated(translator, [one for one in sources if one is not None]))
            for number, ((name, text), one) in enumerate(zip(part, sources, strict=True), first + 1):
                made = None if one is None else next(found)
                if isinstance(made, Exception):
                    code, one, made = fail(item_error(made, name, TextError)), None, None
                write(_record(number, text, one, made, options.format))
                if made is not None and (one.cut or not made.finished):
                    told.append((name, one, made))
            sys.stdout.flush()
            shown(min(first + size, len(lines)), len(lines))
    shown.clear()
    tell_cuts(told)
    return code


def _translated(translator: Translator, sources: list[Source]) -> list[Translation | Exception]:
    return in_parts(lambda part: translator(sources[part]), len(sources))


def _read(translator: Translator, name: str, text: str | bytes) -> Source | None:
    """None for a line that is not translated, which is told."""
    try:
        if isinstance(text, bytes):
            text.decode()
        return translator.read(text)
    except UnicodeDecodeError as error:
        fail(f"{name}: is not UTF-8 text (byte {error.start} of the line is {error.object[error.start]:#x})")
    except TextError as error:
        fail(f"{name}: {error}")
    return None


def _record(number: int, text: str | bytes, source: Source | None, made: Translation | None, style: str) -> Any:
    if style == "txt":
        return "" if made is None else " ".join(made.text.split())
    if made is None:
        return {"line": number, "error": "not UTF-8 text" if isinstance(text, bytes) else "too long, or no Unicode"}
    facts = made._asdict() | {"score": float(f"{made.score:.6g}")}
    return {"line": number, "source": text, "translation": facts.pop("text"), **facts, "cut": source.cut}


def _printed(one: Any) -> None:
    if isinstance(one, str):
        print(one)
    else:
        print_json(one, indent=None)


@contextmanager
def _writing(output: Path | None) -> Iterator[Callable[[Any], None]]:
    """Lines or records to stdout as they come, or to a file beside `output`, which takes its place at the end."""
    if output is None:
        yield _printed
        return
    with opened_output(output, "keep") as file:
        yield lambda one: file.write(
            f"{one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)}\n".encode()
        )
