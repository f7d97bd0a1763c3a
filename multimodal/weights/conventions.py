"""What a bare weights file does not say, given by name: how pictures are prepared, and which GELU it was trained with.

Both change every score and no shape, so they are asked for and never guessed (open_clip 1068)."""

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
# files and repositories whose weights OpenCLIP's registry (open_clip/pretrained.py) marks with quick_gelu
USUAL = (
    "model",
    "open_clip_model",
    "open_clip_pytorch_model",
    "pytorch_model",
)  # these files are named by their folder
QUICK = re.compile(r"openai|quick_?gelu|metaclip", re.IGNORECASE)


def with_preprocessing(checkpoint: Checkpoint, asked: str | Path | Preprocessing | None) -> Checkpoint:
    """The checkpoint with the preprocessing that was asked for: a JSON file as `preprocessing.json` of a checkpoint
    folder, or one of `CONVENTIONS`. Raises UsageError, CheckpointError; warns where it replaces another."""
    if asked is None:
        return checkpoint
    size, patch = _pixels(checkpoint)
    record = asked if isinstance(asked, Preprocessing) else _record(str(asked), size)
    if record.size != size:
        if any(edge % patch for edge in record.size):
            raise UsageError(f"--preprocessing {asked}: size {record.size}, no multiple of the model's patch ({patch})")
        check_size(record, checkpoint.model.config, f"--preprocessing {asked}", UsageError)
        warnings.warn(f"--preprocessing {asked}: size {record.size}, the model was made for {size}", stacklevel=3)
    if checkpoint.preprocessing not in (None, record):
        warnings.warn(f"--preprocessing {asked}: replaces that of {checkpoint.source}", stacklevel=3)
    card = checkpoint.card | {"preprocessing_from": f"--preprocessing {asked}: not stated by the checkpoint"}
    return replace(checkpoint, preprocessing=record, card=card)


def known_preprocessing(checkpoint: Checkpoint) -> Preprocessing:
    """Raises CheckpointError where it is not known."""
    if checkpoint.preprocessing is None:
        raise CheckpointError(
            f"model {checkpoint.source}: its preprocessing of pictures is not known, and is not guessed: "
            f"give it with --preprocessing ({NAMES}, or a JSON file)"
        )
    return checkpoint.preprocessing


def check_activation(where: str | Path, architecture: str, quick: bool) -> None:
    """Warns where the name of a weights file speaks of quick-GELU, and the architecture that is given has it not:
    open_clip warns by its tags, and a file has no tag."""
    path = Path(where)
    named = QUICK.search(path.parent.name if path.stem in USUAL else path.name)
    if named and not quick:
        warnings.warn(
            f"{where}: {named[0]!r} in its name speaks of weights trained with quick-GELU, architecture {architecture} "
            f"has the exact GELU; if so, scores are wrong without --architecture {architecture}-quickgelu",
            stacklevel=3,
        )


def has_quick_gelu(model: nn.Module) -> bool:
    stack = getattr(getattr(model.config, "text", None), "stack", None)
    return stack is not None and stack.block.activation == "quick_gelu"


def _record(asked: str, size: tuple[int, int]) -> Preprocessing:
    if asked in CONVENTIONS:
        resize, mean, std, crop = CONVENTIONS[asked]
        return Preprocessing(size, resize, "bicubic", mean, std, 0, crop)
    path = path_of(asked, UsageError, "--preprocessing")
    if not path.is_file():
        raise UsageError(f"--preprocessing {asked}: neither a file nor one of {NAMES}")
    return from_record(Preprocessing, read_json(path), asked)


def _pixels(checkpoint: Checkpoint) -> tuple[tuple[int, int], int]:
    """Height and width of the model's pictures, and its patch."""
    tower = image_tower(checkpoint.model.config)
    if tower is None:
        raise UsageError(f"--preprocessing: model {checkpoint.source} is a {checkpoint.kind}, which takes no pictures")
    return tower.image, tower.patch
