"""The kinds of `multimodal evaluate`."""

from argparse import Namespace
from importlib import import_module

# of each kind, its function and where it lives
HOMES = {"asr": "multimodal.commands_evaluate_asr"}


def evaluate(options: Namespace) -> int:
    return import_module(HOMES[options.kind]).evaluate(options)
