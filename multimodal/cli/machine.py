"""The flags that say how a command over pictures computes."""

import argparse

from multimodal.cli.flags.transcribe import count

LEARNED = "learned"
COMPUTE_TYPES = ["auto", "float32", "bfloat16", "float16"]
MOST_THREADS = 1024  # torch starts them all


def add(g: argparse._ActionsContainer, batch_size: int | None, integers: bool = False) -> None:
    """`batch_size`: the default, None for a command that has no batches. `integers`: int8 can be chosen."""
    g.add_argument("--device", default="cpu", metavar="NAME", help="such as cpu or cuda (default: cpu)")
    g.add_argument("--compute_type", default="auto", choices=COMPUTE_TYPES + ["int8"] * integers,
                   help="default: auto, which is float32 on a CPU and bfloat16 on a GPU")  # fmt: skip
    if batch_size is not None:
        told = f"pictures side by side (default: {batch_size})"
        g.add_argument("--batch_size", type=count, default=batch_size, metavar="N", help=told)
        g.add_argument("--workers", type=count, metavar="N", help="threads that read pictures (default: one a core)")
    g.add_argument("--threads", type=threads, metavar="N", help="threads that compute (default: torch's own)")


def lists(g: argparse._ActionsContainer) -> None:
    """What rows of the lists in the data may name; the recipes have the same flags (`train.trust.Trust`)."""
    g.add_argument("--trust_paths", action="store_true", help="lists may name files outside of their own folder")
    g.add_argument("--remote", nargs="+", default=[], metavar="HOST", help="hosts that lists may name in URLs: "
                   "HOST, HOST:PORT or s3://BUCKET; an internal address must be named itself")  # fmt: skip


def overwrite(g: argparse._ActionsContainer) -> None:
    g.add_argument("--overwrite", action="store_true", help="replace output files that multimodal did not write, or "
                   "that were changed since; never an input")  # fmt: skip


def threads(text: str) -> int:
    value = count(text)
    if value > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text[:40]}: expected {MOST_THREADS} or fewer")
    return value


def native(g: argparse._ActionsContainer) -> None:
    """`--native`: None, or the limit, 0 for as many as the model learned."""
    g.add_argument("--native", type=_tokens, nargs="?", const=LEARNED, metavar="TOKENS", help="take pictures whole, "
                   "at their own aspect, of at most TOKENS patches (default: as many as the model learned), not "
                   "cropped or squashed to the model's size")  # fmt: skip


def _tokens(text: str) -> int:
    return 0 if text == LEARNED else count(text)
