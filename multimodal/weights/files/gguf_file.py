"""GGUF files of llama.cpp through the `gguf` library: metadata, and tensors as the numbers that they stand for."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.errors import CheckpointError, one_line
from multimodal.system import memory
from multimodal.system.files import shown

MOST_TENSORS, MOST_WEIGHTS = 50_000, 1 << 40
MOST_VALUES = 10_000_000  # in a header, of 300 bytes of memory each; a vocabulary of 250,000 has 2 million


def read_gguf(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by their names in the file, in float32, and the metadata. Raises CheckpointError for a file that is cut,
    damaged, one of several, or of a number type that the library does not know."""
    import numpy as np
    from gguf.quants import dequantize

    try:
        with np.errstate(over="raise"):
            reader = _reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if len(reader.tensors) > MOST_TENSORS or sum(int(one.n_elements) for one in reader.tensors) > MOST_WEIGHTS:
            raise CheckpointError(f"{path}: holds too many weights ({len(reader.tensors)} tensors)")
        if (count := fields.get("split.count", 1)) not in (0, 1):
            raise CheckpointError(f"{path}: is one of {shown(count)} files; join them (llama-gguf-split merges files)")
        memory.require(sum(4 * int(one.n_elements) for one in reader.tensors), path)
        tensors = {}
        for one in reader.tensors:
            shape = [int(size) for size in reversed(one.shape)]
            values = np.ascontiguousarray(dequantize(one.data, one.tensor_type), dtype=np.float32)
            tensors[one.name] = torch.from_numpy(values.copy() if values.base is not None else values).view(shape)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # numpy's and the library's, of all kinds, for bytes that are no such file
        cause = one_line(error, 120)
        raise CheckpointError(f"{path}: a GGUF file of llama.cpp that cannot be read, or is cut ({cause})") from None
    return tensors, fields


def _reader(path: Path) -> Any:
    """The library's reader, for which a value beyond the file's end is an error: it would take it for an empty one, and
    go on for as long as a header claims."""
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):
        values = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if (values := self.values + 1) > MOST_VALUES:
                raise ValueError(f"more than {MOST_VALUES} values")
            self.values = values
            kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
            return np.ndarray(int(count), kind, self.data, int(offset))

    return Reader(path)
