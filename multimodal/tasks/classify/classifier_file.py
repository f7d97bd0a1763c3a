"""Classifier files: label vectors and everything else that scores depend on, except the image tower."""

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
from multimodal.system.files import parse_json, path_of, printable, shown
from multimodal.system.outputs import Outputs, write_output
from multimodal.system.records import from_record, to_record
from multimodal.tasks.classify.calibration import Calibration
from multimodal.tasks.classify.classifier import ZeroShotClassifier, saved_templates
from multimodal.tasks.encode.features import model_digest
from multimodal.tasks.encode.prompts import checked_labels
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.files.tensor_files import read_tensors
from multimodal.weights.folder import Checkpoint

FORMAT = "multimodal classifier 1"


@dataclass(frozen=True)
class ClassifierRecord:
    """Settings of a saved classifier. `model_sha256`: see `model_digest`."""

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
            raise CheckpointError("labels: one has outer spaces")
        least = -1 if self.scores == "cosine" else 0
        if self.threshold is not None and not least <= self.threshold <= 1:
            raise CheckpointError(f"threshold: expected a number from {least} to 1 ({self.threshold})")
        if not re.fullmatch("[0-9a-f]{64}", self.model_sha256):
            raise CheckpointError(f"model_sha256: expected 64 hexadecimal digits ({shown(self.model_sha256)})")
        if self.calibration is not None:
            self.calibration.check_labels(len(self.labels))


@dataclass(frozen=True)
class SavedClassifier:
    """Contents of a classifier file: unit label vectors and the record."""

    weights: Float[Tensor, "C D"]
    record: ClassifierRecord


def save_classifier(classifier: ZeroShotClassifier, path: Path, digest: str, overwrite: bool = False) -> None:
    """Write a classifier atomically. `digest`: `model_digest` of its model as loaded.

    Raises UsageError for an existing file, unless `overwrite`, which replaces only classifiers."""
    from safetensors.torch import save

    path = path_of(path, UsageError)
    place_of_classifier(path, Outputs(overwrite=overwrite))
    record = ClassifierRecord(
        tuple(classifier.labels), saved_templates(classifier.templates), classifier.checkpoint.source,
        digest, classifier.preprocessing, classifier.scores, classifier.threshold,
        classifier.calibration,
    )  # fmt: skip
    weights, text = classifier.weights.float().cpu().contiguous(), json.dumps(to_record(record))
    metadata = {"format": FORMAT, "classifier": text, "sha256": _digest(weights, text)}
    try:
        write_output(path, save({"weights": weights}, metadata=metadata))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def place_of_classifier(path: Path, outputs: Outputs) -> None:
    """Raises UsageError for an existing file (unless `outputs.overwrite`) or an input, and as `read_classifier` for an
    existing file that is not a classifier."""
    if outputs.spare(path) is None:
        return
    if not outputs.overwrite:
        raise UsageError(f"{path}: exists; overwrite=True replaces it")
    read_classifier(path)


def read_classifier(path: Path) -> SavedClassifier:
    """Read a classifier file. Raises CheckpointError for a missing, foreign or damaged file."""
    from safetensors import SafetensorError, safe_open

    path = path_of(path, CheckpointError, "classifier")
    tensors = read_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None
    if (
        metadata.get("format") != FORMAT
        or tensors.keys() != {"weights"}
        or not {"classifier", "sha256"} <= metadata.keys()
    ):
        raise CheckpointError(f"{path}: not a classifier file")
    if _digest(tensors["weights"], metadata["classifier"]) != metadata["sha256"]:
        raise CheckpointError(f"{path}: damaged (sha256 differs)")
    record = from_record(ClassifierRecord, parse_json(metadata["classifier"], str(path)), str(path))
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
    """Load a classifier for the model it was made with; no text is encoded. `digest`: `model_digest` of the checkpoint
    before preparation, needed for a prepared one.

    Raises CheckpointError for a damaged file, UsageError for another model or preprocessing."""
    saved = read_classifier(path)
    record = saved.record
    if (digest := digest or model_digest(checkpoint)) != record.model_sha256:
        raise UsageError(
            f"{path}: was made with model {printable(record.model)} (sha256 {record.model_sha256[:12]}…), but "
            f"{checkpoint.source} has other weights ({digest[:12]}…)"
        )
    own, theirs = vars(known_preprocessing(checkpoint)), vars(record.preprocessing)
    if other := [key for key in own if own[key] != theirs[key]]:
        raise UsageError(
            f"{path}: was made for images with {other[0]} {theirs[other[0]]}, but {checkpoint.source} has "
            f"{own[other[0]]}"
        )
    if saved.weights.shape[1] != (width := checkpoint.model.config.embed):
        raise CheckpointError(f"{path}: weights: expected {width} numbers per label (got {saved.weights.shape[1]})")
    try:
        return ZeroShotClassifier(
            checkpoint, record.labels, record.templates, weights=saved.weights, calibration=record.calibration,
            threshold=record.threshold, scores=record.scores,
        )  # fmt: skip
    except UsageError as error:  # inconsistent values
        raise CheckpointError(f"{path}: {error}") from None


def _digest(weights: Tensor, text: str) -> str:
    digest = hashlib.sha256(f"{FORMAT}\n{weights.dtype} {list(weights.shape)}\n{text}\n".encode())
    digest.update(weights.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
