"""`export`: write a model in another program's format."""

from pathlib import Path
from typing import Any

from multimodal.export.options import ExportOptions
from multimodal.export.place import check_place, export_folder
from multimodal.system import memory
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
    check_place(target, chosen.overwrite)
    return _onnx(model, (architecture, preprocessing), target, chosen)


def _onnx(
    name: str | Path, conventions: tuple[str | None, str | None], target: Path, options: ExportOptions
) -> dict[str, Any]:
    from multimodal.export import onnx

    onnx.check_installed(*onnx.NEEDS)
    from multimodal.export.client_files import write_client
    from multimodal.export.parts import graphs_of

    with memory.naming(name):
        checkpoint = load(name, *conventions)
        graphs = graphs_of(checkpoint)
        record = {"model": str(name), "kind": checkpoint.kind, "format": options.to, "store": options.store}
        with export_folder(target, record, options.overwrite) as folder:
            record |= {"graphs": onnx.write_graphs(graphs, folder, options.store)}
            record |= write_client(checkpoint, folder)
    return record
