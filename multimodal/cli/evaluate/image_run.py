"""Shared parts of image evaluations: flags, classes, features, results."""

import argparse
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.files import columns, output_file, outputs_of, trust
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, print_record
from multimodal.cli.parser import Parser
from multimodal.cli.vision.classify import labels_and_templates
from multimodal.data.options import SubsetOptions
from multimodal.inference.options import BatchOptions
from multimodal.system.options import OptionSet
from multimodal.system.options import add_flags as add_option_flags

if TYPE_CHECKING:
    from multimodal.data.datasets.image_sets import ClassNames, ImageSet
    from multimodal.tasks.classify.classifier import ZeroShotClassifier
    from multimodal.tasks.encode.features import Features, Kind
    from multimodal.tasks.evaluate.class_scores import ClassScores
    from multimodal.tasks.evaluate.linear_probe import LabelledVectors
    from multimodal.tasks.report.page import Section
    from multimodal.weights.folder import Checkpoint

DATA = "a folder with a folder per class, WebDataset tars (.cls, .txt), .csv, .tsv or .jsonl; several are joined"


def data_flags(p: Parser, wanted: str = "label") -> None:
    """`wanted`: what each image has, a label or a text."""
    p.usage = "%(prog)s DATA [DATA ...] [flags]"
    p.add_argument("data", nargs="+", metavar="DATA", help=DATA)
    add_option_flags(p, SubsetOptions, defaults=True)
    flags.lists(p, "path", wanted)


