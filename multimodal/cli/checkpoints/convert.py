"""`multimodal convert`: bring a .pt checkpoint over, or export to foreign names."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.parser import Parser
from multimodal.errors import UsageError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.weights.files.store_options import StoreOptions

EXAMPLES = """examples:
  multimodal convert ViT-B-32.pt clip/                           # pickled weights into a folder of ours
  multimodal convert my-bert/ bert.safetensors --format bert     # under another family's names
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    p.add_argument("source", metavar="SRC")
    p.add_argument("target", metavar="DST", help="a new folder; with --format a new .safetensors file")
    flags.architecture(p)
    flags.preprocessing(p)
    p.add_argument("--config", metavar="FILE", help="the foreign configuration (JSON)")
    p.add_argument("--format", dest="to", metavar="FORMAT", help="write under this family's names")
    add_option_flags(p, StoreOptions)


def run(options: Namespace) -> int:
    from multimodal.weights.convert import convert

    config = Path(options.config) if options.config else None
    try:
        made = convert(
            options.source, Path(options.target), options.architecture, options.to, config,
            preprocessing=options.preprocessing, **StoreOptions.among(vars(options)),
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"{error.filename or options.target}: cannot be used ({error.strerror or error})") from None
    print(f"{options.target}: {made.kind}, {sum(p.numel() for p in made.model.parameters()):,} parameters")
    return 0
