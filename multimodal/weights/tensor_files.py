"""Tensors of safetensors files. The header is checked before memory is asked for: a file of a few bytes on disk can
claim any size."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.system import memory
from multimodal.system.files import inside, read_json, shown

MOST_TENSORS = 50_000  # 1000 layers of 50
MOST_HEADER = 16 << 20  # bytes
# of all others, floating-point numbers of 32 bits or less: 4
SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I16": 2, "U16": 2, "BOOL": 1, "I8": 1, "U8": 1}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises CheckpointError when it is missing or damaged, or holds more tensors or
    bytes than can be used."""
    return _read([path])[path]


def read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors that the `weight_map` of an index names, each from the file that it names. Raises CheckpointError as
    `read_tensors` does, and for a file outside of the index's folder."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise CheckpointError(f"{index}: weight_map is not a table of tensor and file ({shown(places)})")
    files = {place: inside(index.parent, place, f"{index}: weight_map") for place in set(places.values())}
    shards = _read(sorted(files.values()))
    for name, place in places.items():
        if name not in shards[files[place]]:
            raise CheckpointError(f"{files[place]}: tensor {shown(name)} is missing, though {index.name} names it")
    return {name: shards[files[place]][name] for name, place in places.items()}


def _read(paths: list[Path]) -> dict[Path, dict[str, Tensor]]:
    from safetensors.torch import load_file

    memory.require(sum(map(_needed, paths)), paths[0] if len(paths) == 1 else paths[0].parent)
    found = {}
    for path in paths:
        with _naming(path):
            found[path] = load_file(path)  # mapped: the bytes are read when they are used
    return found


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        cause = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: cannot be read as safetensors ({cause})") from None


def _needed(path: Path) -> int:
    """Bytes of the tensors, floating-point ones as the float32 that models have."""
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: " + ("not a regular file" if path.exists() else "no such file"))
    with path.open("rb") as file:
        if (header := int.from_bytes(file.read(8), "little")) > MOST_HEADER and header < path.stat().st_size:
            raise CheckpointError(f"{path}: a header of {header} bytes, more than {MOST_HEADER}")
    total = 0
    with _naming(path), safe_open(path, "np") as file:  # reads the header only, and holds it to the file's size
        names = file.keys()
        if len(names) > MOST_TENSORS:
            raise CheckpointError(f"{path}: holds {len(names)} tensors, more than {MOST_TENSORS}")
        for name in names:
            part = file.get_slice(name)
            total += math.prod(part.get_shape()) * SIZES.get(part.get_dtype(), 4)
    return total
