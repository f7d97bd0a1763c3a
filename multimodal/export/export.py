"""`export`: write a model in another program's format."""

import warnings
from pathlib import Path
from typing import Any

from multimodal.export.options import ExportOptions
from multimodal.export.place import check_installed, check_place, export_folder
from multimodal.export.refusals import check_kind
from multimodal.models.whisper import Whisper
from multimodal.system import memory
from multimodal.weights.conventions import GIVEN
from multimodal.weights.files.own_parts import PARTS, save_parts
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def export(
    model: str | Path, target: str | Path, architecture: str | None = None, preprocessing: str | None = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Write a model in the format `to`; return the record of the folder, `export.json`. `model`, `architecture`,
    `preprocessing`: as `load` takes them.

    An export is whole or absent: it is written beside `target`, which it replaces at the end. Raises UsageError for a
    model that the format does not hold, and for a `target` that exists; CheckpointError, OSError."""
    chosen, target = ExportOptions(**options), Path(target)
    if chosen.to != "gguf":
        check_place(target, chosen.overwrite)
    with memory.naming(model):
        checkpoint = load(model, architecture, preprocessing)
        card = {name: fact for name, fact in checkpoint.card.items() if name != "format"}
        record = {"model": str(model), "kind": checkpoint.kind, "format": chosen.to, "store": chosen.store,
                  "card": card}  # fmt: skip
        return WRITERS[chosen.to](checkpoint, target, chosen, record)


def _onnx(checkpoint: Checkpoint, target: Path, options: ExportOptions, record: dict[str, Any]) -> dict[str, Any]:
    from multimodal.export import onnx

    check_installed(*onnx.NEEDS)
    from multimodal.export.client_files import write_client
    from multimodal.export.parts import graphs_of

    graphs = graphs_of(checkpoint)
    with export_folder(target, record, options.overwrite) as folder:
        record |= {"graphs": onnx.write_graphs(graphs, folder, options.store)}
        record |= write_client(checkpoint, folder)
    return record


def _hf(checkpoint: Checkpoint, target: Path, options: ExportOptions, record: dict[str, Any]) -> dict[str, Any]:
    from multimodal.export.hf.folder import parts_of, write_folder

    parts = parts_of(checkpoint)
    with export_folder(target, record, options.overwrite) as folder:
        if parts[2] is None or (parts[2] / PARTS).is_dir():  # also of an earlier export
            save_parts(folder, checkpoint.tokenizer, checkpoint.preprocessing)
        elif GIVEN in checkpoint.card:
            save_parts(folder, None, checkpoint.preprocessing)
        if left := write_folder(checkpoint, parts, folder, options.store):
            warnings.warn(f"{target}: transformers has no such {' and '.join(left)}, left out", stacklevel=3)
    return record


def _ctranslate2(
    checkpoint: Checkpoint, target: Path, options: ExportOptions, record: dict[str, Any]
) -> dict[str, Any]:
    from multimodal.export import ctranslate2
    from multimodal.export.hf.folder import parts_of

    check_kind(checkpoint, "ctranslate2")
    check_installed(*ctranslate2.NEEDS)
    parts = parts_of(checkpoint)
    ctranslate2.check_type(checkpoint, parts)
    with export_folder(target, record, options.overwrite) as folder:
        ctranslate2.write_ctranslate2(checkpoint, parts, folder, options.store)
        if isinstance(checkpoint.model, Whisper):
            save_parts(folder, checkpoint.tokenizer, None)
    for note in ctranslate2.left_out(checkpoint.model):
        warnings.warn(f"{target}: {note}", stacklevel=3)
    return record


def _gguf(checkpoint: Checkpoint, target: Path, options: ExportOptions, record: dict[str, Any]) -> dict[str, Any]:
    from multimodal.export.gguf import check_gguf, write_gguf

    write_gguf(checkpoint, *check_gguf(checkpoint, target, options.overwrite), target, options.store)
    return record | {"files": [target.name]}


WRITERS = {"onnx": _onnx, "hf": _hf, "ctranslate2": _ctranslate2, "gguf": _gguf}
