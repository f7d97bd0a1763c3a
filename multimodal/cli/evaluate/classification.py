"""`multimodal evaluate classification`: accuracy of a classifier of images, texts or tables."""

from argparse import Namespace
from typing import Any

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import output_flags, print_figures
from multimodal.cli.files import trust
from multimodal.cli.parser import Help, Parser, count
from multimodal.inference.options import BatchOptions
from multimodal.system.options import add_flags as add_option_flags


def add_flags(p: Parser) -> None:
    p.usage, p.formatter_class = "%(prog)s DATA [DATA ...] --model MODEL [flags]", Help
    p.add_argument("data", nargs="+", metavar="DATA", help="for a ViT: a folder with a folder per class, "
                   "tars or a list; for a text classifier: .tsv; for a tabular model: .csv")  # fmt: skip
    flags.image_model(p, None)
    p.add_argument("--columns", nargs=2, metavar="NAME", help="columns of text and label (default: GLUE's, else the "
                   "first and the last)")  # fmt: skip
    p.add_argument("--limit", type=count, metavar="N", help="only N items, evenly spread over each DATA")
    flags.lists(p)
    output_flags(p)
    flags.compute(p)
    add_option_flags(p, BatchOptions, ["batch_size"], defaults=True)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.classification import evaluate_classifier
    from multimodal.tasks.evaluate.reports.images import class_record
    from multimodal.weights.load import load

    checkpoint = load(options.model, options.architecture, options.preprocessing)
    checkpoint.model.to(options.device)

    def evaluate(data: str) -> tuple[dict[str, Any], list[str]]:
        columns = tuple(options.columns) if options.columns else None
        scores, broken = evaluate_classifier(
            checkpoint, data, options.limit, columns, options.batch_size, trust(options)
        )
        return (scores if isinstance(scores, dict) else class_record(scores)), broken

    return print_figures(options, checkpoint.source, evaluate)
