"""What `multimodal classify` does with its flags."""

import warnings
from argparse import Namespace
from pathlib import Path

from multimodal.commands_shared import found_files, in_batches, print_results, read_lines
from multimodal.errors import ImageError, UsageError
from multimodal.tasks.zeroshot import TEMPLATES, ZeroShotClassifier
from multimodal.tokens.image import find_images
from multimodal.weights.load import load


def classify(options: Namespace) -> int:
    labels, templates = _labels(options), _templates(options.templates)
    files, code = found_files(options.images, find_images)
    classifier = ZeroShotClassifier(load(options.model, options.architecture), labels, templates)
    if len(labels) == 1 and classifier.model.config.loss == "softmax":
        warnings.warn("--labels: one label alone gets the score 1 in every picture", stacklevel=1)
    top = options.top or (5 if options.format == "table" else None)
    results, failed = in_batches(files, lambda batch: classifier.results(batch, top), options.batch_size, ImageError)
    rows = ([r["file"], s["label"], s["score"]] for r in results for s in r["scores"])
    print_results(results, rows, ["file", "label", "score"], options.format)
    return code or failed


def _labels(options: Namespace) -> list[str]:
    if (options.labels is None) == (options.labels_file is None):
        raise UsageError("--labels: give labels, or a file of them with --labels_file")
    if options.labels_file is not None:
        return [line for line in read_lines(options.labels_file, "--labels_file") if line.strip()]
    return options.labels[0].split(",") if len(options.labels) == 1 else options.labels


def _templates(value: str | None) -> str | list[str] | None:
    if value is None or value == "none" or value in TEMPLATES or not Path(value).exists():
        return value
    return [line for line in read_lines(value, "--templates") if line.strip()]
