"""Settings of the C libraries inside the wheels of PyAV and Pillow, which neither passes on."""

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# A header's lie makes FFmpeg ask for up to 2 GB at once; tables of hours of audio take a few megabytes.
MOST_BYTES = 128 << 20


@cache
def limit_ffmpeg() -> bool:
    """Let no single allocation of FFmpeg exceed `MOST_BYTES`. False where its library is not found."""
    import av

    return _call(av, "av", "libavutil", "av_max_alloc", ctypes.c_size_t(MOST_BYTES))


@cache
def silence_libtiff() -> bool:
    """Keep libtiff from printing what it finds wrong with a file: Pillow raises it."""
    import PIL.Image

    return _call(PIL, "pillow", "libtiff", "TIFFSetErrorHandler", None)


def _call(package: ModuleType, wheel: str, library: str, function: str, argument: Any) -> bool:
    """Calls it in the library that the wheel brought, and that the package has loaded."""
    folder = Path(package.__file__).parent
    for place in (folder.parent / f"{wheel}.libs", folder / ".dylibs"):  # of Linux, of macOS
        for path in place.glob(f"{library}[-.]*"):
            with suppress(OSError, AttributeError):
                getattr(ctypes.CDLL(str(path)), function)(argument)
                return True
    return False
