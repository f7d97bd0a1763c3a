"""Weights files: the one that a folder holds, and formats of other programs, which are named by their first bytes."""

import re
import struct
from pathlib import Path

from multimodal.errors import CheckpointError

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".th", ".pkl")
FOREIGN = (".gguf", ".ggml", ".nemo", ".onnx", ".h5", ".msgpack")
# in order of preference; an index lists the shards of one model
SAFE_NAMES = (
    "open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.safetensors",
    "model.safetensors.index.json",
)  # fmt: skip
PICKLED_NAMES = ("open_clip_pytorch_model.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
CTRANSLATE2_NAME = "model.bin"
HEAD_BYTES = 1 << 16
GGUF = "a GGUF file of llama.cpp"
GGML, CTRANSLATE2 = "a ggml file of whisper.cpp or llama.cpp", "a CTranslate2 model, as faster-whisper has"
NEMO = "a tar archive of NeMo"
MAGIC = {
    b"GGUF": GGUF,
    b"lmgg": GGML,  # 0x67676d6c, little-endian
    b"fmgg": "a ggml file of llama.cpp",
    b"tjgg": "a ggml file of llama.cpp",
    b"\x89HDF": "an HDF5 file of Keras",
    b"\x1f\x8b": "a gzip archive",
}


def is_pickled(path: Path) -> bool:
    """Return True for PyTorch's pickles, and for the index of sharded ones, by name."""
    return path.suffix in PICKLED or path.name.endswith(".bin.index.json")


def find_weights(folder: Path) -> Path:
    """The weights file of a folder, or the index of its shards; safetensors first. Raises CheckpointError when there
    are none, several that are not shards of one model, or an adapter."""
    if (folder / ADAPTER).is_file():  # transformers adds it to a model that lies beside it
        beside = any((folder / name).is_file() for name in (*SAFE_NAMES, *PICKLED_NAMES))
        place = "beside the" if beside else "without its"
        raise CheckpointError(f"{folder}: holds a PEFT adapter ({ADAPTER}) {place} model; merge the two first")
    for names, suffixes in ((SAFE_NAMES, (".safetensors",)), (PICKLED_NAMES, PICKLED), ((), FOREIGN)):
        for name in names:
            if (folder / name).is_file():
                return folder / name
        files = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
        if len(files) == 1:
            return files[0]
        if files:
            raise CheckpointError(f"{folder}: holds {len(files)} weights files, expected one (model.safetensors)")
    raise CheckpointError(f"{folder}: holds no weights files, expected one (model.safetensors)")


def check_format(path: Path) -> None:
    """Raises CheckpointError for a file that neither `load` nor `convert` reads, with its format and what to use."""
    if name := foreign_format(path):
        raise CheckpointError(f"{path}: {name}, not supported; use the original PyTorch or safetensors weights")


def foreign_format(path: Path) -> str:
    """Another program's format by the first bytes of a file, or '' for one that may be readable. Raises CheckpointError
    for a file that cannot be opened."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: a Git LFS pointer in place of the weights (run git lfs pull)")
    return _foreign(head, path.suffix == ".nemo")


def _foreign(head: bytes, nemo: bool) -> str:
    for magic, name in MAGIC.items():
        if head.startswith(magic):
            return name
    if head[257:262] == b"ustar":
        return NEMO if nemo or b"model_config.yaml" in head else "a tar archive (PyTorch before 0.2)"
    if re.match(rb"\x08[\x01-\x20]\x12", head):  # ModelProto: ir_version, producer_name
        return "an ONNX model"
    # CTranslate2: uint32 version, uint16 length, class name that ends with NUL
    if len(head) > 6 and (size := struct.unpack_from("<IH", head)[1]) < 64 and head[6 : 6 + size].endswith(b"Spec\0"):
        return CTRANSLATE2
    return ""
