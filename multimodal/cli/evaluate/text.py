"""`multimodal evaluate text`: perplexity and bits per byte of a language model."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import output_flags, print_figures
from multimodal.cli.parser import Help, Parser, count


def add_flags(p: Parser) -> None:
    p.usage, p.formatter_class = "%(prog)s FILE [FILE ...] --model MODEL [flags]", Help
    p.add_argument("data", nargs="+", metavar="FILE", help="text, plain or gzip; each file is scored on its own")
    flags.model(p, None)
    p.add_argument("--documents", choices=["none", "lines", "blank"], default="none", help="none: a file is one text; "
                   "lines, blank: each line, or each part between blank lines, is a text (default: none)")  # fmt: skip
    p.add_argument("--context", type=count, metavar="N", help="tokens of a window (default: those of training)")
    p.add_argument("--stride", type=count, metavar="N", help="tokens by which windows move; fewer than the context "
                   "give each token more context (default: the context; half of it for a prefix LM)")  # fmt: skip
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
