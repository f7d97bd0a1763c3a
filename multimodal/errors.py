"""Typed errors. Each message is one line that names the file or argument, the cause and the value."""


class MultimodalError(Exception):
    """Base of every error a user can cause; a command prints it as one line and exits with 1.

    `argument`: name of the argument at fault, which begins the message (`UsageError("must be above 0 (got -1)",
    argument="threshold")`)."""

    def __init__(self, problem: object = "", argument: str | None = None):
        super().__init__(problem)
        self.argument = argument

    def __str__(self) -> str:
        problem = super().__str__()
        return f"{self.argument} {problem}" if self.argument else problem


class UsageError(MultimodalError):
    """Invalid value of an argument."""


class ImageError(MultimodalError):
    """Image that cannot be read, or not safely."""


class AudioError(MultimodalError):
    """Recording that cannot be read, or without usable audio."""


class TextError(MultimodalError):
    """Unusable text or list of labels."""


class CheckpointError(MultimodalError):
    """Checkpoint that is unknown, damaged, incomplete or inconsistent with its configuration."""


class DataError(MultimodalError):
    """Training data that cannot be read, or of which too much is broken."""


class TrainingError(MultimodalError):
    """Training run that cannot continue."""


def demand(flag: str, value: object, fine: bool, wanted: str) -> None:
    """Raise UsageError with the flag, its value and its range `wanted`, unless `fine`."""
    if not fine:
        raise UsageError(f"{value}: must be {wanted}", argument=flag)
