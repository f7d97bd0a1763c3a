"""The flags of `multimodal caption`."""

import argparse
from collections.abc import Callable

from multimodal.cli_transcribe import count


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    p = commands.add_parser("caption", help="describe pictures with a captioner checkpoint")
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs")
    p.add_argument("--format", choices=["table", "json", "csv"], default="table")
    p.add_argument("--beam_size", type=count, default=1)
    p.add_argument("--max_tokens", type=count, default=40)
    model(p, None)
