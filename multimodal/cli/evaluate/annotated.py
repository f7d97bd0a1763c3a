"""`multimodal evaluate tagging`, `qa` and `choice`: figures of models with a head on annotated texts."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import SetFigures, output_flags, print_figures
from multimodal.cli.loading import loaded
from multimodal.cli.parser import Parser
from multimodal.data.options import SubsetOptions
from multimodal.system.options import add_flags as add_option_flags

EXAMPLES = """examples:
  multimodal evaluate tagging test.conll --model my-tagger/    # word and tag in columns, or .jsonl: tokens, tags
  multimodal evaluate qa dev-v2.0.json --model my-reader/      # or .jsonl: question, context, answers
  multimodal evaluate choice test.jsonl --model my-chooser/    # question, choices, label
"""
TASKS = {"tagging": "tag", "qa": "answer", "choice": "answer"}  # whose default model answers


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s FILE [FILE ...] --model MODEL [flags]", EXAMPLES
    p.add_argument("data", nargs="+", metavar="FILE", help="annotated texts, plain, gzip or Zstandard")
    flags.model(p, "tag", lambda options: TASKS[options.kind])
    add_option_flags(p, SubsetOptions, defaults=True)
    output_flags(p)
    flags.compute(p)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.text import annotated

    checkpoint = loaded(options, TASKS[options.kind])
    checkpoint.model.to(options.device)
    evaluate = {"tagging": annotated.evaluate_tagging, "qa": annotated.evaluate_questions,
                "choice": annotated.evaluate_choices}[options.kind]  # fmt: skip
    return print_figures(
        options, checkpoint.source, lambda file: SetFigures(evaluate(checkpoint, Path(file), options.limit))
    )
