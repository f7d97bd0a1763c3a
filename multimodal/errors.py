"""Typed errors. Each message is one line that names the file or flag, the cause and the value."""


class MultimodalError(Exception):
    """Base of every error a user can cause; the command line prints it as one line and exits 1."""


class UsageError(MultimodalError):
    """A flag or argument has a value that cannot be used."""


class ImageError(MultimodalError):
    """A picture cannot be read, or reading it would be unsafe."""


class AudioError(MultimodalError):
    """A recording cannot be read, or holds no usable sound."""


class TextError(MultimodalError):
    """A text or a label list cannot be used."""


class CheckpointError(MultimodalError):
    """A checkpoint is unknown, damaged, incomplete or does not fit its configuration."""


class DataError(MultimodalError):
    """Training data cannot be read, or too much of it is broken."""


class TrainingError(MultimodalError):
    """A training run cannot go on."""


def demand(flag: str, value: object, fine: bool, wanted: str) -> None:
    """Raises UsageError naming the flag, what it wants and the value."""
    if not fine:
        raise UsageError(f"--{flag} {value}: must be {wanted}")
