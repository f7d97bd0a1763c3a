"""The flags of `multimodal inspect` and `multimodal info`."""

import argparse
from collections.abc import Callable
from functools import partial

from multimodal.cli import machine
from multimodal.cli.flags.transcribe import count, number

WHAT = ("attention", "filters", "positions", "distance", "alignment", "induction")
WITHOUT_INPUT = ("filters", "positions", "induction")
EXAMPLES = """examples:
  multimodal inspect gpt2/ "The cat sat on the mat." --plot heads.png --layer 5
  multimodal inspect clip-vit-16 photo.jpg --plot where.png --layer all
  multimodal inspect clip-vit-16 --what filters --plot filters.png
  multimodal inspect whisper-mini talk.flac --what alignment --plot alignment.png
  multimodal inspect stories260K/ --what induction --format json
"""


def add(commands: argparse._SubParsersAction, preprocessing: Callable) -> None:
    """`preprocessing(parser)` adds the flag that says how pictures are read."""
    p = commands.add_parser(
        "inspect", help="look into a model: attention, filters, positions, alignment, induction heads", epilog=EXAMPLES,
        usage="%(prog)s MODEL [INPUT] [flags]", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _model(p, preprocessing)
    p.add_argument("input", nargs="?", metavar="INPUT", help="a text, or the file of a picture or a recording, by the "
                   f"model's kind; {', '.join(WITHOUT_INPUT)} need none")  # fmt: skip
    p.add_argument("--what", choices=WHAT, default="attention", help="attention: maps of each head; filters: principal "
                   "components of the patch embedding; positions: similarity of their embeddings; distance: how far "
                   "each head looks; alignment: where the decoder looks in its source; induction: prefix-matching "
                   "score of each head (default: attention)")  # fmt: skip
    p.add_argument("--plot", metavar="PNG", help="draw it")
    machine.overwrite(p)
    p.add_argument("--layer", type=_layer, metavar="N", help="from 0, or all (default: the last; of an alignment the "
                   "mean of all, or of the heads known to follow the speech)")  # fmt: skip
    p.add_argument("--head", type=_natural, metavar="N", help="from 0 (default: all)")
    p.add_argument("--answer", metavar="TEXT", help="what the decoder is to have said, for an alignment (default: what "
                   "it says by itself)")  # fmt: skip
    p.add_argument("--from", dest="source", metavar="LANGUAGE", help="of the input, for an alignment of a translator "
                   "or a multilingual Whisper")  # fmt: skip
    p.add_argument("--to", dest="target", metavar="LANGUAGE", help="of the answer, for a translator")
    p.add_argument("--length", type=count, metavar="N", help="tokens that induction says twice (default: 50)")
    p.add_argument("--format", choices=["table", "json"], help="of the numbers (default: table, none with --plot)")
    p.set_defaults(check=partial(check, p))


def add_info(commands: argparse._SubParsersAction, preprocessing: Callable) -> None:
    p = commands.add_parser(
        "info", help="show a model's configuration, parameters, operations, memory, licence and training data"
    )
    _model(p, preprocessing, ", or a paper's size (see multimodal models)")
    p.add_argument("--length", type=count, metavar="N", help="tokens of a text (default: the model's context)")
    p.add_argument("--batch", type=count, default=1, metavar="B", help="texts, pictures or recordings side by side, "
                   "for the memory of cache and training (default: 1)")  # fmt: skip
    p.add_argument("--seconds", type=number, metavar="S", help="of sound, where the model takes any length "
                   "(default: 10)")  # fmt: skip
    p.add_argument("--format", choices=["table", "json"], default="table")


def check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What the flags say together; a contradiction ends the program with one line and exit code 2."""
    what, others = options.what, {"answer": "alignment", "source": "alignment", "target": "alignment",
                                  "length": "induction"}  # fmt: skip
    flags = {"source": "from", "target": "to"}
    for name, needed in others.items():
        if getattr(options, name) is not None and what != needed:
            p.error(f"--{flags.get(name, name)}: is for --what {needed} (--what {what})")
    for name in ("layer", "head"):
        if getattr(options, name) is not None and what not in ("attention", "alignment"):
            p.error(f"--{name}: is for --what attention or alignment (--what {what})")
    if options.input is None and what not in WITHOUT_INPUT:
        p.error(f"--what {what}: needs INPUT, a text or the file of a picture or a recording")
    if options.input is not None and what in WITHOUT_INPUT:
        p.error(f"--what {what}: looks at weights alone, INPUT {options.input[:40]!r} would not be read")


def _model(p: argparse.ArgumentParser, preprocessing: Callable, more: str = "") -> None:
    p.add_argument("model", metavar="MODEL", help=f"shipped name, folder, .safetensors file or hf-hub:owner/name{more}")
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")
    preprocessing(p)


def _layer(text: str) -> int | str:
    return text if text == "all" else _natural(text)


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number of 0 or more")
    return int(text)
