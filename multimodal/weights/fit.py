"""Checks that preprocessing and tokenizer fit a model's configuration, before memory is allocated."""

import dataclasses
from typing import Any

from multimodal.errors import CheckpointError, MultimodalError
from multimodal.system.records import from_record, to_record
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.tokenizer import Tokenizer

MOST_TIMES = 16  # pixels, in multiples of those of the model


def image_tower(config: Any) -> Any:
    """Configuration of the image tower, or None."""
    tower = config if hasattr(config, "patch") else getattr(config, "image", None)
    return tower if hasattr(tower, "patch") else None


def vocabulary_of(config: Any) -> int | None:
    """Rows of the token embedding, or None."""
    for part in (config, getattr(config, "text", None), getattr(config, "decoder", None)):
        if isinstance(size := getattr(part, "vocabulary", None), int):
            return size
    return None


def check_size(
    record: Preprocessing, config: Any, where: str, error: type[MultimodalError] = CheckpointError, fixed: bool = False
) -> None:
    """Raise `error` for an image size that the model cannot take, or far larger than its own. `fixed`: for any but its
    own."""
    tower = image_tower(config)
    if tower is None or record.size == tuple(tower.image):
        return
    if fixed or tower.fixed:
        raise error(f"{where}: size {record.size} must be {tuple(tower.image)}, which its positions fit")
    (height, width), (own_height, own_width), patch = record.size, tower.image, tower.patch
    if height % patch or width % patch:
        raise error(f"{where}: size {record.size} must be a multiple of the patch ({patch})")
    if height * width > MOST_TIMES * own_height * own_width:
        raise error(f"{where}: size {record.size} is too large for a model of {own_height} x {own_width} pixels")


def check_values(config: Any, where: str) -> None:
    """Raise CheckpointError for a value of another type than the field's, and for a number that must be above 0."""
    from_record(type(config), to_record(config), where)
    _check_positive(config, where)


def _check_positive(config: Any, where: str) -> None:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name
        if dataclasses.is_dataclass(value):
            _check_positive(value, where)
        elif (name.endswith("norm_eps") or name == "context") and value is not None and not value > 0:
            raise CheckpointError(f"{where}: {name} must be above 0 (got {value!r})")


def check_markers(chat: ChatFormat | None, tokenizer: Tokenizer | None, config: Any, where: str) -> None:
    """Raise CheckpointError for a token of media that is not the model's placeholder."""
    if chat is None or tokenizer is None:
        return
    for (kind, name), own in zip(chat.markers.items(), getattr(config, "placeholders", ()), strict=True):
        if tokenizer.control_names.get(name) != own:
            told = f"the tokenizer has {kind} token {name!r} with id {tokenizer.control_names.get(name)}"
            raise CheckpointError(f"{where}: {told}, the model expects {own}")


def check_vocabulary(tokenizer: Tokenizer | None, config: Any, where: str) -> None:
    """Raise CheckpointError for a tokenizer with more ids than the model embeds, and one that ends or pads texts with
    another id than a contrastive model expects."""
    size = vocabulary_of(config)
    if tokenizer is None or size is None:
        return
    if tokenizer.vocab_size > size:
        raise CheckpointError(f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, the model embeds {size}")
    if getattr(config, "text_pool", "") == "eos" and tokenizer.eos_id != config.eos_id:
        told = f"the tokenizer ends texts with id {tokenizer.eos_id}, the model reads them at id {config.eos_id}"
        raise CheckpointError(f"{where}: {told}")
    pad = getattr(config, "pad_id", tokenizer.pad_id)
    if pad != tokenizer.pad_id:
        raise CheckpointError(f"{where}: the tokenizer pads with id {tokenizer.pad_id}, the model expects {pad}")
