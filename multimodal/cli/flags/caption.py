"""The flags of `multimodal caption`. How captions are searched is only in the namespace where it was given, so that a
model's own defaults hold for the rest."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from multimodal.cli import machine
from multimodal.cli.flags.transcribe import count, number

EXAMPLES = """examples:
  multimodal caption photo.jpg --model captioner --beam_size 4
  multimodal caption photos/ --model captioner -o photos.csv                # call it again to go on after a stop
  multimodal caption photos/ --model captioner --format txt-per-image       # photos/a.txt beside photos/a.jpg
  multimodal caption photo.jpg --model captioner --top_p 0.9 --num_captions 5 --seed 1
"""
STYLES = ("table", "csv", "jsonl", "json", "txt-per-image")
BY_SUFFIX = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    p = commands.add_parser(
        "caption", help="describe pictures with a captioner checkpoint", usage="%(prog)s IMAGE [IMAGE ...] [flags]",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs")
    _output(p.add_argument_group("results"))
    decoding(p.add_argument_group("captions (defaults: as the model's card has them, else as said)"))
    g = p.add_argument_group("model and machine")
    model(g, None)
    machine.add(g, 16, integers=True)
    p.set_defaults(check=partial(check, p))


def _output(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--format", choices=STYLES, help="default: table, or by the ending of --output (.csv, .jsonl); "
                   "txt-per-image: NAME.txt with a caption a line, beside the picture or in the folder "
                   "--output")  # fmt: skip
    g.add_argument("--output", "-o", metavar="FILE|FOLDER", help="append the captions of each picture to a .csv or "
                   ".jsonl file as they come; a second call with the same settings leaves out what is there. "
                   "FILE.settings.json beside it says what it was made with")  # fmt: skip
    g.add_argument("--overwrite", action="store_true", help="start --output over, write texts that are there again")
    g.add_argument("--regions", metavar="DIR", help="also draw NAME.regions.png: where the model looked for each word "
                   "of the caption")  # fmt: skip


def decoding(g: argparse._ArgumentGroup) -> None:
    def flag(name: str, kind: Callable, text: str, metavar: str) -> None:
        g.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text, metavar=metavar)

    flag("beam_size", count, "1 takes the most probable token each time (default: 1)", "N")
    flag("max_tokens", count, "a caption is cut there, and flagged as not finished (default: 40)", "N")
    flag("min_tokens", natural, "no end before so many (default: 0)", "N")
    flag("length_penalty", number, "beams are ranked by log-probability / tokens^A: 1 by the mean, 0 by the sum, as in "
         "transformers (default: 1)", "A")  # fmt: skip
    flag("no_repeat_ngram", natural, "no N tokens twice in the same order (default: 0, may be)", "N")
    flag("repetition_penalty", number, "above 1: tokens that are there become less probable (default: 1)", "X")
    flag("temperature", number, "above 0: draw, with logits / T (default: 0, or 1 with --top_p or --top_k)", "T")
    flag("top_p", number, "draw from the most probable tokens that together have this probability", "P")
    flag("top_k", natural, "draw from the K most probable tokens", "K")
    flag("seed", natural, "of the draws, the same for each picture (default: 0)", "N")
    flag("num_captions", count, "the N best of the beam, or N draws; equal ones become one, and are counted", "N")
    flag("prompt", str, "text that each caption begins with", "TEXT")


def natural(text: str) -> int:
    try:
        return count(text) if text.strip() != "0" else 0
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number of 0 or more") from None


def check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What the flags say together; a contradiction ends the program with one line and exit code 2."""
    if options.output is None:
        options.format = options.format or "table"
    elif options.format is None:
        options.format = BY_SUFFIX.get(Path(options.output).suffix.lower())
    if options.output is not None and options.format not in ("csv", "jsonl", "txt-per-image"):
        p.error(f"--output {options.output}: results are appended to csv or jsonl, or written as txt-per-image "
                f"(--format {options.format or 'csv'})")  # fmt: skip
    if options.overwrite and options.output is None and options.format != "txt-per-image":
        p.error("--overwrite: names no file (--output)")
