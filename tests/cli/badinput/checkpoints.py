"""Checkpoint folders with one fault each; the manifest matches the files unless it is the fault."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from multimodal.system.files import sha256

from .rows import Row, silent

WEIGHTS = Path("clip/model.safetensors")


def vouched(folder: Path) -> None:
    """A manifest that fits the files as they now are."""
    sums = {path.name: sha256(path) for path in folder.iterdir() if path.name != "manifest.json" and path.is_file()}
    (folder / "manifest.json").write_text(json.dumps({"sha256": {"model.safetensors": ""} | sums}))


def tensors(change: Callable[[dict, str], object]) -> Callable[[], None]:
    """`change(tensors, name)` of one of them."""

    def make() -> None:
        held = load_file(WEIGHTS)
        change(held, sorted(held)[3])
        save_file(held, WEIGHTS)
        vouched(WEIGHTS.parent)

    return make


def edited(name: str, edit: Callable[[str], str], folder: str = "clip") -> Callable[[], None]:
    """A text file of the folder after `edit`, with a manifest that fits."""

    def make() -> None:
        path = Path(folder, name)
        path.write_text(edit(path.read_text()))
        vouched(path.parent)

    return make


def pipe_as_weights() -> None:
    WEIGHTS.unlink()
    os.mkfifo(WEIGHTS)
    vouched(WEIGHTS.parent)


def flipped() -> None:
    data = bytearray(WEIGHTS.read_bytes())
    data[len(data) // 2] ^= 1
    WEIGHTS.write_bytes(data)


def fault(name: str, make: Callable[[], object], cause: str) -> Row:
    return Row(name, "info {copy:clip}", make, [re.compile(cause)], silent)


def lone_pipe() -> None:
    shutil.rmtree("clip")
    os.mkdir("clip")
    os.mkfifo("clip/only.safetensors")


ROWS = [
    fault("missing tensor", tensors(lambda held, name: held.pop(name)), r"model\.safetensors: tensor '.+' is missing"),
    fault("extra tensor", tensors(lambda held, _: held.update({"extra.weight": torch.ones(2)})),
          r"model\.safetensors: .*unexpected tensor 'extra.weight'"),
    fault("misshapen tensor", tensors(lambda held, name: held.update({name: torch.ones(3, 5)})),
          r"model\.safetensors: .*has shape \[3, 5\], not"),
    fault("not a number", tensors(lambda held, name: held[name].view(-1)[:1].fill_(float("nan"))),
          r"model\.safetensors: .*not finite"),
    fault("integers", tensors(lambda held, name: held.update({name: held[name].long()})),
          r"model\.safetensors: .*holds torch.int64, not"),
    fault("layers", edited("config.json", lambda text: text.replace('"layers": 2', '"layers": 1000000000000')),
          r"config\.json: layers: 1000000000000, more than"),
    fault("deep configuration", edited("config.json", lambda _: "[" * 100_000), r"config\.json.*read as JSON"),
    fault("list as configuration", edited("config.json", lambda _: "[1]"), r"config\.json.*expected a JSON object"),
    fault("flipped byte", flipped, r"model\.safetensors: sha256 differs"),
    fault("pipe as weights", pipe_as_weights, r"model\.safetensors: missing"),
    fault("lone pipe in a folder", lone_pipe, "not a regular file"),
    Row("lone pipe", "info pipe.safetensors", lambda: os.mkfifo("pipe.safetensors"),
        [re.compile("pipe.safetensors.*not a regular file")], silent),
    Row("near name", "info clip-vit-17", None, [re.compile("clip-vit-17.*near: ")], silent),
    Row("another kind", "classify red.png --labels a,b -m {asr}", None, [re.compile("expected a CLIP model")], silent),
]  # fmt: skip
