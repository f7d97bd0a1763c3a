"""Typed errors. Each message is one line that names the file or argument, the cause and the value."""

from collections.abc import Iterable, Sequence


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


class VideoError(ImageError):
    """Video that cannot be read, or has no frames. An ImageError, since its frames take the place of images."""


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


def one_line(error: object, most: int | None = None) -> str:
    """The message of an error or warning on one line, cut after `most` characters; without one the name of its type."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def few(names: Sequence[str], most: int = 5) -> str:
    """Join the first names, each cut at 40 characters."""
    return ", ".join([*(f"{name:.40}" for name in names[:most]), *(["…"] if len(names) > most else [])]) or "none"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest of the known names: `, did you mean --size?`, or an empty text."""
    import difflib  # only an error needs it

    near = difflib.get_close_matches(name, known, 1)
    return f", did you mean {near[0]}?" if near else ""


def multiple_of(divisor: str, settings: object, name: str) -> None:
    """Raise UsageError for a field of `settings` that is no multiple of its field `divisor`, which is not checked."""
    value, by = getattr(settings, name), getattr(settings, divisor)
    demand(name, value, by < 1 or value % by == 0, f"a multiple of {divisor} ({by})")


def demand(argument: str, value: object, fine: bool, wanted: str) -> None:
    """Raise UsageError with the argument, what it must be (`wanted`) and its value, unless `fine`."""
    if not fine:
        raise UsageError(f"must be {wanted} (got {value})", argument=argument)
