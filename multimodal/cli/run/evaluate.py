"""The kinds of `multimodal evaluate`."""

from argparse import Namespace
from importlib import import_module

PICTURES = "multimodal.cli.run.evaluate_images"
# of each kind, the module and its function
HOMES = {
    "asr": ("multimodal.cli.run.evaluate_transcripts", "evaluate"),
    "captions": ("multimodal.cli.run.evaluate_captions", "evaluate"),
    "zeroshot": (PICTURES, "zeroshot"),
    "retrieval": (PICTURES, "retrieval"),
    "linear-probe": (PICTURES, "linear_probe"),
    "few-shot": (PICTURES, "few_shot"),
}


def evaluate(options: Namespace) -> int:
    module, function = HOMES[options.kind]
    return getattr(import_module(module), function)(options)
