"""The flags of `multimodal index` and `multimodal search`."""

import argparse
from collections.abc import Callable
from functools import partial

from multimodal.cli_transcribe import count, number

KINDS = ("auto", "flat", "ivf", "hnsw")
COMPUTE_TYPES = ("auto", "float32", "bfloat16", "float16", "int8")


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    _index(commands.add_parser("index", help="make or renew a search index of pictures"), model)
    _search(commands.add_parser("search", help="find the pictures of an index by texts or by pictures"))


def _index(p: argparse.ArgumentParser, model: Callable) -> None:
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs")
    p.add_argument("--output", "-o", required=True, metavar="FOLDER",
                   help="of the index; in one that is there only what is new or has changed is renewed")  # fmt: skip
    p.add_argument("--kind", choices=KINDS, default="auto",
                   help="flat: exact; ivf: lists; hnsw: a graph (default: ivf above 200,000 pictures)")  # fmt: skip
    p.add_argument("--recall", type=_share, default=0.95, metavar="SHARE",
                   help="of the ten nearest, which ivf and hnsw are tuned to find (default: 0.95)")  # fmt: skip
    p.add_argument("--dtype", choices=["float16", "float32"], help="of the stored vectors (default: float16)")
    p.add_argument("--overwrite", action="store_true", help="begin anew")
    p.add_argument("--batch_size", type=count, default=32)
    p.add_argument("--workers", type=count, metavar="N", help="threads that decode pictures (default: one a core)")
    _speed(p)
    model(p, "clip-vit-16")


def _search(p: argparse.ArgumentParser) -> None:
    p.add_argument("queries", nargs="*", metavar="QUERY", help="a picture where there is such a file, else a text")
    p.add_argument("--image", nargs="+", action="extend", default=[], metavar="FILE", help="queries that are pictures")
    p.add_argument("--text", nargs="+", action="extend", default=[], metavar="TEXT", help="queries that are texts")
    p.add_argument("--index", required=True, metavar="FOLDER", help="made by multimodal index")
    p.add_argument("--top", type=count, default=10, metavar="N", help="pictures a query (default: 10)")
    p.add_argument("--exact", action="store_true", help="look at every picture (default: as the index is made)")
    p.add_argument("--format", choices=["table", "csv", "json", "jsonl"], default="table")
    _speed(p)
    p.add_argument("--model", "-m", metavar="MODEL", help="where it now is (default: as the index was made)")
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")
    p.set_defaults(check=partial(_check, p))


def _check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not (options.queries or options.image or options.text):
        p.error("QUERY: give a text or a picture")


def _speed(p: argparse.ArgumentParser) -> None:
    p.add_argument("--threads", type=count, metavar="N", help="processor threads (default: torch's own)")
    p.add_argument("--compute_type", choices=COMPUTE_TYPES, default="auto")
    p.add_argument("--device", default="cpu", metavar="NAME", help="such as cpu or cuda (default: cpu)")


def _share(text: str) -> float:
    if not 0 < (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a share above 0, at most 1")
    return value
