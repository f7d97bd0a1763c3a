"""`multimodal evaluate translation`: BLEU and chrF of a translator."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import output_flags, print_figures
from multimodal.cli.parser import Help, Parser, count
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import TranslateOptions


def add_flags(p: Parser) -> None:
    p.usage, p.formatter_class = "%(prog)s SOURCE --references FILE --model MODEL [flags]", Help
    p.add_argument("data", nargs=1, metavar="SOURCE", help="texts, one per line, plain or gzip")
    p.add_argument("--references", required=True, metavar="FILE", help="reference translations, one per line")
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="code or English name; not for a model of one "
                   "direction")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE")
    flags.model(p, None)
    p.add_argument("--limit", type=count, metavar="N", help="only the first N lines")
    add_option_flags(p, TranslateOptions)
    output_flags(p)
    flags.compute(p)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.translation import evaluate_translation
    from multimodal.weights.load import load

    checkpoint = load(options.model, options.architecture)
    checkpoint.model.to(options.device)
    search = TranslateOptions.among(vars(options))
    return print_figures(options, checkpoint.source, lambda file: (evaluate_translation(
        checkpoint, Path(file), Path(options.references), options.source, options.target, options.limit, **search
    ), []))  # fmt: skip
