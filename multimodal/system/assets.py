"""Where the files that ship with the project lie: vocabularies, models, labels, sample pictures and sound."""

from pathlib import Path

from multimodal.errors import CheckpointError

_HERE = Path(__file__).resolve().parents[1]  # the package
_ROOTS = (_HERE / "assets", _HERE.parent / "assets")  # an installed wheel, then a checkout


def asset(*parts: str) -> Path:
    """Path of a shipped file or folder, `asset("vocabularies", "gpt2.tiktoken.gz")`.

    Raises CheckpointError naming it when neither an installed wheel nor a checkout has it.
    """
    for root in _ROOTS:
        if (path := root.joinpath(*parts)).exists():
            return path
    raise CheckpointError(f"assets/{'/'.join(parts)}: not part of this installation")


def shipped() -> dict[str, Path]:
    """The models that ship with the project: name to checkpoint folder."""
    return {folder.parent.name: folder.parent for root in _ROOTS for folder in sorted(root.glob("*/manifest.json"))}
