"""The model that a command works with."""

from argparse import Namespace
from typing import TYPE_CHECKING

from multimodal.cli.console import console

if TYPE_CHECKING:
    from multimodal.weights.folder import Checkpoint


def loaded(options: Namespace, task: str | None = None) -> "Checkpoint":
    """The checkpoint of `--model`; see `choose_device`. `task`: see `load`."""
    from multimodal.weights.load import load  # slow: not for --help

    choose_device(options)
    return load(options.model, options.architecture, getattr(options, "preprocessing", None), task=task)


def choose_device(options: Namespace) -> None:
    """Put the device of `auto` in its place, and name it if it is a GPU."""
    if getattr(options, "device", None) != "auto":
        return
    import torch  # slow: not for --help

    from multimodal.inference.prepare import automatic_device

    options.device = str(automatic_device())
    if options.device != "cpu":
        console.note(f"device {options.device}: {torch.cuda.get_device_name()}")
