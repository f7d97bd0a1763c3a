"""`multimodal evaluate noise`: how often a Whisper model takes generated noise for no speech."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import SetFigures, output_flags, print_figures
from multimodal.cli.loading import loaded
from multimodal.cli.parser import Parser
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.evaluate.speech.options import NoiseOptions

EXAMPLES = """examples:
  multimodal evaluate noise --model whisper-tiny --windows 20
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s [flags]", EXAMPLES
    flags.model(p, "noise")
    add_option_flags(p, NoiseOptions, defaults=True)
    output_flags(p)
    flags.compute(p)
    p.set_defaults(data=["noise"])


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.speech.whisper_windows import evaluate_noise

    checkpoint = loaded(options, "transcribe")
    checkpoint.model.to(options.device)
    return print_figures(options, checkpoint.source, lambda _: SetFigures(evaluate_noise(checkpoint, options.windows)))
