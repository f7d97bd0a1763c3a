"""`multimodal evaluate text`: perplexity and bits per byte of a language model."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import output_flags, print_figures
from multimodal.cli.parser import Help, Parser, count


def add_flags(p: Parser) -> None:
    p.usage, p.formatter_class = "%(prog)s FILE [FILE ...] --model MODEL [flags]", Help
    p.add_argument("data", nargs="+", metavar="FILE", help="text, plain or gzip; each file is scored separately")
    flags.model(p, None)
    p.add_argument("--documents", choices=["none", "lines", "blank"], default="none", help="unit of text. none: the "
                   "file; lines: each line; blank: each part between blank lines (default: none)")  # fmt: skip
    p.add_argument("--context", type=count, metavar="N", help="context length in tokens (default: as in training)")
    p.add_argument("--stride", type=count, metavar="N", help="step of the sliding window in tokens; a smaller "
                   "step gives each token more context (default: the context; half of it for a prefix LM)")  # fmt: skip
    output_flags(p)
    flags.compute(p)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.perplexity import evaluate_text
    from multimodal.weights.load import load

    checkpoint = load(options.model, options.architecture)
    checkpoint.model.to(options.device)
    return print_figures(options, checkpoint.source, lambda file: (
        evaluate_text(checkpoint, Path(file), options.context, options.stride, options.documents), []
    ))  # fmt: skip
