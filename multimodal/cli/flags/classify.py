"""The flags of `multimodal classify`."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from multimodal.cli import machine
from multimodal.cli.flags.transcribe import count, number

USAGE = "%(prog)s IMAGE [IMAGE ...] --labels LABEL [LABEL ...] [flags]"
EXAMPLES = """examples:
  multimodal classify photo.jpg --labels "a dog" "a cat"
  multimodal classify photos/ --labels_file names.txt -o photos.csv          # call it again to go on after a stop
  multimodal classify --labels_file names.txt --calibrate labelled/ --threshold 0.5 --save_classifier pets.safetensors
  multimodal classify photos/ --classifier pets.safetensors -o photos.csv
"""
STYLES = ("table", "csv", "json", "jsonl")
BY_SUFFIX = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
LABELS = ("labels", "labels_file", "classifier")


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    p = commands.add_parser(
        "classify", help="score labels for pictures, zero-shot", usage=USAGE, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("images", nargs="*", metavar="IMAGE", help="files, folders or globs")
    _labels(p.add_argument_group("labels"))
    _output(p.add_argument_group("results"))
    _scores(p.add_argument_group("scores"))
    g = p.add_argument_group("model and machine")
    model(g, "clip-vit-16")
    machine.add(g, 32)
    machine.native(g)
    p.set_defaults(check=partial(check, p))


def _labels(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--labels", nargs="+", metavar="LABEL", help="labels; one value with commas is split")
    g.add_argument("--labels_file", metavar="FILE", help="labels, one a line; or .json: a list of labels, or an object "
                   "of each label and the list of its own prompts")  # fmt: skip
    g.add_argument("--templates", metavar="SET", help="clip80, clip7, none, or a file of prompts with {} for the "
                   "label, one a line or a .json list; default: the model's own")  # fmt: skip
    g.add_argument("--classifier", metavar="FILE", help="labels, vectors, calibration and threshold of a file that "
                   "--save_classifier wrote with the same model; no text is encoded")  # fmt: skip
    g.add_argument("--save_classifier", metavar="FILE", help="write them, as .safetensors")


def _output(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--format", choices=STYLES, help="default: table, or by the ending of --output (.csv, .jsonl)")
    g.add_argument("--output", "-o", metavar="FILE", help="append the results of each picture to a .csv or .jsonl file "
                   "as they come; a second call with the same settings leaves out what is there. FILE.settings.json "
                   "beside it says what it was made with")  # fmt: skip
    g.add_argument("--overwrite", action="store_true", help="start --output and --save_classifier over; replace "
                   "images that multimodal did not draw, or that were changed since; never an input")  # fmt: skip
    g.add_argument("--top", type=count, metavar="N", help="labels a picture (default: 5 in the table, else all)")
    g.add_argument("--heatmap", metavar="DIR", help="draw where each of the best labels was seen in each picture that "
                   "is classified now, as JPEG files in DIR; the scores stay the same")  # fmt: skip
    g.add_argument("--heatmap_top", type=count, metavar="N", help="labels of a picture that are drawn (default: 3)")


def _scores(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--scores", choices=["softmax", "sigmoid", "cosine"], help="default: as the model was trained, or "
                   "what the classifier was calibrated to")  # fmt: skip
    g.add_argument("--threshold", type=number, metavar="T", help="the answer is 'none of these' where the best score "
                   "is below T: table and csv then hold the labels at T or above, or a row with 'none of these' and no "
                   "score; json and jsonl hold all scores, and the best label or null as 'answer'")  # fmt: skip
    g.add_argument("--calibrate", metavar="DATA", help="fit the scores to pictures whose labels are known: a folder a "
                   "label, tars or a list; its classes are the labels where none are given; classes that are none of "
                   "the labels count as none of these")  # fmt: skip
    g.add_argument("--calibration", choices=["temperature", "platt", "platt-per-label"],
                   help="temperature: softmax(logits / T), no order changes (default). platt: each label by itself, "
                   "sigmoid(a logit + b), so that all may be low; platt-per-label: a and b for each")  # fmt: skip
    g.add_argument("--classes", metavar="FILE", help="names of the classes of --calibrate (default: classes.jsonl "
                   "beside DATA, else their ids)")  # fmt: skip
    g.add_argument("--reliability", metavar="PNG", help="draw how often scores were right, before and after")
    machine.lists(g)


def check(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What the flags say together; a contradiction ends the program with one line and exit code 2."""
    given = [name for name in LABELS if getattr(options, name) is not None]
    if len(given) > 1 or (not given and options.calibrate is None):
        names = ", ".join(f"--{name}" for name in given) or "none is given"
        p.error(f"--labels: give labels in one way: --labels, --labels_file or --classifier ({names})")
    if not options.images and not options.save_classifier and options.calibrate is None:
        p.error("IMAGE: name a file, folder or glob")
    if options.templates is not None and options.classifier is not None:
        p.error("--templates: a classifier file has its own (--classifier)")
    for name in ("calibration", "classes", "reliability"):
        if getattr(options, name) is not None and options.calibrate is None:
            p.error(f"--{name}: says how to --calibrate, which is not given")
    if options.calibrate is not None and options.scores is not None:
        p.error(f"--scores {options.scores}: --calibration says which scores come out")
    written = ("output", "save_classifier", "reliability", "heatmap")
    if options.overwrite and not any(getattr(options, name) for name in written):
        p.error(f"--overwrite: names no file ({', '.join(f'--{name}' for name in written)})")
    if options.heatmap_top is not None and options.heatmap is None:
        p.error("--heatmap_top: says how much to draw in --heatmap, which is not given")
    if options.save_classifier is not None and Path(options.save_classifier).suffix.lower() != ".safetensors":
        p.error(f"--save_classifier {options.save_classifier}: ends not in .safetensors")
    if options.native is not None and options.calibrate is not None:
        p.error("--native: --calibrate sees pictures at the model's own size")
    _check_output(p, options)


def _check_output(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.output is None:
        options.format = options.format or "table"
        return
    if not options.images:
        p.error("--output: no pictures are named")
    options.format = options.format or BY_SUFFIX.get(Path(options.output).suffix.lower())
    if options.format not in BY_SUFFIX.values():
        p.error(f"--output {options.output}: results are appended to csv or jsonl (--format {options.format or 'csv'})")
