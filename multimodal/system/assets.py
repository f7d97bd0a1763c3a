"""Files that ship with the project (vocabularies, models, sample audio) or with open_clip."""

from importlib.util import find_spec
from pathlib import Path

from multimodal.errors import CheckpointError

_HERE = Path(__file__).resolve().parents[1]  # the package
_ROOTS = (_HERE / "assets", _HERE.parent / "assets")  # an installed wheel, then a checkout
# of each task, the shipped model that answers where none is named; `system/config.py` lets users choose others
DEFAULT_MODELS = {
    "classify": "clip-vit-16", "transcribe": "asr-conformer-en", "caption": "captioner-mini", "generate": "gpt-mini",
    "fill-mask": "bert-mini", "embed": "sentence-mini", "embed-images": "clip-vit-16", "translate": "translator-mini",
    "index": "clip-vit-16", "noise": "whisper-mini", "classification": None, "ask": "any-mini",
    "tag": None, "answer": None,
}  # fmt: skip


def asset(*parts: str) -> Path:
    """Path of a shipped file or folder, such as `asset("vocabularies", "gpt2.tiktoken.gz")`. Raises CheckpointError."""
    for root in _ROOTS:
        if (path := root.joinpath(*parts)).exists():
            return path
    raise CheckpointError(f"assets/{'/'.join(parts)}: not part of this installation")


def shipped() -> dict[str, Path]:
    """Name and checkpoint folder of each shipped model."""
    return {folder.parent.name: folder.parent for root in _ROOTS for folder in sorted(root.glob("*/manifest.json"))}


def model_path(name: str | Path) -> Path:
    """The path, or if nothing is there the folder of the shipped model of this name."""
    path = Path(name)
    return path if path.exists() else shipped().get(str(name), path)


def open_clip_file(name: str) -> Path:
    """Path of a file or folder of the package open_clip, which takes seconds to import. Raises CheckpointError."""
    spec = find_spec("open_clip")
    if spec is None or spec.origin is None:
        raise CheckpointError(f"open_clip's {name} comes with open_clip_torch, which is not installed")
    return Path(spec.origin).parent / name
