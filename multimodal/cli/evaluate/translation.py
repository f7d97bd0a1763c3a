"""`multimodal evaluate translation`: BLEU and chrF of a translator."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import SetFigures, output_flags, print_figures
from multimodal.cli.loading import loaded
from multimodal.cli.parser import Parser
from multimodal.data.options import FirstOptions
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.text.options import TranslateOptions

EXAMPLES = """examples:
  multimodal evaluate translation test.en --references test.de --model opus-mt-en-de
  multimodal evaluate translation test.en --references test.fr --from en --to fr --model m2m100-418m
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s SOURCE --references FILE [flags]", EXAMPLES
    p.add_argument("data", nargs=1, metavar="SOURCE", help="texts, one per line, plain, gzip or Zstandard")
    p.add_argument("--references", required=True, metavar="FILE", help="reference translations, one per line")
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="code or English name; not for a model of one "
                   "direction")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE")
    flags.model(p, "translate")
    add_option_flags(p, FirstOptions, defaults=True)
    add_option_flags(p, TranslateOptions)
    output_flags(p)
    flags.compute(p)


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.text.translation import evaluate_translation

    checkpoint = loaded(options, "translate")
    checkpoint.model.to(options.device)
    search = TranslateOptions.among(vars(options))
    return print_figures(options, checkpoint.source, lambda file: SetFigures(evaluate_translation(
        checkpoint, Path(file), Path(options.references), options.source, options.target, options.limit, **search
    )))  # fmt: skip
