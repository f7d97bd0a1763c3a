"""NeMo's `.nemo` files, read as data: a tar of `model_config.yaml`, pickled weights and the tokenizer. Nothing is
unpacked to disk, and no code of the file runs."""

import tarfile
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from multimodal.errors import CheckpointError, one_line
from multimodal.system import memory
from multimodal.system.files import shown
from multimodal.system.tars import Header
from multimodal.weights.files.archives import read_member

CONFIG, WEIGHTS, TOKENIZER = "model_config.yaml", "model_weights.ckpt", "tokenizer.model"
MOST_MEMBERS, MOST_SMALL = 1000, 1 << 26  # bytes of a tokenizer
MOST_CONFIG = 1 << 20  # bytes; YAML is slow, and slower with integer keys of one hash


def read_nemo(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, and the configuration with the tokenizer's only file as `sentencepiece`, else None, and all of them by
    their names as `tokenizer_files`. Raises CheckpointError."""
    memory.require(path.stat().st_size, path)
    try:
        with tarfile.open(path, "r:", tarinfo=Header) as archive:
            members = _members(archive, path)
            config = _config(archive, members, path)
            files = {name: _small(archive, one, path) for name, one in members.items() if name.endswith(TOKENIZER)}
            tokenizer = next(iter(files.values())) if len(files) == 1 else None
            weights = members.get(WEIGHTS)
            if weights is None:
                raise CheckpointError(f"{path}: has no {WEIGHTS}")
            tensors = read_member(archive.extractfile(weights), weights.size, path)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CheckpointError(f"{path}: a damaged tar archive ({one_line(error, 100)})") from None
    # a joint network without dropout has one module fewer before its head
    tensors = {name.replace("joint.joint_net.1.", "joint.joint_net.2."): one for name, one in tensors.items()}
    return tensors, config | {"sentencepiece": tokenizer, "tokenizer_files": files}


def _members(archive: tarfile.TarFile, path: Path) -> dict[str, tarfile.TarInfo]:
    """Files of the archive by name. Raises CheckpointError for what is no plain file of its top folder, or is there
    twice."""
    members: dict[str, tarfile.TarInfo] = {}
    for number, member in enumerate(archive):
        name = member.name.removeprefix("./")
        if number >= MOST_MEMBERS:
            raise CheckpointError(f"{path}: holds more than {MOST_MEMBERS} files")
        if member.isdir() and name in ("", "."):
            continue
        if not member.isreg() or member.issparse():
            raise CheckpointError(f"{path}: {shown(name)} is no plain file")
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {shown(name)} lies outside the archive's top folder")
        if name in members:
            raise CheckpointError(f"{path}: holds {shown(name)} twice")
        if member.offset_data + member.size > path.stat().st_size:
            raise CheckpointError(f"{path}: cut off: {shown(name)} needs {member.size} bytes")
        members[name] = member
    return members


def _config(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], path: Path) -> dict[str, Any]:
    if CONFIG not in members:
        raise CheckpointError(f"{path}: has no {CONFIG}")
    try:
        config = yaml.safe_load(_small(archive, members[CONFIG], path, MOST_CONFIG))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        cause = one_line(error, 100)
        raise CheckpointError(f"{path}: {CONFIG} is not plain YAML ({cause})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: {CONFIG}: expected a table ({shown(config)})")
    return config


def _small(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, most: int = MOST_SMALL) -> bytes:
    if member.size > most:
        raise CheckpointError(f"{path}: {shown(member.name)} has {member.size} bytes, more than {most}")
    return archive.extractfile(member).read()
