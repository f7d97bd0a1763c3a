"""Flags that several commands share: the model, the machine, lists of data, output files."""

import argparse
import os
from collections.abc import Callable, Collection
from pathlib import Path

from multimodal.cli.parser import Parser, count
from multimodal.inference.options import BatchOptions, MachineOptions
from multimodal.system.assets import DEFAULT_MODELS
from multimodal.system.options import OptionSet, add_flags
from multimodal.tokens.video.options import ClipOptions, VideoOptions

LEARNED = "learned"
STRUCTURED = ("csv", "tsv", "json", "jsonl", "html", "npy", "xlsx", "parquet")  # endings that programs read by
MODEL = "name (multimodal models lists them), folder, .safetensors or .gguf file, or hub repository OWNER/NAME"


class Format(argparse._StoreAction):
    """The flag `--format` of a command that prints its results, or writes them to `--output`. `default_of`: the
    format on stdout."""

    default_of: str | None

    def settle(self, p: Parser, options: argparse.Namespace) -> None:
        """The format is the one given, else by the ending of `--output`, else the default."""
        if options.output in self.choices:
            p.error(f"--output {options.output}: names the file to write (--format {options.output} for the format)")
        if options.format is None:
            ending = (options.output or "").rpartition(".")[2].lower()
            if ending in STRUCTURED and ending not in self.choices:
                p.error(f"--output {options.output}: this command writes {', '.join(self.choices)}, not {ending}")
            default = self.default_of if options.output is None else self.choices[0]
            options.format = ending if ending in self.choices else default
        check_ending(p, options)


def check_ending(p: Parser, options: argparse.Namespace) -> None:
    """Refuse another format in a file than its ending says; JSON lines may be in a .json."""
    ending, style = (options.output or "").rpartition(".")[2].lower(), options.format
    if ending in STRUCTURED and ending != style and (ending, style) != ("json", "jsonl"):
        p.error(f"--output {options.output}: ends in .{ending}, and the format is {style}")


def by_ending(path: str | None, formats: Collection[str], default: str) -> str | None:
    """The one of `formats` that a file's ending names; without a file the `default`."""
    if path is None:
        return default
    ending = Path(path).suffix.lower().removeprefix(".").replace("ndjson", "jsonl")
    return ending if ending in formats else None


def results(p: argparse._ActionsContainer, *formats: str, default: str | None = "", help: str = "") -> None:
    """Add `--format` and `--output` for what a command prints. `default`: the format on stdout (the first)."""
    default = formats[0] if default == "" else default
    which = f"default: {default}, or by the ending of --output" if default else "default: by the ending of --output"
    action = p.add_argument("--format", choices=formats, action=Format, help=f"{help}; {which}" if help else which)
    action.default_of = default
    p.add_argument("--output", "-o", metavar="FILE", help="write the results to FILE (default: stdout)")
    overwrite(p)


class Model(argparse._StoreAction):
    """The flag `--model`. `task`: whose default model answers without it; None: there is none."""

    task: Callable[[argparse.Namespace], str | None]


def model(
    p: argparse._ActionsContainer, task: str, of: Callable[[argparse.Namespace], str | None] | None = None
) -> None:
    """`task`: of its default model, see `system/config.py`; `of`: where it depends on the options."""
    default = f" (default: {shipped})" if (shipped := DEFAULT_MODELS[task]) else ""
    action = p.add_argument("--model", "-m", action=Model, metavar="MODEL", help=MODEL + default)
    action.task = of or (lambda options: task)
    architecture(p)


def architecture(p: argparse._ActionsContainer) -> None:
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")


def image_model(p: argparse._ActionsContainer, task: str) -> None:
    model(p, task)
    preprocessing(p)


def model_argument(p: argparse._ActionsContainer, more: str = "") -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL + more)
    architecture(p)
    preprocessing(p)


def preprocessing(p: argparse._ActionsContainer) -> None:
    p.add_argument("--preprocessing", metavar="NAME",
                   help="image preprocessing of a bare weights file: openai, imagenet, inception, siglip, or a JSON "
                   "file such as a checkpoint folder's preprocessing.json")  # fmt: skip


def machine(g: argparse._ActionsContainer, batches: type[OptionSet] | None = None) -> None:
    """`batches`: options of a command with batches."""
    compute(g)
    add_flags(g, MachineOptions, ["compute_type"], defaults=True)
    if batches is not None:
        add_flags(g, batches, BatchOptions.declared, defaults=True)


def model_and_machine(p: Parser, task: str, batches: type[OptionSet] | None = None) -> argparse._ArgumentGroup:
    """The group of a command with one model, of images with `batches`."""
    g = p.add_argument_group("model and machine")
    (model if batches is None else image_model)(g, task)
    machine(g, batches)
    return g


def compute(g: argparse._ActionsContainer) -> None:
    add_flags(g, MachineOptions, ["device", "threads"], defaults=True)


def videos(p: Parser, whole: bool = True) -> None:
    """Add the flags of frames of videos. `whole`: with that of one result per video."""
    add_flags(p.add_argument_group("videos"), ClipOptions if whole else VideoOptions)


def lists(g: argparse._ActionsContainer, *columns: str) -> None:
    """Files and hosts that lists of data may name, and the names of their `columns`, among path, text and label; the
    recipes have the same flags (`multimodal.data.remote.trust`, `multimodal.data.sources.ListColumns`)."""
    g.add_argument("--trust_paths", action="store_true", help="allow lists to name files outside their folder")
    g.add_argument("--remote", nargs="+", default=[], metavar="HOST", help="hosts that lists may name in URLs: "
                   "HOST, HOST:PORT or s3://BUCKET; an internal address must be listed itself")  # fmt: skip
    for name in columns:
        g.add_argument(
            f"--{name}_column", metavar="NAME", help=f"column of the {name} in a list (default: the usual names)"
        )


def check_columns(p: Parser, options: argparse.Namespace, *data: str) -> None:
    """Refuse columns of lists where all data (those of the command) are folders."""
    if all(map(os.path.isdir, data or (*options.data, *getattr(options, "train", ())))):
        p.refuse(options, ("path_column", "text_column", "label_column"), "is for lists and tars (got folders)")


def overwrite(g: argparse._ActionsContainer) -> None:
    g.add_argument("--overwrite", action="store_true", help="replace output files that multimodal did not write, or "
                   "that changed since; never an input")  # fmt: skip


def native(g: argparse._ActionsContainer) -> None:
    """Add `--native`: None, or the most patches, 0 for as many as the model was trained on."""
    g.add_argument("--native", type=_tokens, nargs="?", const=LEARNED, metavar="TOKENS", help="keep each image's "
                   "aspect ratio, with at most TOKENS patches (default: as in training), instead of "
                   "cropping or stretching it to the model's size")  # fmt: skip


def _tokens(text: str) -> int:
    return 0 if text == LEARNED else count(text)
