"""Flags that several commands share: the model, the machine, lists of data, output files."""

import argparse

from multimodal.cli.parser import count, limited
from multimodal.inference.options import COMPUTE_TYPES, BatchOptions
from multimodal.system.options import OptionSet, add_flags

LEARNED = "learned"
MODEL = "name (multimodal models lists them), folder, .safetensors file or hub repository OWNER/NAME"
threads = limited(count, lambda value: value <= 1024, "1024 or fewer")  # torch starts them all


def model(p: argparse._ActionsContainer, default: str | None) -> None:
    p.add_argument("--model", "-m", default=default, required=default is None, metavar="MODEL",
                   help=MODEL + (f" (default: {default})" if default else ""))  # fmt: skip
    if default:
        p.add_argument("--quiet", action="store_true", help="no note that the default is a demonstration model")
    architecture(p)


def architecture(p: argparse._ActionsContainer) -> None:
    p.add_argument("--architecture", help="OpenCLIP or timm name of a bare weights file")


def image_model(p: argparse._ActionsContainer, default: str | None) -> None:
    model(p, default)
    preprocessing(p)


def model_argument(p: argparse._ActionsContainer, more: str = "") -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL + more)
    architecture(p)
    preprocessing(p)


def preprocessing(p: argparse._ActionsContainer) -> None:
    p.add_argument("--preprocessing", metavar="NAME",
                   help="image preprocessing of a bare weights file: openai, imagenet, inception, siglip, or a JSON "
                   "file such as a checkpoint folder's preprocessing.json")  # fmt: skip


def machine(g: argparse._ActionsContainer, batches: type[OptionSet] | None = None, integers: bool = False) -> None:
    """`batches`: options of a command with batches. `integers`: offer int8."""
    compute(g)
    g.add_argument("--compute_type", default="auto", choices=COMPUTE_TYPES if integers else COMPUTE_TYPES[:-1],
                   help="default: auto (float32 on a CPU, bfloat16 on a GPU)")  # fmt: skip
    if batches is not None:
        add_flags(g, batches, BatchOptions.declared, defaults=True)


def compute(g: argparse._ActionsContainer) -> None:
    g.add_argument("--device", default="cpu", metavar="NAME", help="such as cpu or cuda (default: cpu)")
    g.add_argument("--threads", type=threads, metavar="N", help="CPU threads (default: torch's)")


def lists(g: argparse._ActionsContainer) -> None:
    """Files and hosts that lists of data may name; the recipes have the same flags (`multimodal.data.remote.trust`)."""
    g.add_argument("--trust_paths", action="store_true", help="let lists name files outside their folder")
    g.add_argument("--remote", nargs="+", default=[], metavar="HOST", help="hosts that lists may name in URLs: "
                   "HOST, HOST:PORT or s3://BUCKET; an internal address must be listed itself")  # fmt: skip


def overwrite(g: argparse._ActionsContainer) -> None:
    g.add_argument("--overwrite", action="store_true", help="replace output files that multimodal did not write, or "
                   "that changed since; never an input")  # fmt: skip


def native(g: argparse._ActionsContainer) -> None:
    """Add `--native`: None, or the most patches, 0 for as many as the model was trained on."""
    g.add_argument("--native", type=_tokens, nargs="?", const=LEARNED, metavar="TOKENS", help="keep each image's "
                   "aspect ratio, with at most TOKENS patches (default: as in training), instead of "
                   "cropping or squashing it to the model's size")  # fmt: skip


def _tokens(text: str) -> int:
    return 0 if text == LEARNED else count(text)
