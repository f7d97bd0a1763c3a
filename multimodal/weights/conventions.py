"""Image preprocessing and GELU of bare weights files, which no tensor states: given by name, never guessed.

Both change every score and no shape (open_clip issue 1068)."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

from torch import nn

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import path_of, read_json
from multimodal.system.records import from_record
from multimodal.tokens.image.preprocessing import IMAGENET_MEAN, IMAGENET_STD, OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.weights.fit import check_size, image_tower
from multimodal.weights.folder import Checkpoint

HALF = (0.5, 0.5, 0.5)
# all bicubic; the size is the model's
CONVENTIONS = {
    "openai": ("shortest", OPENAI_MEAN, OPENAI_STD, 1.0),  # clip/clip.py, _transform; most of OpenCLIP's models
    "imagenet": ("shortest", IMAGENET_MEAN, IMAGENET_STD, 0.875),  # timm.data.constants, its defaults
    "inception": ("shortest", HALF, HALF, 0.9),  # timm/models/vision_transformer.py, _cfg: ViTs by Google
    "siglip": ("squash", HALF, HALF, 1.0),  # both edges at once: OpenCLIP's and transformers' SigLIP
}
NAMES = ", ".join(CONVENTIONS)
GIVEN = "preprocessing_from"  # of a card: a caller gave the preprocessing
# files and repositories whose weights OpenCLIP's registry (open_clip/pretrained.py) marks with quick_gelu
USUAL = ("model", "open_clip_model", "open_clip_pytorch_model", "pytorch_model")  # the folder's name counts instead
QUICK = re.compile(r"openai|quick_?gelu|metaclip", re.IGNORECASE)


def with_preprocessing(checkpoint: Checkpoint, preprocessing: str | Path | Preprocessing | None) -> Checkpoint:
    """The checkpoint with this preprocessing: one of `CONVENTIONS`, or a file like `preprocessing.json` of a checkpoint
    folder. Raises UsageError, CheckpointError; warns when it replaces another."""
    if preprocessing is None:
        return checkpoint
    tower, where = image_tower(checkpoint.model.config), f"preprocessing {preprocessing}"
    if tower is None:
        raise UsageError(f"is for image models, {checkpoint.source} is a {checkpoint.kind}", argument="preprocessing")
    is_record = isinstance(preprocessing, Preprocessing)
    record = preprocessing if is_record else _record(str(preprocessing), tower.image)
    if record.size != tower.image:
        try:
            check_size(record, checkpoint.model.config, str(preprocessing), UsageError)
        except UsageError as error:
            raise UsageError(str(error), argument="preprocessing") from None
        warnings.warn(f"{where}: size {record.size}, but the model was trained with {tower.image}", stacklevel=3)
    if checkpoint.preprocessing not in (None, record):
        warnings.warn(f"{where}: replaces that of {checkpoint.source}", stacklevel=3)
    card = checkpoint.card | {GIVEN: f"{where}: not stated by the checkpoint"}
    return replace(checkpoint, preprocessing=record, card=card)


def known_preprocessing(checkpoint: Checkpoint) -> Preprocessing:
    """The checkpoint's preprocessing. Raises CheckpointError if it has none."""
    if checkpoint.preprocessing is None:
        raise CheckpointError(
            f"is needed: {checkpoint.source} does not state its own ({NAMES}, or a JSON file)", argument="preprocessing"
        )
    return checkpoint.preprocessing


def check_activation(where: str | Path, architecture: str, quick: bool) -> None:
    """Warn if the name of a weights file suggests quick-GELU and the architecture has the exact GELU. (open_clip warns
    by its tags, which a file lacks.)"""
    path = Path(where)
    named = QUICK.search(path.parent.name if path.stem in USUAL else path.name)
    if named and not quick:
        warnings.warn(
            f"{where}: {named[0]!r} in its name suggests quick-GELU, but architecture {architecture} has the exact "
            f"GELU; scores may be wrong without architecture {architecture}-quickgelu",
            stacklevel=3,
        )


def has_quick_gelu(model: nn.Module) -> bool:
    stack = getattr(getattr(model.config, "text", None), "stack", None)
    return stack is not None and stack.block.activation == "quick_gelu"


def _record(name: str, size: tuple[int, int]) -> Preprocessing:
    if name in CONVENTIONS:
        resize, mean, std, crop = CONVENTIONS[name]
        return Preprocessing(size, resize, "bicubic", mean, std, 0, crop)
    path = path_of(name, UsageError, "preprocessing")
    if not path.is_file():
        raise UsageError(f"{name}: neither a file nor one of {NAMES}", argument="preprocessing")
    return from_record(Preprocessing, read_json(path), name)
