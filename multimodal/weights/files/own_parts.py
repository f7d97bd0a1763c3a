"""Tokenizer and preprocessing of our own in a folder for another program, which may lack them: our commands read these
in place of the folder's."""

import json
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json, read_json, shown
from multimodal.system.records import from_record
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.hub.pipeline import FILE, naming_pipeline, vocabulary
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from

RECORD = "export.json"
PARTS, IMAGES = "multimodal", "preprocessing.json"


def save_parts(folder: Path, tokenizer: Tokenizer | None, preprocessing: Preprocessing | None) -> None:
    """Write the sub-folder `multimodal`."""
    own = folder / PARTS
    own.mkdir()
    if tokenizer is not None:
        tokenizer.save(own)
    if preprocessing is not None:
        (own / IMAGES).write_text(json.dumps(preprocessing.to_dict()), encoding="utf-8")


def check_readable(folder: Path) -> None:
    """Raise CheckpointError for an export that other programs alone read."""
    record = optional_json(folder / RECORD)
    kind, form = record.get("kind"), record.get("format")
    if form == "onnx" or (form == "ctranslate2" and kind != "speech_to_text"):
        own = shown(record.get("model"))
        raise CheckpointError(f"{folder}: an export ({form}), for other programs alone; here use its source, {own}")


def exported_parts(folder: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The card of an export, and fields of a Checkpoint; both are empty for other folders. Raises CheckpointError."""
    if folder is None or not (record := optional_json(folder / RECORD)):
        return {}, {}
    card, own, made = record.get("card", {}), folder / PARTS, {}
    if not isinstance(card, dict):
        raise CheckpointError(f"{folder / RECORD}: card must be a table (got {card!r:.40})")
    if (own / "tokenizer_config.json").is_file():
        tokenizer = tokenizer_from(own)
        if _most_id(folder / FILE) < tokenizer.vocab_size:  # or else another program added tokens since
            made["tokenizer"] = tokenizer
    if (path := own / IMAGES).is_file():
        made["preprocessing"] = from_record(Preprocessing, read_json(path), str(path))
    return card, made


def _most_id(path: Path) -> int:
    """The highest id of a `tokenizer.json`; -1 without one."""
    if not path.is_file():
        return -1
    with naming_pipeline(path):
        return max((i for _, i in vocabulary(read_json(path))), default=-1)
