"""What each command of the console script does with its options. Each returns the exit code."""

import csv
import json
import math
import sys
import textwrap
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from multimodal import __version__
from multimodal.assets import shipped
from multimodal.cli import fail, printable
from multimodal.errors import ImageError, MultimodalError, UsageError
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families, load


def classify(options: Namespace) -> int:
    from multimodal.tasks.zeroshot import ZeroShotClassifier
    from multimodal.tokens.image import find_images

    labels, templates = _labels(options), _templates(options.templates)
    files, code = found_files(options.images, find_images)
    classifier = ZeroShotClassifier(load(options.model, options.architecture), labels, templates)
    if len(labels) == 1 and classifier.model.config.loss == "softmax":
        warnings.warn("--labels: one label alone gets the score 1 in every picture", stacklevel=1)
    top = options.top or (5 if options.format == "table" else None)
    results, failed = _each(files, lambda batch: classifier.results(batch, top), options.batch_size, ImageError)
    rows = ([r["file"], s["label"], s["score"]] for r in results for s in r["scores"])
    _print_results(results, rows, ["file", "label", "score"], options.format)
    return code or failed


def transcribe(options: Namespace) -> int:
    from multimodal.commands_transcribe import transcribe as run

    return run(options)


def evaluate(options: Namespace) -> int:
    from multimodal.commands_evaluate import evaluate as run

    return run(options)


def caption(options: Namespace) -> int:
    from multimodal.tasks.caption import caption as run
    from multimodal.tokens.image import find_images

    model = load(options.model, options.architecture)
    files, code = found_files(options.images, find_images)

    def captions(batch: list[Path]) -> list[dict[str, Any]]:
        return run(batch, model, beam_size=options.beam_size, max_tokens=options.max_tokens)

    results, failed = _each(files, captions, 16, ImageError)
    rows = ([r["file"], r["caption"], r["score"]] for r in results)
    _print_results(results, rows, ["file", "caption", "score"], options.format)
    return code or failed


def generate(options: Namespace) -> int:
    from multimodal.tasks.generate import generate as run

    model = load(options.model, options.architecture)
    print(run(options.prompt, model, max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed))
    return 0


def models(_: Namespace) -> int:
    from multimodal.presets import PRESETS
    from multimodal.tokens.files import read_json

    print("shipped models")
    for name, folder in shipped().items():
        card = folder / "card.json"
        print(f"  {name:<20} {read_json(card).get('summary', '') if card.exists() else ''}".rstrip())
    if not shipped():
        print("  none in this installation")
    print("sizes of the papers (multimodal.presets)")
    print(_wrapped(PRESETS))
    print("formats that load and convert take")
    print(_wrapped(["multimodal", *families()]))
    return 0


