"""Picture files read as a person sees them: upright, opaque, 8 bits a channel, RGB; or refused in one line.

Size limits are checked on the header, before any pixel is decoded. Only formats with a clear signature are
taken.
"""

import contextlib
import ctypes
import functools
import glob
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from multimodal.errors import ImageError, UsageError
from multimodal.system.files import open_media
from multimodal.system.walk import matches, walk

# No TGA or PCX (their signature fits random bytes), no ICO (its header hides the size of the picture inside),
# no EPS or WMF (they run other programs).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "QOI")
SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib", ".tif"}
SUFFIXES |= {".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k", ".qoi"}
ORIENTATION_TAG = 0x0112
# EXIF 2.32, tag 0x0112: where row 0 and column 0 of the stored pixels lie; one transposition undoes each.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
logging.getLogger("PIL").addHandler(logging.NullHandler())  # else Python prints what Pillow logs of a damaged file
# 16 to 8 bits by rounding v·255/65535.
EIGHT_BITS = ((np.arange(65536) * 255 + 32767) // 65535).astype(np.uint8)


@dataclass(frozen=True)
class ImageLimits:
    """Refused before decoding: more pixels than `max_pixels`, longer edge / shorter edge over `max_aspect`.

    The default lets a 200-megapixel phone picture through (about 0.6 GB as RGB).
    """

    max_pixels: int = 200_000_000
    max_aspect: float = 100.0


def read_image(source: str | Path | bytes, limits: ImageLimits = ImageLimits()) -> Image.Image:
    """A file, or a file's bytes, as an upright RGB picture; the first frame of an animation.

    Raises ImageError, one line `PATH: cause (value)`: a missing, empty, truncated, huge or non-image file.
    """
    name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
    with _refusing(name), _quiet_pillow(), open_media(source, name, ImageError) as file:
        image = Image.open(file, formats=FORMATS)
        _check_size(image, limits, name)
        picture = _upright(image, name)
        # without a copy, since no one else has the file's own object; free of its file and its metadata
        return _bare(image._new(image.im) if picture is image else picture)


def to_rgb(image: Image.Image, name: str = "picture") -> Image.Image:
    """Any Pillow image as a person sees it: EXIF turn undone, 16 bits scaled, alpha over white, RGB.

    The result carries no metadata, so that it is never turned twice. Raises ImageError.
    """
    with _refusing(name), _quiet_pillow():
        picture = _upright(image, name)
        return picture if picture is image and not image.info else _bare(image.copy() if picture is image else picture)


def _upright(image: Image.Image, name: str) -> Image.Image:
    """The picture itself where it is RGB already and needs no turn."""
    _load(image)
    turn = TURNS.get(_orientation(image))
    picture = _flatten(image, name)
    return picture if turn is None else picture.transpose(turn)


def _bare(picture: Image.Image) -> Image.Image:
    picture.info = {}
    return picture


def find_images(paths: list[str]) -> list[Path]:
    """Files, folders (recursive, sorted, known suffixes, no dot files) and globs, without repeats.

    Raises UsageError naming the argument that yields nothing.
    """
    if not paths:
        raise UsageError("no picture given (0 paths)")
    found: dict[Path, None] = {}
    for text in paths:
        if not str(text):  # else the working directory
            raise UsageError("'': names no picture")
        images = _expand(text)
        if not images:
            raise UsageError(f"{text}: no picture found ({_why_none(text)})")
        found.update(dict.fromkeys(images))
    return list(found)


def walk_images(folder: str | Path, refused: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Pictures in a folder and those inside it (but not behind a link to a folder), in the order of sorted paths, with
    known suffixes, no dot files. Texts, of which a million are 100 MB, as they are found. A folder that cannot be
    listed goes to `refused`, or is a warning."""
    return walk(str(Path(folder)), SUFFIXES, refused)


def _expand(text: str) -> list[Path]:
    path = Path(text)
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long, which must not stop the others
        return [Path(found) for found in walk_images(path)]
    if os.path.isfile(path):
        return [path]
    found = matches(text) if glob.has_magic(text) else []
    files = (p for match in found for p in (_expand(match) if Path(match).is_dir() else [Path(match)]))
    return [p for p in files if p.suffix.lower() in SUFFIXES]


def _why_none(text: str) -> str:
    path = Path(text)
    if os.path.isdir(path) or (glob.has_magic(text) and not os.path.exists(path)):
        return f"known suffixes: {' '.join(sorted(SUFFIXES))}"
    if os.path.exists(path):
        return "not a regular file: device, pipe or socket"
    return "a link to a file that is not there" if os.path.islink(path) else "no such file"


def _check_size(image: Image.Image, limits: ImageLimits, name: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{name}: picture without pixels ({width}x{height})")
    if width * height > limits.max_pixels:
        raise ImageError(f"{name}: too many pixels ({width}x{height}, limit {limits.max_pixels})")
    aspect = max(width, height) / min(width, height)
    if aspect > limits.max_aspect:
        raise ImageError(f"{name}: too long and thin ({width}x{height}, aspect limit {limits.max_aspect:g})")


def _load(image: Image.Image) -> None:
    if ImageFile.LOAD_TRUNCATED_IMAGES and isinstance(image, ImageFile.ImageFile):
        # Some libraries set this global; the missing part of a file would then be grey without a word.
        raise ImageError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES must be off (True)")
    image.load()


def _orientation(image: Image.Image) -> int:
    # After load(): Pillow turns TIFF itself while loading, and a PNG may carry its EXIF after the pixels.
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # damaged metadata makes viewers show the pixels as stored; so do we
        return 1


def _flatten(image: Image.Image, name: str) -> Image.Image:
    """RGB of 8 bits, alpha composed over white: the colour under full transparency is not seen."""
    alpha = None
    if image.mode.startswith("I") or image.mode == "F":
        image, alpha = _scaled(image, name)
    elif image.has_transparency_data:
        image = _eight_bit_key(image).convert("RGBA")
        alpha = image.getchannel("A")
    if alpha is None:
        return image.convert("RGB") if image.mode != "RGB" else image
    white = Image.new("RGB", image.size, "white")
    white.paste(image.convert("RGB"), mask=alpha)
    return white


def _eight_bit_key(image: Image.Image) -> Image.Image:
    """Pillow keeps the high byte of 16-bit RGB, but all 16 bits of the PNG's transparent colour."""
    key = image.info.get("transparency")
    if image.mode == "La":
        return image.convert("LA")  # premultiplied grey has no direct way to RGBA
    if image.mode != "RGB" or not isinstance(key, tuple) or max(key) < 256:
        return image
    image = image.copy()
    image.info = {**image.info, "transparency": tuple(part >> 8 for part in key)}
    return image


def _scaled(image: Image.Image, name: str) -> tuple[Image.Image, Image.Image | None]:
    """Deep grey as (8-bit grey, alpha). In integers 65535 is white. In floats it is the smallest of 1, 255
    and 65535 that holds every sample, since files do not say which they mean; other ranges are refused."""
    samples = np.asarray(image)
    wrong = samples.size - int(np.isfinite(samples).sum())
    if wrong:
        raise ImageError(f"{name}: samples that are not finite ({wrong} of {samples.size})")
    low, high = samples.min(), samples.max()
    if low < 0 or high > 65535:
        raise ImageError(f"{name}: grey samples outside 0..65535 ({low:g}..{high:g})")
    if image.mode == "F":
        white = next(w for w in (1, 255, 65535) if high <= w)
        return Image.fromarray(np.rint(samples * np.float32(255 / white)).astype(np.uint8)), None
    hidden = image.info.get("transparency")
    alpha = None if hidden is None else Image.fromarray(np.where(samples == hidden, 0, 255).astype(np.uint8))
    return Image.fromarray(EIGHT_BITS[samples]), alpha


@contextlib.contextmanager
def _refusing(name: str):
    try:
        yield
    except ImageError as error:
        text = " ".join(str(error).split())
        raise ImageError(text if text.startswith(name) else f"{name}: {text}") from None
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise ImageError(f"{name}: not a readable picture (no intact header of {known})") from None
    except Exception as error:  # Pillow's decoders raise more than ten types on damaged files
        cause = " ".join(str(error).split()) or "no reason given"
        raise ImageError(f"{name}: cannot be decoded ({type(error).__name__}: {cause})") from error


@functools.cache
def _mute_libtiff() -> None:
    """It prints its own lines to stderr, beside the exception that Pillow raises; Pillow has no switch for that."""
    with contextlib.suppress(OSError, AttributeError):  # a Pillow built without libtiff
        ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler(None)


_quiet_lock = threading.Lock()
_quiet_depth = 0
_quiet_saved = None


@contextlib.contextmanager
def _quiet_pillow():
    """Silences Pillow's warnings and lifts its global pixel limit (ours is ImageLimits) while a thread reads.

    `catch_warnings` alone is not thread-safe: overlapping readers would leave the filter behind.
    """
    global _quiet_depth, _quiet_saved
    _mute_libtiff()
    with _quiet_lock:
        if _quiet_depth == 0:
            caught = warnings.catch_warnings()
            caught.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\.")
            _quiet_saved = (caught, Image.MAX_IMAGE_PIXELS)
            Image.MAX_IMAGE_PIXELS = None
        _quiet_depth += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                caught, Image.MAX_IMAGE_PIXELS = _quiet_saved
                caught.__exit__(None, None, None)
