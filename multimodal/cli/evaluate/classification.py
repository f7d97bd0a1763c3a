"""`multimodal evaluate classification`: accuracy of a classifier of images, texts or tables."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import SetFigures, output_flags, print_figures
from multimodal.cli.files import trust
from multimodal.cli.loading import loaded
from multimodal.cli.parser import Parser
from multimodal.data.options import SubsetOptions
from multimodal.inference.options import BatchOptions
from multimodal.system.options import add_flags as add_option_flags

EXAMPLES = """examples:
  multimodal evaluate classification flowers/ --model my-vit/
  multimodal evaluate classification reviews.tsv --model my-bert/ --columns text stars --format json
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s DATA [DATA ...] --model MODEL [flags]", EXAMPLES
    p.add_argument("data", nargs="+", metavar="DATA", help="for a ViT: a folder with a folder per class, "
                   "tars or a list; for a text classifier: .tsv, .csv or .jsonl; for a tabular model: "
                   ".csv")  # fmt: skip
    flags.image_model(p, "classification")
    p.add_argument("--columns", nargs="+", metavar="NAME", help="columns of path (images) or text, and of label, "
                   "in a list (default: usual names, else a TSV's first and last of texts); for a tabular model: all "
                   "columns of a .csv without a header")  # fmt: skip
    add_option_flags(p, SubsetOptions, defaults=True)
    flags.lists(p)
    output_flags(p)
    flags.compute(p)
    add_option_flags(p, BatchOptions, ["batch_size"], defaults=True)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.class_scores import ClassScores
    from multimodal.tasks.evaluate.classification import ImageItems, evaluate_classifier
    from multimodal.tasks.evaluate.reports.images import class_record
    from multimodal.tasks.evaluate.reports.mistakes import image_mistakes, text_mistakes

    checkpoint = loaded(options)
    checkpoint.model.to(options.device)

    def evaluate(data: str) -> SetFigures:
        scores, items, broken = evaluate_classifier(
            checkpoint, data, options.limit, options.columns, options.batch_size, trust(options)
        )
        if not isinstance(scores, ClassScores):
            return SetFigures(scores)
        images = isinstance(items, ImageItems)
        examples = image_mistakes(scores, *items) if images else text_mistakes(scores, items)
        return SetFigures(class_record(scores), broken, examples)

    return print_figures(options, checkpoint.source, evaluate)
