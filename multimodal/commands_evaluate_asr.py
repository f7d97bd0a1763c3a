"""What `multimodal evaluate asr` does with its flags."""

import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

from multimodal.cli import fail, printable
from multimodal.commands_shared import Progress, print_json
from multimodal.commands_transcribe import api_options
from multimodal.errors import UsageError
from multimodal.tasks.evaluate_asr import evaluate as run
from multimodal.tasks.evaluate_report import record, summary, write_report
from multimodal.weights.load import load

OWN = ("command", "kind", "manifest", "report", "normalizer", "keep_marks", "limit", "output")


def evaluate(options: Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name not in OWN}
    if given.get("threads"):
        import torch

        torch.set_num_threads(given["threads"])
    report = _report(options.report)
    checkpoint = load(options.model, options.architecture)
    asked = api_options(given, checkpoint)
    shown, warn = Progress(options.manifest), warnings.showwarning

    def apart(*warning: Any, **rest: Any) -> None:
        shown.clear()
        warn(*warning, **rest)

    try:
        warnings.showwarning = apart
        result = run(
            options.manifest, checkpoint, normalizer_name=options.normalizer, keep_marks=options.keep_marks,
            limit=options.limit, watch=shown, **asked,
        )  # fmt: skip
    finally:
        warnings.showwarning = warn
        shown.clear()
    for line in result.broken:
        fail(line)
    if options.output == "json":
        print_json(record(result))
    else:
        for line in summary(result):
            print(printable(line))
    sys.stdout.flush()
    if report is not None:
        write_report(result, report, {"manifest": options.manifest, "model": checkpoint.source, "options": asked})
    return int(bool(result.broken))


def _report(path: str | None) -> Path | None:
    """Checked before anything is heard. Raises UsageError."""
    if path is None:
        return None
    file = Path(path)
    if file.suffix.lower() not in (".md", ".html"):
        raise UsageError(f"--report {path}: ends in neither .md nor .html")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report {path}: its folder cannot be made ({error.strerror})") from None
    if file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--report {path}: cannot be written ({'a folder' if file.is_dir() else 'Permission denied'})")
    return file
