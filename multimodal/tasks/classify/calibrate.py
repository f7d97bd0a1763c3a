"""Calibrate a classifier on labelled images: a folder per label, or any training source."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.data.datasets.class_names import class_names
from multimodal.data.datasets.image_sets import ImageSet, labelled, open_images
from multimodal.data.datasets.images import named_concept
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns
from multimodal.errors import DataError
from multimodal.tasks.classify.calibration import FOLDS, bins, calibrate
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.features import image_features
from multimodal.tasks.figures import new_figure, png


@dataclass(frozen=True)
class LabelledImages:
    """Images of a source, and the names of each class id, the best first."""

    images: ImageSet
    names: dict[str, tuple[str, ...]]

    def labels(self) -> list[str]:
        return list(dict.fromkeys(names[0] for names in self.names.values()))

    def numbers(self, labels: Sequence[str]) -> dict[str, int]:
        """Label index of each class id, -1 for no label. Raises DataError if no class is a label."""
        places = {label.casefold(): number for number, label in reversed(list(enumerate(labels)))}
        found = {
            identity: next((places[name.casefold()] for name in names if name.casefold() in places), -1)
            for identity, names in self.names.items()
        }
        if max(found.values()) < 0:
            raise DataError(
                f"{self.images.where}: none of its {len(found)} classes (such as {next(iter(found))!r}) "
                f"is one of the {len(labels)} labels (such as {labels[0]!r})",
            )
        return found


@dataclass(frozen=True)
class CalibrationResult:
    """`figures`: see `Calibration`. `curves`: rows of `bins` before and after. `unknown`: class ids without a label.
    `broken`: unreadable images, with the cause."""

    classifier: ZeroShotClassifier
    figures: dict[str, Any]
    curves: dict[str, Float[Tensor, "bins 3"]]
    unknown: list[str]
    broken: list[str]


def open_labelled(
    data: str, names: Sequence[Path] = (), trust: Trust = OWN_FOLDER, columns: ListColumns = USUAL
) -> LabelledImages:
    """Open labelled images. `names`: files of class names, besides a `classes.jsonl` in or beside the data.

    Raises DataError, UsageError."""
    images = labelled(open_images(data, None, trust, columns))
    known = class_names(names, [data])
    rows = {(row := images.source.row(key)).label: row for key in reversed(images.keys)}
    found = {i: (*named_concept(rows[i], known).names, i, i.replace("_", " ")) for i in images.ids if i in rows}
    return LabelledImages(images, found)


def calibrated(
    classifier: ZeroShotClassifier, data: LabelledImages, kind: str, batch_size: int = 32,
    workers: int | None = None, watch: Callable[[int, int, int], None] = lambda *_: None,
) -> CalibrationResult:  # fmt: skip
    """Fit and measure a calibration. Raises DataError for too few images, UsageError, CheckpointError."""
    numbers = data.numbers(classifier.labels)
    found = image_features(classifier.checkpoint, data.images, "embedding", batch_size, workers, watch=watch)
    classes: Int[Tensor, "N"] = data.images.labels(found.keys, numbers)
    logits = classifier.vector_logits(found.vectors)
    before, loss = classifier.scored(logits), classifier.model.config.loss
    try:
        calibration, held = calibrate(kind, loss, logits, classes, before, classifier.threshold)
    except DataError as error:
        raise DataError(f"{data.images.where}: {error}") from None
    shown: Bool[Tensor, "N"] = classes >= (0 if kind == "temperature" else -1)
    curves = {}
    for name, scores in (("before", before), ("after", held)):
        best, place = scores[shown].double().max(1)
        curves[name] = bins(best, place == classes[shown])
    return CalibrationResult(
        classifier.using(calibration=calibration), calibration.figures, curves,
        [identity for identity, number in numbers.items() if number < 0], found.broken,
    )  # fmt: skip


def report(made: CalibrationResult) -> Iterator[str]:
    """Summary lines for a terminal."""
    figures, calibration = made.figures, made.classifier.calibration
    a, b = calibration.scale[0], calibration.offset[0]
    how = f"a {a:.4g}, b {b:.4g}" if calibration.kind == "platt" else f"a and b of {len(calibration.scale)} labels"
    if calibration.kind == "temperature":
        how = f"temperature {1 / a:.4g} of the logits"
    labels = len(made.classifier.labels)
    yield f"{calibration.kind}: {how}, fitted to {figures['images']} images of {labels} labels"
    if made.unknown:
        use = "not used for the fit" if calibration.kind == "temperature" else "as none of these"
        some = ", ".join(made.unknown)[:80]
        yield f"{figures['of_none']} images of {len(made.unknown)} other classes ({use}): {some}"
    yield f"{FOLDS}-fold cross-validation:"
    for name in ("before", "after"):
        row = figures[name]
        line = f"  {name:6}  accuracy {row['accuracy']:.4f}  NLL {row['nll']:.4f}  ECE {row['ece']:.4f}"
        if "false_reject" in row:
            accepted = "" if row["false_accept"] is None else f"  false accepts {row['false_accept']:.4f}"
            line += f"{accepted}  false rejects {row['false_reject']:.4f}"
            line += "" if row["right_of_answers"] is None else f"  correct answers {row['right_of_answers']:.4f}"
        yield line


def reliability_figure(curves: dict[str, Float[Tensor, "bins 3"]], figures: dict[str, Any], title: str) -> bytes:
    """Reliability diagram (Guo et al. 2017, figure 1) as PNG: accuracy by score, and the number of images."""
    figure = new_figure((5 * len(curves), 6.2), title)
    axes = figure.subplots(2, len(curves), squeeze=False, sharex=True, height_ratios=[3, 1])
    for (upper, lower), (name, table) in zip(axes.T, curves.items(), strict=True):
        count, mean, right = table.T.numpy()
        edges = torch.arange(len(table)).numpy() / len(table)
        full = count > 0
        upper.bar(edges[full], right[full], 1 / len(table), align="edge", edgecolor="white", label="accuracy")
        upper.plot([0, 1], [0, 1], "--", color="gray", label="calibrated")
        upper.plot(mean[full], right[full], "o", color="tab:red", label="at the mean score")
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        upper.set_title(
            f"{name}: accuracy {figures[name]['accuracy']:.1%}, ECE {figures[name]['ece']:.3f}", fontsize=10
        )
        upper.legend(fontsize=8, loc="upper left")
        lower.bar(edges, count, 1 / len(table), align="edge", edgecolor="white")
        lower.set(xlabel="score of the best label", ylabel="images")
    return png(figure)
