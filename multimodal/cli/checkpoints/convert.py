"""`multimodal convert`: bring a .pt checkpoint over, or export to foreign names."""

from argparse import Namespace
from pathlib import Path

from multimodal.cli import flags
from multimodal.cli.parser import Parser
from multimodal.errors import UsageError


def add_flags(p: Parser) -> None:
    p.add_argument("source", metavar="SRC")
    p.add_argument("target", metavar="DST", help="a new folder; with --to a new .safetensors file")
    flags.architecture(p)
    flags.preprocessing(p)
    p.add_argument("--config", metavar="FILE", help="the foreign configuration (JSON)")
    p.add_argument("--to", metavar="FORMAT", help="write under this family's names")
    p.add_argument("--half", action="store_true", help="store half precision")


def run(options: Namespace) -> int:
    import torch

    from multimodal.weights.convert import convert

    config = Path(options.config) if options.config else None
    dtype = torch.float16 if options.half else None
    try:
        made = convert(
            options.source, Path(options.target), options.architecture, options.to, config, dtype, options.preprocessing
        )
    except OSError as error:
        raise UsageError(f"{error.filename or options.target}: cannot be used ({error.strerror or error})") from None
    print(f"{options.target}: {made.kind}, {sum(p.numel() for p in made.model.parameters()):,} parameters")
    return 0
