"""`multimodal validate`: decode every item of training data and list what is broken."""

import os
from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.files import columns, trust
from multimodal.cli.output import print_record
from multimodal.cli.parser import Parser
from multimodal.data.options import ValidateOptions
from multimodal.system.options import add_flags as add_option_flags

EXAMPLES = """examples:
  multimodal validate photos/                    # a folder per class
  multimodal validate own/metadata.csv --text_column sentence --format json
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    p.add_argument("data", nargs="+", metavar="DATA", help="folder with a folder per class, WebDataset tars (or their "
                   "URLs), .csv, .tsv or .jsonl")  # fmt: skip
    add_option_flags(p, ValidateOptions, defaults=True)
    flags.results(p, "table", "json")
    p.add_argument("--classes", metavar="FILE", help="table of the known labels (default: classes.jsonl beside DATA)")
    flags.lists(p, "path", "text", "label")


check = flags.check_columns


def run(options: Namespace) -> int:
    from multimodal.data.datasets.class_names import class_names
    from multimodal.data.sources import open_source
    from multimodal.data.validate import summary, validate

    workers = options.workers or min(8, len(os.sched_getaffinity(0)))
    reports = []
    for data in options.data:
        labels = class_names([Path(options.classes)] if options.classes else [], [data])
        source = open_source(data, columns=columns(options), trust=trust(options))
        reports.append((data, validate(source, options.kind, workers, labels, Progress(data))))
    lines = (line for data, report in reports for line in summary(data, report))
    print_record(options.format, [report.to_dict(data) for data, report in reports], lines)
    return int(any(report.broken for _, report in reports))
