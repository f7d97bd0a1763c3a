"""`multimodal convert`: pickled checkpoints, asked for by name, to a folder of ours; and ours to foreign names."""

import os
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import CheckpointError, UsageError
from multimodal.system import memory
from multimodal.system.files import read_json
from multimodal.system.outputs import write_output
from multimodal.weights.archives import read_archive
from multimodal.weights.conventions import check_activation, with_preprocessing
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import CONFIGS, UNSAFE, architecture_config, families, load, load_foreign
from multimodal.weights.table import Tensors


def convert(
    source: Path | str, target: Path, architecture: str | None = None, to: str | None = None,
    config: Path | None = None, dtype: torch.dtype | None = None, preprocessing: str | Path | None = None,
) -> Checkpoint:  # fmt: skip
    """Reads `source` (a pickled file, or whatever `load` takes) and writes `target`: a checkpoint folder of
    ours, or with `to` a .safetensors file under that family's names. `preprocessing`: as `load` takes it, for the
    folder. Raises CheckpointError, UsageError."""
    if os.path.lexists(target):
        raise UsageError(f"{target}: exists already")
    path = Path(source)
    with memory.naming(source):
        checkpoint = _from_pickle(path, architecture, config) if path.suffix in UNSAFE else load(source, architecture)
    checkpoint = with_preprocessing(checkpoint, preprocessing)
    if to is None:
        save_folder(checkpoint, target, dtype)
    else:
        _export(checkpoint, target, to)
    return checkpoint


def read_pickled(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and configuration of a .pt file, which is read as data."""
    return _tensors_of(read_archive(path), path)


def _tensors_of(content: Any, path: Path) -> tuple[Tensors, dict[str, Any]]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a state dict")
    config = {"dims": dict(content["dims"])} if "dims" in content else {}
    for key in ("model_state_dict", "state_dict", "model"):
        if isinstance(content.get(key), dict):
            content = content[key]
            break
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__}, not a tensor")
    # a model wrapped in DistributedDataParallel saves under this prefix
    return {name.removeprefix("module."): value for name, value in content.items()}, config


def _from_pickle(path: Path, architecture: str | None, config: Path | None) -> Checkpoint:
    tensors, found = read_pickled(path)
    if architecture:
        found = architecture_config(architecture)
        check_activation(path, architecture, bool(found.get("quick_gelu", "vision_cfg" not in found)))
    elif config:
        found = read_json(config)
    elif not found:
        beside = [path.parent / name for name in CONFIGS if (path.parent / name).is_file()]
        found = read_json(beside[0]) if beside else {}
    return load_foreign(tensors, found, str(path), path.parent)


def _export(checkpoint: Checkpoint, target: Path, to: str) -> None:
    from safetensors.torch import save

    known = families()
    if to not in known:
        raise UsageError(f"--to {to}: unknown format (one of {', '.join(known)})")
    if type(checkpoint.model) is not known[to].model:  # a CoCa is a CLIP, but not one that CLIP's files hold
        raise UsageError(f"--to {to}: holds {known[to].model.__name__} models, not {type(checkpoint.model).__name__}")
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in known[to].export(checkpoint.model).items()}  # tied ones too
    write_output(target, save(tensors, metadata={"format": "pt"}))
