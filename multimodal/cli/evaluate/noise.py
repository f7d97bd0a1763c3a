"""`multimodal evaluate noise`: how often a Whisper model takes generated noise for no speech."""

from argparse import Namespace

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import output_flags, print_figures
from multimodal.cli.parser import Help, Parser, count


def add_flags(p: Parser) -> None:
    p.usage, p.formatter_class = "%(prog)s [flags]", Help
    flags.model(p, "whisper-mini")
    p.add_argument("--windows", type=count, default=100, metavar="N", help="windows of each kind: silence, white "
                   "noise, pink noise, tones, clicks (default: 100)")  # fmt: skip
    output_flags(p)
    flags.compute(p)
    p.set_defaults(data=["noise"])


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.speech.whisper_windows import evaluate_noise
    from multimodal.weights.load import load

    checkpoint = load(options.model, options.architecture)
    checkpoint.model.to(options.device)
    return print_figures(options, checkpoint.source, lambda _: (evaluate_noise(checkpoint, options.windows), []))
