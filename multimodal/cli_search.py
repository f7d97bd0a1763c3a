"""The flags of `multimodal index` and `multimodal search`."""

import argparse
from collections.abc import Callable


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
