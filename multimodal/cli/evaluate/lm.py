"""`multimodal evaluate lm`: perplexity and zero-shot tasks of a language model."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import SetFigures, output_flags, print_figures
from multimodal.cli.loading import loaded
from multimodal.cli.parser import Parser
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import PerplexityOptions

EXAMPLES = """examples:
  multimodal evaluate lm book.txt --model gpt2 --stride 512
  multimodal evaluate lm lines.txt.gz --model my-lm/ --documents lines --format json
  multimodal evaluate lm passages.txt --task last-word --model gpt2
  multimodal evaluate lm pronouns.jsonl --task winograd --model gpt2
A line for cloze or winograd: {"text": "The trophy does not fit in the bag as _ is too big.",
"choices": ["the trophy", "the bag"], "answer": 0}
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s FILE [FILE ...] [flags]", EXAMPLES
    p.add_argument("data", nargs="+", metavar="FILE", help="text, JSON lines or CSV, plain, gzip or Zstandard; each "
                   "file is scored separately")  # fmt: skip
    flags.model(p, "generate")
    add_option_flags(p, PerplexityOptions, defaults=True)
    output_flags(p)
    flags.compute(p)


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    for name in ("stride", "documents"):
        if options.task != "perplexity" and getattr(options, name) is not None:
            p.error(f"--{name}: is for --task perplexity (--task {options.task})")


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.perplexity import evaluate_text
    from multimodal.tasks.evaluate.text.continuations import TASKS

    checkpoint = loaded(options)
    checkpoint.model.to(options.device)

    def evaluate(file: str) -> SetFigures:
        figures: dict[str, Any]
        if options.task == "perplexity":
            figures = evaluate_text(
                checkpoint, Path(file), options.context, options.stride, options.documents or "none"
            )
        else:
            figures = TASKS[options.task](checkpoint, Path(file), options.context)
        return SetFigures(figures)

    return print_figures(options, checkpoint.source, evaluate)
