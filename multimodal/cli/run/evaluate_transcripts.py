"""What `multimodal evaluate asr` does with its flags."""

import sys
import warnings
from argparse import Namespace
from typing import Any

from multimodal.cli.output import fail, printable
from multimodal.cli.run.transcribe import api_options
from multimodal.cli.shared import Progress, output_file, outputs_of, print_json, trust
from multimodal.tasks.evaluate.transcript_report import record, summary, write_report
from multimodal.tasks.evaluate.transcripts import evaluate as run
from multimodal.weights.load import load

OWN = ("command", "kind", "manifest", "report", "normalizer", "keep_marks", "limit", "output", "overwrite",
       "trust_paths", "remote")  # fmt: skip


def evaluate(options: Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name not in OWN}
    if given.get("threads"):
        import torch

        torch.set_num_threads(given["threads"])
    report = output_file(options.report, "--report", (".md", ".html"), outputs_of(options))
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
            limit=options.limit, trust=trust(options), watch=shown, **asked,
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