def name_flags(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--classes", metavar="FILE", help="class names by id, one JSON object per line (default: "
                   "classes.jsonl in or beside DATA, else the ids themselves)")  # fmt: skip
    g.add_argument("--labels_file", metavar="FILE", help="candidate labels, one per line, or .json as for multimodal "
                   "classify; matched by order where DATA names its classes otherwise")  # fmt: skip
    g.add_argument("--templates", metavar="SET", help="clip80, clip7, none, or a file of prompts with {} for the "
                   "label; default: the model's own, else clip7")  # fmt: skip


def training_flags(g: argparse._ArgumentGroup, options: type[OptionSet]) -> None:
    g.add_argument("--train", nargs="+", required=True, metavar="DATA", help="training images of the same classes")
    add_option_flags(g, options, defaults=True)


def result_flags(p: Parser, classes: bool = True) -> None:
    g = p.add_argument_group("results")
    flags.results(g, "table", "json")
    g.add_argument("--report", metavar="FILE", help="write all figures, also by class: .md or .html" if classes
                   else "write all figures and skipped items: .md or .html")  # fmt: skip
    if classes:
        g.add_argument("--confusion", metavar="FILE", help="draw the confusion matrix: .png")


def machine_flags(p: Parser) -> None:
    g = flags.model_and_machine(p, "classify", BatchOptions)
    flags.native(g)
    g.add_argument("--features_cache", metavar="DIR", help="cache image features, one file per model and set, keyed by "
                   "the sha256 of weights and images")  # fmt: skip


class EvaluateRun:
    """Check output files first, evaluate, and print the results last."""

    def __init__(self, options: Namespace):
        self.options, self.began = options, time.perf_counter()
        self.broken: list[str] = []
        self.source, self.preprocessing = "", dict[str, Any]()  # of the model
        self.digest: str | None = None  # of the model as it is loaded, where features are cached
        outputs = outputs_of(options)
        self.report = output_file(options.report, "--report", (".md", ".html"), outputs)
        self.confusion = output_file(getattr(options, "confusion", None), "--confusion", (".png",), outputs)

    def model(self, kind: "Kind") -> "Checkpoint":
        """As it is loaded. Raises UsageError for one that gives no such features."""
        from multimodal.tasks.encode.features import encoder, model_digest

        options = self.options
        checkpoint = loaded(options, "classify")
        encoder(checkpoint, kind)
        self.source, self.preprocessing = checkpoint.source, checkpoint.preprocessing.to_dict()
        self.digest = model_digest(checkpoint) if options.features_cache else None
        return checkpoint

    def features(self, checkpoint: "Checkpoint", images: "ImageSet", kind: "Kind") -> "Features":
        from multimodal.tasks.encode.features import image_features

        options = self.options
        cache = Path(options.features_cache) if options.features_cache else None
        found = image_features(
            checkpoint, images, kind, options.batch_size, options.workers, cache, Progress(images.where),
            options.native, self.digest,
        )  # fmt: skip
        new = [cause for cause in found.broken if cause not in self.broken]  # train and test may share images
        for cause in new:
            fail(cause)
        self.broken += new
        return found

    def end(self, own: dict[str, Any], scores: "ClassScores | None" = None, examples: "Sequence[Section]" = ()) -> int:
        from multimodal.tasks.evaluate.reports.images import summary, write_report

        options = self.options
        record = {
            "task": options.kind, "data": options.data, "limit": options.limit, "model": self.source,
            "preprocessing": self.preprocessing, "device": options.device,
            "compute_type": options.compute_type, "native": options.native, **own, "broken": len(self.broken),
            "left_out": self.broken, "seconds": round(time.perf_counter() - self.began, 2),
        }  # fmt: skip
        print_record(options.format, record, summary(record))
        image = self._drawn(scores)
        if self.report is not None:
            write_report(record, self.report, examples, image)
        return int(bool(self.broken))

    def _drawn(self, scores: "ClassScores | None") -> bytes | None:
        """The confusion matrix, in its file too."""
        html = self.report is not None and self.report.suffix.lower() == ".html"
        if scores is None or not (self.confusion or html):
            return None
        from multimodal.system.outputs import write_output
        from multimodal.tasks.evaluate.reports.confusion import plot_confusion

        name = Path(self.source).name
        image = plot_confusion(scores, f"{name} on {', '.join(self.options.data)}: {scores.figures()['acc1']:.1%}")
        if self.confusion:
            write_output(self.confusion, image)
        return image


def labels_of(options: Namespace) -> tuple[list[str] | None, Any]:
    return labels_and_templates(Namespace(labels=None, labels_file=options.labels_file, templates=options.templates))


def known_classes(options: Namespace) -> dict:
    from multimodal.data.datasets.class_names import class_names

    return class_names([Path(options.classes)] if options.classes else [], options.data)


def classes_of(options: Namespace, images: "ImageSet", labels: list[str] | None) -> "ClassNames":
    from multimodal.data.datasets.image_sets import listed_classes, named_classes

    known = known_classes(options)
    if labels is None:
        return named_classes(images, known)
    return listed_classes(images, known, labels, f"--labels_file {options.labels_file}")


def classifier_for(
    options: Namespace, checkpoint: "Checkpoint", labels: list[str] | None, templates: Any, file: str | None = None
) -> "ZeroShotClassifier":
    from multimodal.tasks.classify.classify import classifier_of

    return classifier_of(
        checkpoint, labels, templates, file, device=options.device, compute_type=options.compute_type
    )  # fmt: skip


def train_and_test(options: Namespace) -> "tuple[tuple[ImageSet, ImageSet], list[str]]":
    """Training and test images, and their class ids."""
    from multimodal.data.datasets.image_sets import open_images, same_classes

    train, test = (
        open_images(options.train, None, trust(options), columns(options)),
        open_images(options.data, options.limit, trust(options), columns(options)),
    )
    return (train, test), same_classes(train, test)


def labelled_vectors(found: "Features", images: "ImageSet", ids: list[str]) -> "LabelledVectors":
    from multimodal.tasks.evaluate.linear_probe import LabelledVectors

    numbers = {identity: number for number, identity in enumerate(ids)}
    return LabelledVectors(found.vectors, images.labels(found.keys, numbers))
