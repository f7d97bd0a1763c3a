"""What each command of the console script does with its options. Each returns the exit code."""

import textwrap
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from multimodal import __version__
from multimodal.cli.output import printable
from multimodal.cli.shared import Progress, print_json, trust
from multimodal.errors import UsageError
from multimodal.system.assets import shipped
from multimodal.weights.load import families


def classify(options: Namespace) -> int:
    from multimodal.cli.run.classify import classify as run

    return run(options)


def transcribe(options: Namespace) -> int:
    from multimodal.cli.run.transcribe import transcribe as run

    return run(options)


def evaluate(options: Namespace) -> int:
    from multimodal.cli.run.evaluate import evaluate as run

    return run(options)


def caption(options: Namespace) -> int:
    from multimodal.cli.run.caption import caption as run

    return run(options)


def index(options: Namespace) -> int:
    from multimodal.cli.run.search import index as run

    return run(options)


def search(options: Namespace) -> int:
    from multimodal.cli.run.search import search as run

    return run(options)


def fill_mask(options: Namespace) -> int:
    from multimodal.cli.run.encode import fill as run

    return run(options)


def embed(options: Namespace) -> int:
    from multimodal.cli.run.encode import vectors as run

    return run(options)


def translate(options: Namespace) -> int:
    from multimodal.cli.run.translate import translate as run

    return run(options)


def generate(options: Namespace) -> int:
    from multimodal.cli.run.generate import generate as run

    return run(options)


def models(_: Namespace) -> int:
    from multimodal.models.presets import PRESETS
    from multimodal.system.files import read_json

    print("shipped models")
    for name, folder in shipped().items():
        card = folder / "card.json"
        print(f"  {name:<20} {read_json(card).get('summary', '') if card.exists() else ''}".rstrip())
    if not shipped():
        print("  none in this installation")
    print("sizes of the papers (multimodal.models.presets)")
    print(_wrapped(PRESETS))
    print("formats that load and convert take")
    print(_wrapped(["multimodal", *families()]))
    return 0


def _wrapped(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def info(options: Namespace) -> int:
    from multimodal.cli.run.inspect import info as run

    return run(options)


def inspect(options: Namespace) -> int:
    from multimodal.cli.run.inspect import inspect as run

    return run(options)


def convert(options: Namespace) -> int:
    import torch

    from multimodal.weights.convert import convert as run

    config = Path(options.config) if options.config else None
    dtype = torch.float16 if options.half else None
    try:
        made = run(
            options.source, Path(options.target), options.architecture, options.to, config, dtype, options.preprocessing
        )
    except OSError as error:
        raise UsageError(f"{error.filename or options.target}: cannot be used ({error.strerror or error})") from None
    print(f"{options.target}: {made.kind}, {sum(p.numel() for p in made.model.parameters()):,} parameters")
    return 0


def validate(options: Namespace) -> int:
    import os

    from multimodal.data.datasets.class_names import class_names
    from multimodal.data.sources import open_source
    from multimodal.data.validate import summary
    from multimodal.data.validate import validate as run

    given = {"path": options.path_column, "text": options.text_column, "label": options.label_column,
             "trust": trust(options)}  # fmt: skip
    workers = options.workers or min(8, len(os.sched_getaffinity(0)))
    reports = []
    for data in options.data:
        labels = class_names([Path(options.classes)] if options.classes else [], [data])
        shown = Progress(data)
        reports.append((data, run(open_source(data, **given), options.kind, workers, labels, shown)))
        shown.clear()
    if options.format == "json":
        print_json([report.to_dict(data) for data, report in reports])
    else:
        for line in (line for data, report in reports for line in summary(data, report)):
            print(printable(line))
    return int(any(report.broken for _, report in reports))


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