def _wrapped(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def info(options: Namespace) -> int:
    facts = describe(load(options.model, options.architecture))
    if options.format == "json":
        print_json(facts)
        return 0
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for line in _indented(value):
                print(f"  {line}")
        else:
            print(f"{key}: {_shown(value)}")
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as facts for people."""
    from multimodal.weights.records import to_record

    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    parts["not in a part"] = sum(p.numel() for p in model.parameters(recurse=False))
    return {
        "source": checkpoint.source,
        "kind": checkpoint.kind,
        "parameters": {"total": sum(p.numel() for p in model.parameters())} | {k: n for k, n in parts.items() if n},
        "tokenizer": f"{type(tokenizer).__name__}, {tokenizer.vocab_size} ids" if tokenizer else "none",
        "preprocessing": checkpoint.preprocessing.to_dict() if checkpoint.preprocessing else "none",
        **({"licence": "not stated by the checkpoint", "training_data": "not stated"} | checkpoint.card),
        "config": to_record(model.config),
    }


def convert(options: Namespace) -> int:
    import torch

    from multimodal.weights.convert import convert as run

    config = Path(options.config) if options.config else None
    dtype = torch.float16 if options.half else None
    try:
        made = run(options.source, Path(options.target), options.architecture, options.to, config, dtype)
    except OSError as error:
        raise UsageError(f"{error.filename or options.target}: cannot be used ({error.strerror or error})") from None
    print(f"{options.target}: {made.kind}, {sum(p.numel() for p in made.model.parameters()):,} parameters")
    return 0


def validate(options: Namespace) -> int:
    import os

    from multimodal.train.captions import class_names
    from multimodal.train.sources import open_source
    from multimodal.train.validate import summary
    from multimodal.train.validate import validate as run

    columns = {"path": options.path_column, "text": options.text_column, "label": options.label_column}
    workers = options.workers or min(8, len(os.sched_getaffinity(0)))
    reports = []
    for data in options.data:
        labels = class_names([Path(options.classes)] if options.classes else [], [data])
        shown = Progress(data)
        reports.append((data, run(open_source(data, **columns), options.kind, workers, labels, shown)))
        shown.clear()
    if options.format == "json":
        print_json([report.to_dict(data) for data, report in reports])
    else:
        for line in (line for data, report in reports for line in summary(data, report)):
            print(printable(line))
    return int(any(report.broken for _, report in reports))


class Progress:
    """One line on a terminal's stderr, twice a second."""

    def __init__(self, name: str):
        self.name, self.shown = printable(name), None if sys.stderr is not None and sys.stderr.isatty() else math.inf

    def __call__(self, done: int, items: int, broken: int | None = None) -> None:
        if self.shown is None or time.monotonic() - self.shown > 0.5:
            faults = f", {broken} broken" if broken is not None else ""
            print(f"\r{self.name}: {done} of {items}{faults}\x1b[K", end="", file=sys.stderr, flush=True)
            self.shown = time.monotonic()

    def clear(self) -> None:
        if self.shown not in (None, math.inf):
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def env(_: Namespace) -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    print(f"multimodal {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in ("torch", "torchvision", "torchaudio", "timm", "open_clip_torch", "av", "pillow", "tokenizers"):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"accelerator {device}; {torch.get_num_threads()} threads; CPU {torch.backends.cpu.get_cpu_capability()}")
    return 0


def found_files(arguments: list[str], find: Callable[[list[str]], list[Path]]) -> tuple[list[Path], int]:
    """The files that the arguments name, each once; an argument that names none is reported, the others go on."""
    files: dict[Path, None] = {}
    code = 0
    for argument in arguments:
        try:
            files |= dict.fromkeys(find([argument]))
        except UsageError as error:
            code = fail(error)
    return list(files), code


def _each(
    files: list[Path], work: Callable[[list[Path]], list], batch_size: int, error_class: type[MultimodalError]
) -> tuple[list, int]:
    """`work` over batches; where one fails its files are taken one by one, so that the others still get a result."""
    results, code = [], 0
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        try:
            results += work(batch)
            continue
        except error_class:
            pass
        for file in batch:
            try:
                results += work([file])
            except error_class as error:
                code = fail(error)
    return results, code


def _labels(options: Namespace) -> list[str]:
    if (options.labels is None) == (options.labels_file is None):
        raise UsageError("--labels: give labels, or a file of them with --labels_file")
    if options.labels_file is not None:
        return [line for line in _lines(options.labels_file, "--labels_file") if line.strip()]
    return options.labels[0].split(",") if len(options.labels) == 1 else options.labels


def _templates(value: str | None) -> str | list[str] | None:
    from multimodal.tasks.zeroshot import TEMPLATES

    if value is None or value == "none" or value in TEMPLATES or not Path(value).exists():
        return value
    return [line for line in _lines(value, "--templates") if line.strip()]


def _lines(path: str, flag: str) -> list[str]:
    if not path or (Path(path).exists() and not Path(path).is_file()):
        raise UsageError(f"{flag} {path!r}: not a regular file (folders, pipes and devices are not read)")
    try:
        return Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also cut at U+2028
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UsageError(f"{flag} {path}: is not UTF-8 text (byte {error.start} is {byte:#x})") from None


def _print_results(results: list, rows: Iterator[list], header: list[str], style: str) -> None:
    if style == "json":
        print_json(results)
    elif style == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    else:
        last = None
        for file, text, score in rows:
            if file != last:
                print(printable(str(file)))
            print(f"  {score:8.4f}  {printable(text)}")
            last = file


def print_json(value: Any) -> None:
    """Letters as they are where the terminal or file takes every one, else as JSON's escapes."""
    encoding = str(getattr(sys.stdout, "encoding", None)).lower().replace("-", "")
    print(json.dumps(value, ensure_ascii=encoding != "utf8", indent=1))


def _indented(value: dict[str, Any]) -> list[str]:
    """Nested facts, a line each."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [f"{key}:", *(f"  {line}" for line in _indented(item))]
        elif item is not None:  # what is off or left to its default would be half of the lines
            lines.append(f"{key}: {_shown(item)}")
    return lines


def _shown(item: Any) -> str:
    if isinstance(item, list | tuple):
        return ", ".join(map(_shown, item))
    return f"{item:,}" if type(item) is int else printable(str(item))
