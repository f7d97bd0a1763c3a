"""A classifier as a file: the vectors of its labels, and all that its scores depend on but the picture tower."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, UsageError
from multimodal.tasks.calibration import Calibration
from multimodal.tasks.features import model_digest
from multimodal.tasks.zeroshot import ZeroShotClassifier, saved_templates
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint, read_tensors, write_durably

FORMAT = "multimodal classifier 1"
KEYS = {"labels", "templates", "model", "model_sha256", "preprocessing", "scores", "threshold", "calibration"}


@dataclass(frozen=True)
class SavedClassifier:
    """What a file holds: label vectors [C D] and a JSON-ready record of `KEYS`."""

    weights: Float[Tensor, "C D"]
    record: dict[str, Any]


def save_classifier(
    classifier: ZeroShotClassifier, path: Path, checkpoint: Checkpoint, overwrite: bool = False
) -> None:
    """`checkpoint`: as it was loaded, before `for_inference`. A stop leaves the old file or the new one. Raises
    UsageError for a file that is there already (unless `overwrite`, which takes only a classifier's place)."""
    from safetensors.torch import save

    if path.exists():
        if not overwrite:
            raise UsageError(f"--save_classifier {path}: exists already (--overwrite takes its place)")
        read_classifier(path)
    record = {
        "labels": classifier.labels,
        "templates": saved_templates(classifier.templates),
        "model": checkpoint.source,
        "model_sha256": model_digest(checkpoint.model),
        "preprocessing": known_preprocessing(checkpoint).to_dict(),
        "scores": classifier.scores,
        "threshold": classifier.threshold,
        "calibration": classifier.calibration.to_dict() if classifier.calibration else None,
    }
    weights, text = classifier.weights.float().cpu().contiguous(), json.dumps(record)
    told = {"format": FORMAT, "classifier": text, "sha256": _digest(weights, text)}
    part = path.with_name(f".{path.name}.part")
    try:
        write_durably(part, save({"weights": weights}, metadata=told))
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"--save_classifier {path}: cannot be written ({error.strerror})") from None


def read_classifier(path: Path) -> SavedClassifier:
    """Raises CheckpointError for a file that is missing, none of these, or damaged in any bit."""
    from safetensors import SafetensorError, safe_open

    tensors = read_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from None
    if told.get("format") != FORMAT or tensors.keys() != {"weights"} or not {"classifier", "sha256"} <= told.keys():
        raise CheckpointError(f"{path}: is no classifier, as --save_classifier writes it")
    if _digest(tensors["weights"], told["classifier"]) != told["sha256"]:
        raise CheckpointError(f"{path}: is damaged (its sha256 is not the one that was written)")
    record = json.loads(told["classifier"])
    if set(record) != KEYS or tensors["weights"].shape[:1] != (len(record["labels"]),):
        raise CheckpointError(f"{path}: is no classifier of this version ({', '.join(sorted(set(record) ^ KEYS))})")
    return SavedClassifier(tensors["weights"], record)


def load_classifier(path: Path, checkpoint: Checkpoint, made: Checkpoint | None = None) -> ZeroShotClassifier:
    """The classifier of a file, for the model that it was made with; no text is encoded. `checkpoint`: as it was
    loaded; `made`: what `for_inference` made of it. Raises CheckpointError for a damaged file, UsageError for another
    model or preprocessing."""
    saved = read_classifier(path)
    record = saved.record
    if (digest := model_digest(checkpoint.model)) != record["model_sha256"]:
        raise UsageError(
            f"{path}: was made with model {record['model']} (sha256 {record['model_sha256'][:12]}…), whose weights are "
            f"not those of {checkpoint.source} ({digest[:12]}…)"
        )
    own = known_preprocessing(checkpoint).to_dict()
    if other := [key for key in own if own[key] != record["preprocessing"].get(key)]:
        raise UsageError(
            f"{path}: was made for pictures with {other[0]} {record['preprocessing'].get(other[0])}, and "
            f"{checkpoint.source} prepares them with {own[other[0]]}"
        )
    calibration = record["calibration"]
    if calibration is not None:
        calibration = Calibration.from_dict(calibration, len(record["labels"]), str(path))
    return ZeroShotClassifier(
        made or checkpoint, record["labels"], record["templates"], weights=saved.weights, calibration=calibration,
        threshold=record["threshold"], scores=record["scores"],
    )  # fmt: skip


def _digest(weights: Tensor, text: str) -> str:
    digest = hashlib.sha256(f"{FORMAT}\n{weights.dtype} {list(weights.shape)}\n{text}\n".encode())
    digest.update(weights.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
