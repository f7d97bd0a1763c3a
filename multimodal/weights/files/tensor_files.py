"""Tensors of safetensors files. The header is checked before memory is allocated, since it can claim any size."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from multimodal.errors import CheckpointError, one_line
from multimodal.system import memory
from multimodal.system.files import inside, parse_json, read_json, shown
from multimodal.weights.files.archives import read_pickled
from multimodal.weights.files.formats import check_format

MOST_TENSORS = 50_000  # 1000 layers of 50
MOST_HEADER = 16 << 20  # bytes
# bytes; other types, floats of 32 bits or less and stored int8, become float32
SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I16": 2, "U16": 2, "BOOL": 1, "U8": 1}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises CheckpointError for a missing, damaged or too large file."""
    return _read([path])[path]


def read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of sharded weights, safetensors or pickled: `weight_map` of `index` names the file of each. Raises
    CheckpointError as `read_tensors` and `read_pickled` do, and for a file outside the index's folder."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise CheckpointError(f"{index}: weight_map must map tensors to files (got {shown(places)})")
    files = {place: inside(index.parent, place, f"{index}: weight_map") for place in set(places.values())}
    paths = sorted(files.values())
    if pickled := [path for path in paths if path.suffix != ".safetensors"]:
        memory.require(sum(path.stat().st_size for path in pickled if path.is_file()), index.parent)
        shards = {path: read_pickled(path)[0] for path in paths}
    else:
        shards = _read(paths)
    holders = Counter(name for tensors in shards.values() for name in tensors)
    if doubled := next((name for name, count in holders.items() if count > 1), None):
        raise CheckpointError(f"{index}: {holders[doubled]} of its files hold tensor {shown(doubled)}")
    for name, place in places.items():
        if name not in shards[files[place]]:
            raise CheckpointError(f"{files[place]}: tensor {shown(name)} is missing, though {index.name} lists it")
    return {name: shards[files[place]][name] for name, place in places.items()}


def stored_bytes(weights: Path) -> dict[str, int]:
    """Bytes of each number type in a safetensors file that was loaded, or in those of an index; the most first."""
    places = read_json(weights)["weight_map"].values() if weights.suffix == ".json" else [weights.name]
    sizes: Counter[str] = Counter()
    for place in set(places):
        with (weights.parent / place).open("rb") as file:
            header = parse_json(file.read(int.from_bytes(file.read(8), "little")), str(weights))
        for name, facts in header.items():
            if name != "__metadata__":
                first, end = facts["data_offsets"]
                sizes[facts["dtype"].lower()] += end - first
    return dict(sizes.most_common())


def _read(paths: list[Path]) -> dict[Path, dict[str, Tensor]]:
    from safetensors.torch import load_file

    memory.require(sum(map(_needed, paths)), paths[0] if len(paths) == 1 else paths[0].parent)
    tensors = {}
    for path in paths:
        with _naming(path):
            tensors[path] = load_file(path)  # mapped: bytes are read on use
    return tensors


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError, TypeError) as error:  # TypeError: of a size that torch cannot hold
        cause = one_line(error, 200)
        raise CheckpointError(f"{path}: cannot be read as safetensors ({cause})") from None


def _needed(path: Path) -> int:
    """Bytes that the tensors take in the model."""
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: " + ("not a regular file" if path.exists() else "no such file"))
    check_format(path)
    with path.open("rb") as file:
        if (header := int.from_bytes(file.read(8), "little")) > MOST_HEADER and header < path.stat().st_size:
            raise CheckpointError(f"{path}: a header of {header} bytes, more than {MOST_HEADER}")
    total = 0
    with _naming(path), safe_open(path, "np") as file:  # reads the header only, and compares it with the file's size
        names = file.keys()
        if len(names) > MOST_TENSORS:
            raise CheckpointError(f"{path}: holds {len(names)} tensors, more than {MOST_TENSORS}")
        for name in names:
            part = file.get_slice(name)
            total += math.prod(part.get_shape()) * SIZES.get(part.get_dtype(), 4)
    return total
