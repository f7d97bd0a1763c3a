"""The flags of `multimodal fill-mask` and `multimodal embed`."""

import argparse
from collections.abc import Callable
from functools import partial

from multimodal.cli import machine
from multimodal.cli.flags.transcribe import count

FILL_EXAMPLES = """examples:
  multimodal fill-mask "the capital of France is [MASK]." --model hf-hub:distilbert/distilbert-base-uncased
"""
EMBED_EXAMPLES = """examples:
  multimodal embed "a text" "another text" --model hf-hub:sentence-transformers/all-MiniLM-L6-v2
  multimodal embed --file texts.txt -o vectors.npy --model bert/    # a text a line, a row of the array a line
"""
POOLINGS = ["mean", "cls", "last", "pooler"]


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    shape = argparse.RawDescriptionHelpFormatter
    _fill_mask(commands.add_parser("fill-mask", help="guess the masked words of a text", epilog=FILL_EXAMPLES,
                                   usage="%(prog)s TEXT [TEXT ...] --model MODEL [flags]", formatter_class=shape),
               model)  # fmt: skip
    _embed(commands.add_parser("embed", help="vectors of texts", epilog=EMBED_EXAMPLES, formatter_class=shape,
                               usage="%(prog)s (TEXT [TEXT ...] | --file FILE) --model MODEL [flags]"),
           model)  # fmt: skip


def _fill_mask(p: argparse.ArgumentParser, model: Callable) -> None:
    p.add_argument("texts", nargs="+", metavar="TEXT", help="with the mask as the model's vocabulary writes it: "
                   "[MASK], <mask>")  # fmt: skip
    p.add_argument("--top_k", type=count, default=5, metavar="K", help="guesses a mask (default: 5)")
    p.add_argument("--format", choices=["table", "json"], default="table")
    g = p.add_argument_group("model and machine")
    model(g, None)
    machine.add(g, None)


def _embed(p: argparse.ArgumentParser, model: Callable) -> None:
    p.add_argument("texts", nargs="*", metavar="TEXT", help="texts, or - for the lines of the standard input")
    p.add_argument("--file", metavar="FILE", help="a text a line (UTF-8; - for the standard input)")
    p.add_argument("--output", "-o", metavar="FILE", help=".npy: a row a text, NaN for one that is broken; .jsonl or "
                   ".csv: its line, text and vector (default: JSON lines to the terminal)")  # fmt: skip
    machine.overwrite(p)
    p.add_argument("--pooling", choices=POOLINGS, help="mean: of all tokens, the control tokens too; cls: the first; "
                   "last; pooler: BERT's, on the first (default: the model's own, else last of a causal model, mean of "
                   "others)")  # fmt: skip
    p.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="to length 1 (default: the model's own)")
    g = p.add_argument_group("model and machine")
    model(g, None)
    machine.add(g, None)
    g.add_argument("--batch_tokens", type=count, metavar="N", help="side by side (default: 1024, on a GPU 16384)")
    p.set_defaults(check=partial(_check, p))


def _check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if bool(options.texts) == (options.file is not None):
        p.error("give either TEXT or --file")
    if "-" in options.texts and len(options.texts) > 1:
        p.error("-: stands alone, for the lines of the standard input")
