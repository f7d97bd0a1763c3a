"""`multimodal models`: list shipped and public models, presets and readable formats; show or clear the cache."""

import textwrap
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from multimodal.cli import flags
from multimodal.cli.output import print_json, printable
from multimodal.cli.parser import Parser

EXAMPLES = """examples:
  multimodal models                              # what ships, and good public models
  multimodal models --cached
  multimodal models --delete whisper-small
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    g = p.add_mutually_exclusive_group()
    g.add_argument("--cached", action="store_true", help="list the models in the hub's cache")
    g.add_argument("--delete", nargs="+", metavar="NAME", help="delete models from the hub's cache")
    flags.results(p, "table", "json")


def run(options: Namespace) -> int:
    if options.delete:
        return _delete(options.delete)
    records = _cached() if options.cached else _known()
    if options.format == "json":
        print_json(records)
    else:
        (_print_cached if options.cached else _print_known)(records)
    return 0


def _known() -> dict[str, Any]:
    from multimodal.weights.hub.listing import list_models  # slow: not for --help

    return list_models()


def _print_known(records: dict[str, Any]) -> None:
    print("shipped models")
    for name, summary in records["shipped"].items():
        print(f"  {name:<24} {summary}".rstrip())
    if not records["shipped"]:
        print("  none in this installation")
    print("public models (multimodal download NAME; the first use downloads, too)")
    task = ""
    for model in records["public"]:
        if model["task"] != task:
            task = model["task"]
            print(f" {task}")
        figure = f"; {model['figure']}" if model["figure"] else ""
        print(f"  {model['name']:<24} {model['parameters']:>6}  {model['licence']:<12}  {model['about']}{figure}")
        print(f"  {'':<24} {model['repository']}")
    print("sizes of the papers, without weights (multimodal.models.presets)")
    print(_wrapped(records["sizes"]))
    print("formats that load and convert take")
    print(_wrapped(records["formats"]))


def _cached() -> list[dict[str, Any]]:
    from multimodal.weights.hub.download import cached

    return [item._asdict() for item in cached()]


def _print_cached(records: list[dict[str, Any]]) -> None:
    from multimodal.cli.checkpoints.download import megabytes

    for item in records:
        stopped = "" if item["complete"] else "  interrupted: multimodal download goes on"
        print(printable(f"{item['repository']:<48} {megabytes(item['size']):>12}{stopped}"))
    if not records:
        print("no models in the cache")


def _delete(names: list[str]) -> int:
    from multimodal.cli.checkpoints.download import megabytes
    from multimodal.weights.hub.download import delete

    for name in names:
        item = delete(name)
        print(printable(f"{item.repository}: deleted, {megabytes(item.size)} freed"))
    return 0


def _wrapped(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
