"""The flags of `multimodal generate`. How a text is searched is only in the namespace where it was given."""

import argparse
from collections.abc import Callable
from functools import partial

from multimodal.cli import machine
from multimodal.cli.flags.caption import natural
from multimodal.cli.flags.transcribe import boolean, count, number

EXAMPLES = """examples:
  multimodal generate --model stories260K --prompt "" --temperature 0
  multimodal generate "Once upon a time" -m gpt2/ --top_p 0.9 --num_return 3 --seed 1
  multimodal generate --file prompts.txt -m t5-small/ --beam_size 4 --format json
  multimodal generate "a dull film" -m gpt2/ --examples films.tsv --choices good bad
An example stands before the prompt as "Input: …", a line "Output: …" and an empty line, and the prompt as "Input: …"
and a line "Output:"; the answer then ends at an empty line.
"""
# what --choices has no part for
SEARCH = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram",
          "beam_size", "num_return", "seed", "stop")  # fmt: skip


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    p = commands.add_parser(
        "generate", help="continue a text, or answer it, with a language model checkpoint", epilog=EXAMPLES,
        usage="%(prog)s (TEXT [TEXT ...] | --prompt TEXT | --file FILE) --model MODEL [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("texts", nargs="*", metavar="TEXT", help="prompts, or - for the lines of the standard input")
    p.add_argument("--prompt", metavar="TEXT", help="the same for one; it may be empty")
    p.add_argument("--file", metavar="FILE", help="a prompt a line (UTF-8; - for the standard input)")
    p.add_argument("--examples", metavar="FILE", help='.jsonl with "input" and "output", or .tsv of two columns: pairs '
                   "that stand before each prompt, the first ones where not all fit")  # fmt: skip
    p.add_argument("--choices", nargs="+", metavar="TEXT", help="the answer is the one of these with the highest "
                   "score, its log-probability / tokens^length_penalty")  # fmt: skip
    p.add_argument("--format", choices=["text", "json"], default="text", help="text: the continuations alone; of "
                   "several one a line, with line breaks as \\n")  # fmt: skip
    p.add_argument("--stream", type=boolean, nargs="?", const=True, metavar="BOOL", help="print tokens as they come "
                   "(default: for one text on a terminal)")  # fmt: skip
    _decoding(p.add_argument_group("text"))
    g = p.add_argument_group("model and machine")
    model(g, None)
    g.add_argument("--batch_size", type=count, default=8, metavar="N", help="prompts side by side (default: 8)")
    machine.add(g, None, integers=True)
    p.set_defaults(check=partial(_check, p))


def _decoding(g: argparse._ArgumentGroup) -> None:
    def flag(name: str, kind: Callable, text: str, metavar: str, **more: object) -> None:
        g.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text, metavar=metavar, **more)

    flag("max_tokens", count, "a text ends there (default: 100)", "N")
    flag("min_tokens", natural, "no end before so many (default: 0)", "N")
    flag("temperature", number, "above 0: draw, with logits / T (default: 0, or 1 with --top_k, --top_p, --min_p)", "T")
    flag("top_k", natural, "draw from the K most probable tokens", "K")
    flag("top_p", number, "draw from the most probable tokens that together have this probability", "P")
    flag("min_p", number, "draw from the tokens with this share of the most probable one's probability", "P")
    flag("seed", natural, "of the draws, the same for each prompt (default: 0)", "N")
    flag("repetition_penalty", number, "above 1: tokens that are there become less probable (default: 1)", "X")
    flag("no_repeat_ngram", natural, "no N tokens twice in the same order (default: 0, may be)", "N")
    flag("beam_size", count, "search with so many beams (default: 1, the most probable token each time)", "N")
    flag("length_penalty", number, "rank by log-probability / tokens^A: 1 by the mean, 0 by the sum (default: 1)", "A")
    flag("num_return", count, "the N best of the beam, or N draws (default: 1)", "N")
    flag("stop", str, "a text ends before any of these", "TEXT", nargs="+")
    g.add_argument("--on_long", choices=["error", "cut"], default=argparse.SUPPRESS, help="a prompt beyond the context "
                   "is refused, or cut from the left (default: error; a model without a table of positions, as Llama, "
                   "reads on instead, with a warning)")  # fmt: skip


def _check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What the flags say together; a contradiction ends the program with one line and exit code 2."""
    if sum([bool(options.texts), options.prompt is not None, options.file is not None]) != 1:
        p.error("give one of TEXT, --prompt and --file")
    if "-" in options.texts and len(options.texts) > 1:
        p.error("-: stands alone, for the lines of the standard input")
    if options.choices and (given := [name for name in SEARCH if name in options]):
        p.error(f"--{given[0]}: has no part in a choice of --choices")
    several = len(options.texts) > 1 or options.texts == ["-"] or options.file is not None
    if options.stream and (several or options.choices or options.format == "json"):
        p.error("--stream: is for the text of one prompt (not for several, --choices or --format json)")
