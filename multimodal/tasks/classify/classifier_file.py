"""A classifier as a file: the vectors of its labels, and all that its scores depend on but the picture tower."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import ascii_only, parse_json, path_of, shown
from multimodal.system.outputs import Outputs, write_output
from multimodal.system.records import from_record, to_record
from multimodal.tasks.classify.calibration import Calibration
from multimodal.tasks.classify.classifier import ZeroShotClassifier, saved_templates
from multimodal.tasks.encode.features import model_digest
from multimodal.tasks.encode.prompts import checked_labels
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint, read_tensors

FORMAT = "multimodal classifier 1"


@dataclass(frozen=True)
class ClassifierRecord:
    """All that the scores depend on, but for the label vectors. `model_sha256`: `model_digest`."""

    labels: tuple[str, ...]
    templates: str | list[str] | dict[str, list[str]]
    model: str
    model_sha256: str
    preprocessing: Preprocessing
    scores: Literal["softmax", "sigmoid", "cosine"]
    threshold: float | None
    calibration: Calibration | None

    def __post_init__(self) -> None:
        if list(self.labels) != checked_labels(self.labels):
            raise CheckpointError("labels: one has spaces around it")
        least = -1 if self.scores == "cosine" else 0
        if self.threshold is not None and not least <= self.threshold <= 1:
            raise CheckpointError(f"threshold: expected a number from {least} to 1 ({self.threshold})")
        if not re.fullmatch("[0-9a-f]{64}", self.model_sha256):
            raise CheckpointError(f"model_sha256: expected 64 hexadecimal digits ({shown(self.model_sha256)})")
        if self.calibration is not None:
            self.calibration.check_labels(len(self.labels))


@dataclass(frozen=True)
class SavedClassifier:
    """What a file holds: label vectors [C D] of length 1, and the record."""

    weights: Float[Tensor, "C D"]
    record: ClassifierRecord


def save_classifier(classifier: ZeroShotClassifier, path: Path, digest: str, overwrite: bool = False) -> None:
    """`digest`: `model_digest` of the classifier's model as it was loaded. A stop leaves the old file or the new one.
    Raises UsageError for a file that is there already (unless `overwrite`, which takes only a classifier's place)."""
    from safetensors.torch import save

    path = path_of(path, UsageError, "--save_classifier")
    place_of_classifier(path, Outputs(overwrite=overwrite))
    record = ClassifierRecord(
        tuple(classifier.labels), saved_templates(classifier.templates), classifier.checkpoint.source,
        digest, classifier.preprocessing, classifier.scores, classifier.threshold,
        classifier.calibration,
    )  # fmt: skip
    weights, text = classifier.weights.float().cpu().contiguous(), json.dumps(to_record(record))
    told = {"format": FORMAT, "classifier": text, "sha256": _digest(weights, text)}
    try:
        write_output(path, save({"weights": weights}, metadata=told))
    except OSError as error:
        raise UsageError(f"--save_classifier {path}: cannot be written ({error.strerror})") from None


def place_of_classifier(path: Path, outputs: Outputs) -> None:
    """Raises UsageError for a file that is there already (unless `outputs.overwrite`) or is an input, and as
    `read_classifier` for one that is no classifier."""
    if outputs.spare(path, f"--save_classifier {path}") is None:
        return
    if not outputs.overwrite:
        raise UsageError(f"--save_classifier {path}: exists already (--overwrite takes its place)")
    read_classifier(path)


def read_classifier(path: Path) -> SavedClassifier:
    """Raises CheckpointError for a file that is missing, none of these, or damaged in any bit."""
    from safetensors import SafetensorError, safe_open

    path = path_of(path, CheckpointError, "classifier")
    tensors = read_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None
    if told.get("format") != FORMAT or tensors.keys() != {"weights"} or not {"classifier", "sha256"} <= told.keys():
        raise CheckpointError(f"{path}: not a classifier of --save_classifier")
    if _digest(tensors["weights"], told["classifier"]) != told["sha256"]:
        raise CheckpointError(f"{path}: is damaged (its sha256 is not the one that was written)")
    record = from_record(ClassifierRecord, parse_json(told["classifier"], str(path)), str(path))
    weights = tensors["weights"]
    if weights.dtype != torch.float32 or weights.ndim != 2 or len(weights) != len(record.labels):
        raise CheckpointError(
            f"{path}: weights: expected a float32 vector for each of {len(record.labels)} labels ({weights.dtype}, "
            f"{list(weights.shape)})"
        )
    if not ((weights.norm(dim=1) - 1).abs() < 1e-3).all():
        raise CheckpointError(f"{path}: weights: expected vectors of length 1")
    return SavedClassifier(weights, record)


def load_classifier(path: Path, checkpoint: Checkpoint, digest: str | None = None) -> ZeroShotClassifier:
    """The classifier of a file, for the model that it was made with; no text is encoded. A prepared `checkpoint` needs
    its `digest`, that `model_digest` gave before. Raises CheckpointError for a damaged file, UsageError for another
    model or preprocessing."""
    saved = read_classifier(path)
    record = saved.record
    if (digest := digest or model_digest(checkpoint)) != record.model_sha256:
        raise UsageError(
            f"{path}: was made with model {ascii_only(record.model)} (sha256 {record.model_sha256[:12]}…), whose "
            f"weights are not those of {checkpoint.source} ({digest[:12]}…)"
        )
    own, theirs = vars(known_preprocessing(checkpoint)), vars(record.preprocessing)
    if other := [key for key in own if own[key] != theirs[key]]:
        raise UsageError(
            f"{path}: was made for images with {other[0]} {theirs[other[0]]}, and {checkpoint.source} prepares them "
            f"with {own[other[0]]}"
        )
    if saved.weights.shape[1] != (width := checkpoint.model.config.embed):
        raise CheckpointError(f"{path}: weights: expected {width} numbers a label ({saved.weights.shape[1]})")
    try:
        return ZeroShotClassifier(
            checkpoint, record.labels, record.templates, weights=saved.weights, calibration=record.calibration,
            threshold=record.threshold, scores=record.scores,
        )  # fmt: skip
    except UsageError as error:  # values that do not go together
        raise CheckpointError(f"{path}: {error}") from None


def _digest(weights: Tensor, text: str) -> str:
    digest = hashlib.sha256(f"{FORMAT}\n{weights.dtype} {list(weights.shape)}\n{text}\n".encode())
    digest.update(weights.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
