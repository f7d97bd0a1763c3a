"""The flags of `multimodal index` and `multimodal search`."""

import argparse
from collections.abc import Callable
from functools import partial

from multimodal.cli import machine
from multimodal.cli.flags.transcribe import count, number

INDEX_EXAMPLES = """examples:
  multimodal index photos/ -o photos.index        # call it again: only new and changed pictures are read
"""
SEARCH_EXAMPLES = """examples:
  multimodal search "two dogs on a beach" --index photos.index
  multimodal search holiday.jpg --index photos.index --top 5 --format csv
"""
KINDS = ("auto", "flat", "ivf", "hnsw")


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    _index(commands.add_parser("index", help="make or renew a search index of pictures",
                               usage="%(prog)s IMAGE [IMAGE ...] --output FOLDER [flags]", epilog=INDEX_EXAMPLES,
                               formatter_class=argparse.RawDescriptionHelpFormatter), model)  # fmt: skip
    _search(commands.add_parser("search", help="find the pictures of an index by texts or by pictures",
                                usage="%(prog)s QUERY [QUERY ...] --index FOLDER [flags]", epilog=SEARCH_EXAMPLES,
                                formatter_class=argparse.RawDescriptionHelpFormatter))  # fmt: skip


def _index(p: argparse.ArgumentParser, model: Callable) -> None:
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs")
    p.add_argument("--output", "-o", required=True, metavar="FOLDER",
                   help="of the index; in one that is there only what is new or has changed is renewed")  # fmt: skip
    p.add_argument("--kind", choices=KINDS, default="auto",
                   help="flat: exact; ivf: lists; hnsw: a graph (default: ivf above 200,000 pictures)")  # fmt: skip
    p.add_argument("--recall", type=_share, default=0.95, metavar="SHARE",
                   help="of the ten nearest, which ivf and hnsw are tuned to find (default: 0.95)")  # fmt: skip
    p.add_argument("--dtype", choices=["float16", "float32"], help="of the stored vectors (default: float16)")
    p.add_argument("--overwrite", action="store_true", help="start over")
    g = p.add_argument_group("model and machine")
    model(g, "clip-vit-16")
    machine.add(g, 32)


def _search(p: argparse.ArgumentParser) -> None:
    p.add_argument("queries", nargs="*", metavar="QUERY", help="a picture where there is such a file, else a text")
    p.add_argument("--image", nargs="+", action="extend", default=[], metavar="FILE", help="queries that are pictures")
    p.add_argument("--text", nargs="+", action="extend", default=[], metavar="TEXT", help="queries that are texts")
    p.add_argument("--index", required=True, metavar="FOLDER", help="made by multimodal index")
    p.add_argument("--top", type=count, default=10, metavar="N", help="pictures a query (default: 10)")
    p.add_argument("--exact", action="store_true", help="look at every picture (default: as the index is made)")
    p.add_argument("--format", choices=["table", "csv", "json", "jsonl"], default="table")
    g = p.add_argument_group("model and machine")
    g.add_argument("--model", "-m", metavar="MODEL", help="where it now is (default: as the index was made)")
    g.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")
    machine.add(g, None)
    p.set_defaults(check=partial(_check, p))


def _check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not (options.queries or options.image or options.text):
        p.error("QUERY: give a text or a picture")


def _share(text: str) -> float:
    if not 0 < (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a share above 0, at most 1")
    return value
