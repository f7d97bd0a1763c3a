"""The flags of `multimodal classify`."""

import argparse
from collections.abc import Callable

from multimodal.cli_transcribe import count


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    p = commands.add_parser("classify", help="score labels for pictures, zero-shot")
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs")
    p.add_argument("--labels", nargs="+", metavar="LABEL", help="labels; one value with commas is split")
    p.add_argument("--labels_file", metavar="FILE", help="labels, one a line")
    p.add_argument("--templates", metavar="SET", help="clip80, clip7, none or a file; default: the model's own")
    p.add_argument("--format", choices=["table", "json", "csv"], default="table")
    p.add_argument("--top", type=count, metavar="N", help="labels a picture (default: 5 in the table, else all)")
    p.add_argument("--batch_size", type=count, default=32)
    model(p, "clip-vit-16")
