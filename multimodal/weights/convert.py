"""Convert any checkpoint that can be read, pickled ones too, to a folder of ours or to a family's own names."""

import os
from pathlib import Path

from multimodal.errors import UsageError
from multimodal.system import memory
from multimodal.system.files import path_of
from multimodal.system.outputs import write_output
from multimodal.weights.conventions import with_preprocessing
from multimodal.weights.files.store_options import Store
from multimodal.weights.files.stored import to_stored
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import families, open_checkpoint


def convert(
    source: Path | str, target: Path | str, architecture: str | None = None, to: str | None = None,
    config: Path | str | None = None, store: Store = "float32", preprocessing: str | Path | None = None,
) -> Checkpoint:  # fmt: skip
    """Write `source` as a checkpoint folder, or with `to` as a .safetensors file under that family's names.

    `source`: whatever `load` takes, and pickled weights: a file, a folder or hub repository with `pytorch_model.bin`,
    sharded or not. They are read as data; nothing in them is executed. `config`: a foreign configuration file, in place
    of the one beside the weights. `store`: number type of the weights, int8 for a folder alone. `preprocessing`: as in
    `load`, for the folder. Raises CheckpointError, UsageError; a `target` that exists is refused."""
    target = path_of(target, UsageError, "target")
    config = None if config is None else path_of(config, UsageError, "config")
    if os.path.lexists(target):
        raise UsageError(f"{target}: already exists, and convert overwrites nothing; name a new path")
    if to is not None and preprocessing is not None:
        raise UsageError(f"is for a checkpoint folder, not for {to}, which holds weights alone",
                         argument="preprocessing")  # fmt: skip
    with memory.naming(source):
        checkpoint = open_checkpoint(source, architecture, config, pickled=True)
    checkpoint = with_preprocessing(checkpoint, preprocessing)
    if to is None:
        save_folder(checkpoint, target, store)
    else:
        _export(checkpoint, target, to, store)
    return checkpoint


def _export(checkpoint: Checkpoint, target: Path, to: str, store: Store) -> None:
    from safetensors.torch import save

    if store == "int8":
        raise UsageError(f"int8 is for a checkpoint folder, not for {to}", argument="store")
    known = families()
    if to not in known:
        raise UsageError(f"{to}: unknown format (one of {', '.join(known)})", argument="to")
    if type(checkpoint.model) is not known[to].model:  # a CoCa is a CLIP, but not one that CLIP's files hold
        raise UsageError(
            f"{to}: holds {known[to].model.__name__} models, not {type(checkpoint.model).__name__}", argument="to"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = known[to].export(checkpoint.model)
    # clones, since safetensors refuses tied tensors
    tensors = {name: tensor.clone() for name, tensor in to_stored(tensors, store, str(target)).items()}
    write_output(target, save(tensors, metadata={"format": "pt"}))
