"""`multimodal evaluate text`: perplexity and bits per byte of a language model."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import SetFigures, output_flags, print_figures
from multimodal.cli.loading import loaded
from multimodal.cli.parser import Parser
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import PerplexityOptions

EXAMPLES = """examples:
  multimodal evaluate text book.txt --model gpt2 --stride 512
  multimodal evaluate text lines.txt.gz --model my-lm/ --documents lines --format json
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s FILE [FILE ...] --model MODEL [flags]", EXAMPLES
    p.add_argument("data", nargs="+", metavar="FILE", help="text, plain or gzip; each file is scored separately")
    flags.model(p, "generate")
    p.add_argument("--documents", choices=["none", "lines", "blank"], default="none", help="unit of text. none: the "
                   "file; lines: each line; blank: each part between blank lines (default: none)")  # fmt: skip
    add_option_flags(p, PerplexityOptions, defaults=True)
    output_flags(p)
    flags.compute(p)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.perplexity import evaluate_text

    checkpoint = loaded(options)
    checkpoint.model.to(options.device)
    return print_figures(options, checkpoint.source, lambda file: SetFigures(
        evaluate_text(checkpoint, Path(file), options.context, options.stride, options.documents)
    ))  # fmt: skip
