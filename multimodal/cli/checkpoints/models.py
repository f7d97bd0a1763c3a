"""`multimodal models`: list the shipped models, presets and readable formats."""

import textwrap
from argparse import Namespace
from collections.abc import Iterable

from multimodal.cli.parser import Parser
from multimodal.system.assets import shipped


def add_flags(p: Parser) -> None:
    pass


def run(_: Namespace) -> int:
    from multimodal.models.presets import PRESETS
    from multimodal.system.files import read_json
    from multimodal.weights.load import families

    print("shipped models")
    for name, folder in shipped().items():
        card = folder / "card.json"
        print(f"  {name:<20} {read_json(card).get('summary', '') if card.exists() else ''}".rstrip())
    if not shipped():
        print("  none in this installation")
    print("sizes of the papers (multimodal.models.presets)")
    print(_wrapped(PRESETS))
    print("formats that load and convert take")
    print(_wrapped(["multimodal", *families()]))
    return 0


def _wrapped(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
