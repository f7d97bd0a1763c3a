"""The flags of `multimodal evaluate zeroshot`, `retrieval`, `linear-probe` and `few-shot`."""

import argparse
from collections.abc import Callable

from multimodal.cli import machine
from multimodal.cli.flags.transcribe import Help, count, number

DATA = "a folder with a folder a class, WebDataset tars (.cls, .txt), .csv, .tsv or .jsonl; several follow each other"


def add(kinds: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model of pictures."""
    p = _kind(kinds, "zeroshot", "accuracy of a CLIP among the names of classes")
    g = p.add_argument_group("classes and prompts")
    _names(g)
    g.add_argument("--classifier", metavar="FILE", help="labels, vectors and calibration of a file that multimodal "
                   "classify --save_classifier wrote with the same model")  # fmt: skip
    _reported(p)
    _machine(p, model)
    p = _kind(kinds, "retrieval", "recall of a CLIP between pictures and captions, both ways")
    _reported(p, False)
    _machine(p, model)
    p = _kind(kinds, "linear-probe", "accuracy of logistic regression on the frozen features of a CLIP or a ViT")
    g = p.add_argument_group("training")
    _trained(g)
    g.add_argument("--max_iterations", type=count, default=1000, metavar="N", help="of L-BFGS (default: 1000)")
    g.add_argument("--seed", type=int, default=0, metavar="N", help="of the held-out part (default: 0)")
    _reported(p)
    _machine(p, model)
    p = _kind(kinds, "few-shot", "the same after few pictures a class; of a CLIP also Tip-Adapter")
    g = p.add_argument_group("training")
    _trained(g)
    g.add_argument("--shots", type=count, nargs="+", default=[1, 2, 4, 8, 16], metavar="N",
                   help="pictures a class (default: 1 2 4 8 16)")  # fmt: skip
    g.add_argument("--seeds", type=count, default=3, metavar="N", help="draws of them (default: 3)")
    _names(p.add_argument_group("classes and prompts"))
    _reported(p, False)
    _machine(p, model)


def _kind(kinds: argparse._SubParsersAction, name: str, told: str) -> argparse.ArgumentParser:
    p = kinds.add_parser(name, help=told, usage="%(prog)s DATA [DATA ...] [flags]", formatter_class=Help)
    p.add_argument("data", nargs="+", metavar="DATA", help=DATA)
    p.add_argument("--limit", type=count, metavar="N", help="only N pictures, evenly spread over DATA")
    machine.lists(p)
    return p


def _names(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--classes", metavar="FILE", help="names of classes by their ids, a JSON object a line (default: "
                   "classes.jsonl in or beside DATA, else the ids themselves)")  # fmt: skip
    g.add_argument("--labels_file", metavar="FILE", help="labels to choose from, one a line, or .json as multimodal "
                   "classify takes it: in their order where the classes of DATA have other names")  # fmt: skip
    g.add_argument("--templates", metavar="SET", help="clip80, clip7, none, or a file of prompts with {} for the "
                   "label; default: the model's own, else clip7")  # fmt: skip


def _trained(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--train", nargs="+", required=True, metavar="DATA", help="training pictures of the same classes")
    g.add_argument("--C", type=number, metavar="C", help="inverse strength of the regularisation (default: searched "
                   "from 1e-6 to 1e6 on pictures held out)")  # fmt: skip


def _reported(p: argparse.ArgumentParser, classes: bool = True) -> None:
    g = p.add_argument_group("results")
    g.add_argument("--output", choices=["table", "json"], default="table", help="on stdout (default: table)")
    g.add_argument("--report", metavar="FILE", help="all figures, by class too: .md or .html" if classes else
                   "all figures, and what was left out: .md or .html")  # fmt: skip
    if classes:
        g.add_argument("--confusion", metavar="FILE", help="draw the confusion matrix: .png")
    machine.overwrite(g)


def _machine(p: argparse.ArgumentParser, model: Callable) -> None:
    g = p.add_argument_group("model and machine")
    model(g, "clip-vit-16")
    machine.add(g, 32)
    machine.native(g)
    g.add_argument("--features_cache", metavar="DIR", help="keep the vectors of pictures, one file for each model and "
                   "set; found by the sha256 of the weights and of the pictures")  # fmt: skip
