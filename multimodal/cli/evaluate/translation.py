"""`multimodal evaluate translation`: BLEU and chrF of a translator."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import output_flags, print_figures
from multimodal.cli.parser import Help, Parser, count, number


def add_flags(p: Parser) -> None:
    p.usage, p.formatter_class = "%(prog)s SOURCE --references FILE --model MODEL [flags]", Help
    p.add_argument("data", nargs=1, metavar="SOURCE", help="texts, one a line, plain or gzip")
    p.add_argument("--references", required=True, metavar="FILE", help="their translations, line by line")
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="code or English name; not for a model of one "
                   "direction")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE")
    flags.model(p, None)
    p.add_argument("--limit", type=count, metavar="N", help="only the first N lines")
    p.add_argument("--beam_size", type=count, default=5, metavar="N", help="1 is greedy (default: 5)")
    p.add_argument("--length_penalty", type=number, default=1.0, metavar="A", help="rank beams by log-probability / "
                   "tokens^A (default: 1)")  # fmt: skip
    output_flags(p)
    flags.compute(p)
    p.add_argument("--batch_size", type=count, default=32, metavar="N", help="texts side by side (default: 32)")


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.translation import evaluate_translation
    from multimodal.weights.load import load

    checkpoint = load(options.model, options.architecture)
    checkpoint.model.to(options.device)
    search = {name: getattr(options, name) for name in ("beam_size", "length_penalty", "batch_size")}
    return print_figures(options, checkpoint.source, lambda file: (evaluate_translation(
        checkpoint, Path(file), Path(options.references), options.source, options.target, options.limit, **search
    ), []))  # fmt: skip
