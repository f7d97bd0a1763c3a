"""The flags of `multimodal translate`."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from multimodal.cli import machine
from multimodal.cli.flags.transcribe import count, number

EXAMPLES = """examples:
  multimodal translate "A dog runs." --from en --to de --model translator
  multimodal translate --file news.txt --from German --to French -m m2m100_418M/ -o nouvelles.txt
  cat news.txt | multimodal translate - -m opus-mt-en-de/ --format jsonl
"""
BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl"}


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    p = commands.add_parser(
        "translate", help="translate texts with an encoder-decoder checkpoint", epilog=EXAMPLES,
        usage="%(prog)s TEXT [TEXT ...] [flags]", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("texts", nargs="*", metavar="TEXT", help="texts, or - for the lines of the standard input")
    p.add_argument("--file", metavar="FILE", help="a text a line (UTF-8)")
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="as the model's code, such as de, or by its "
                   "English name; not for a model of one direction")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE")
    p.add_argument("--output", "-o", metavar="FILE", help="default: the standard output")
    machine.overwrite(p)
    p.add_argument("--format", choices=["txt", "jsonl"], help="txt: a line a text, empty where one could not be "
                   "read; jsonl: with line, score, tokens, finished, cut (default: by the ending of --output, or "
                   "txt)")  # fmt: skip
    g = p.add_argument_group("translations")
    g.add_argument("--beam_size", type=count, default=5, metavar="N", help="1 takes the most probable token each time "
                   "(default: 5)")  # fmt: skip
    g.add_argument("--length_penalty", type=number, default=1.0, metavar="A", help="beams are ranked by "
                   "log-probability / tokens^A: 1 by the mean, 0 by the sum, as in transformers (default: "
                   "1)")  # fmt: skip
    g.add_argument("--max_tokens", type=count, metavar="N", help="a translation is cut there (default: twice the "
                   "source's tokens and 50)")  # fmt: skip
    g.add_argument("--on_long", choices=["cut", "error"], default="cut", help="what becomes of a text that is longer "
                   "than the model's context (default: cut, with a warning)")  # fmt: skip
    g = p.add_argument_group("model and machine")
    model(g, None)
    g.add_argument("--batch_size", type=count, default=32, metavar="N", help="texts side by side (default: 32)")
    machine.add(g, None, integers=True)
    p.set_defaults(check=partial(check, p))


def check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What the flags say together; a contradiction ends the program with one line and exit code 2."""
    if bool(options.texts) == (options.file is not None):
        p.error("TEXT, --file: name one of them" if options.texts else "names no text (TEXT, --file FILE, or -)")
    if "-" in options.texts and len(options.texts) > 1:
        p.error("-: stands alone, for the lines of the standard input")
    if options.format is None:
        suffix = "" if options.output is None else Path(options.output).suffix.lower()
        options.format = BY_SUFFIX.get(suffix, "txt")
