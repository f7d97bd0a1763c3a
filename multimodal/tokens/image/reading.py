"""Image files as viewers show them: upright, opaque RGB of 8 bits per channel.

Size limits are checked on the header, before decoding. Only formats with a clear signature are read.
"""

import contextlib
import ctypes
import functools
import glob
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageFile, UnidentifiedImageError

from multimodal.errors import ImageError, MultimodalError, UsageError, one_line
from multimodal.system.files import open_media, source_name
from multimodal.system.walk import matches, walk
from multimodal.tokens.image.samples import eight_bit_key, load, open_image, scaled

# Not TGA and PCX (random bytes match their signature), ICO (its header hides the image's size), EPS and WMF (they run
# other programs).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "QOI")
SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib", ".tif"}
SUFFIXES |= {".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k", ".qoi"}
ORIENTATION_TAG = 0x0112
# EXIF 2.32, tag 0x0112: the transposition that undoes each orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
logging.getLogger("PIL").addHandler(logging.NullHandler())  # else Pillow's log about damaged files is printed


@dataclass(frozen=True)
class ImageLimits:
    """Limits checked before decoding: pixels, and longer edge / shorter edge, since crops enlarge a long edge with the
    short one. The default admits a 200-megapixel phone image (about 0.6 GB as RGB)."""

    max_pixels: int = 200_000_000
    max_aspect: float = 1000.0


def read_image(
    source: str | Path | bytes, limits: ImageLimits = ImageLimits(), least: int | None = None
) -> Image.Image:
    """Read a file, or its bytes, as an upright RGB image; of an animation the first frame. Raises ImageError.

    `least`, for training: edges of so many pixels are enough. A large JPEG is then decoded at 1/2, 1/4 or 1/8 of its
    size, by fewer coefficients of each block: quicker, and near the whole decoding resized."""
    name = f"{len(source)} bytes" if isinstance(source, bytes) else source_name(source)
    with _refusing(name), _quiet_pillow(), open_media(source, name, ImageError) as file:
        image = open_image(file, FORMATS)
        check_size(image.size, limits, name)
        if least is not None:
            image.draft(None, (least, least))
        upright = _upright(image, name)
        # no copy, since the file's object is not shared; drops file and metadata
        return _bare(image._new(image.im) if upright is image else upright)


def image_size(source: str | Path | bytes) -> tuple[int, int] | None:
    """(width, height) by the header alone, before rotation; None for what is no image."""
    name = f"{len(source)} bytes" if isinstance(source, bytes) else source_name(source)
    try:
        with _refusing(name), _quiet_pillow(), open_media(source, name, ImageError) as file:
            return open_image(file, FORMATS).size
    except ImageError:
        return None


def to_rgb(image: Image.Image, name: str = "image") -> Image.Image:
    """Convert a Pillow image to upright RGB: EXIF orientation applied, 16 bits scaled, alpha over white. The result has
    no metadata, so it is not rotated twice. Raises ImageError."""
    with _refusing(name), _quiet_pillow():
        upright = _upright(image, name)
        return upright if upright is image and not image.info else _bare(image.copy() if upright is image else upright)


def _upright(image: Image.Image, name: str) -> Image.Image:
    """Upright RGB; the image itself if it is so already."""
    pixels = _load(image)
    turn = TURNS.get(_orientation(image))
    flat = _flatten(pixels, name)
    return flat if turn is None else flat.transpose(turn)


def _bare(image: Image.Image) -> Image.Image:
    image.info = {}
    return image


def find_images(paths: list[str], suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """Expand files, folders (recursive, sorted, known suffixes, no dot files) and globs, without repeats. Raises
    UsageError for an argument without images."""
    if not paths:
        raise UsageError("no image given (0 paths)")
    unique: dict[Path, None] = {}
    for text in paths:
        if not str(text):  # else the working directory
            raise UsageError("'': names no image")
        images = _expand(text, suffixes)
        if not images:
            raise UsageError(f"{source_name(text)}: no image found ({_why_none(text, suffixes)})")
        unique.update(dict.fromkeys(images))
    return list(unique)


def walk_images(
    folder: str | Path, refused: Callable[[OSError], None] | None = None, suffixes: Collection[str] = SUFFIXES
) -> Iterator[str]:
    """Yield the images below a folder, sorted, with known suffixes, no dot files, no links to folders. Strings, since a
    million paths take 100 MB so. A folder that cannot be listed goes to `refused`, or is a warning."""
    return walk(str(Path(folder)), suffixes, refused)


def _expand(text: str, suffixes: Collection[str]) -> list[Path]:
    path = Path(text)
    if os.path.isdir(path):  # Path.is_dir raises for too long names, which must not stop the others
        return [Path(file) for file in walk_images(path, suffixes=suffixes)]
    if os.path.isfile(path):
        return [path]
    names = matches(text) if glob.has_magic(text) else []
    files = (p for match in names for p in (_expand(match, suffixes) if Path(match).is_dir() else [Path(match)]))
    return [p for p in files if p.suffix.lower() in suffixes]


def _why_none(text: str, suffixes: Collection[str]) -> str:
    path = Path(text)
    if "://" in str(text):
        return "URLs are not read; download the file"
    if os.path.isdir(path) or (glob.has_magic(text) and not os.path.exists(path)):
        return f"known suffixes: {' '.join(sorted(suffixes))}"
    if os.path.exists(path):
        return "not a regular file: device, pipe or socket"
    return "a broken link" if os.path.islink(path) else "no such file"


def check_size(
    size: tuple[int, int], limits: ImageLimits, name: str, error: type[MultimodalError] = ImageError
) -> None:
    """Raises `error` for a (width, height) outside of the limits."""
    width, height = size
    if width < 1 or height < 1:
        raise error(f"{name}: image without pixels ({width}x{height})")
    if width * height > limits.max_pixels:
        raise error(f"{name}: too many pixels ({width}x{height}, limit {limits.max_pixels})")
    aspect = max(width, height) / min(width, height)
    if aspect > limits.max_aspect:
        raise error(f"{name}: too long and thin ({width}x{height}, aspect limit {limits.max_aspect:g})")


def _load(image: Image.Image) -> Image.Image:
    if ImageFile.LOAD_TRUNCATED_IMAGES and isinstance(image, ImageFile.ImageFile):
        # Some libraries set this global; missing parts of files would silently be grey.
        raise ImageError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES must be off (True)")
    return load(image)


def _orientation(image: Image.Image) -> int:
    # After load(): Pillow rotates TIFF while loading, and a PNG may have its EXIF after the pixels.
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # with damaged metadata viewers show the pixels as stored
        return 1


def _flatten(image: Image.Image, name: str) -> Image.Image:
    """8-bit RGB, with alpha composed over white."""
    alpha = None
    if image.mode.startswith("I") or image.mode == "F":
        image, alpha = scaled(image, name)
    elif image.has_transparency_data:
        image = eight_bit_key(image).convert("RGBA")
        alpha = image.getchannel("A")
    if alpha is None:
        return image.convert("RGB") if image.mode != "RGB" else image
    white = Image.new("RGB", image.size, "white")
    white.paste(image.convert("RGB"), mask=alpha)
    return white


@contextlib.contextmanager
def _refusing(name: str):
    try:
        yield
    except ImageError as error:
        text = one_line(error)
        raise ImageError(text if text.startswith(name) else f"{name}: {text}") from None
    except UnidentifiedImageError:
        tar = name.endswith((".tar", ".tar.gz", ".tgz"))
        cause = "a tar: unpack it" if tar else f"no intact header of {', '.join(FORMATS)}"
        raise ImageError(f"{name}: not a readable image ({cause})") from None
    except Exception as error:  # Pillow's decoders raise more than ten types on damaged files
        cause = " ".join(str(error).split()) or "no reason given"
        raise ImageError(f"{name}: cannot be decoded ({type(error).__name__}: {cause})") from error


@functools.cache
def _mute_libtiff() -> None:
    """Stop libtiff from printing to stderr, for which Pillow has no option."""
    with contextlib.suppress(OSError, AttributeError):  # a Pillow built without libtiff
        ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler(None)


_reading: ContextVar[bool] = ContextVar("_reading", default=False)  # in this thread
_bomb_check = Image._decompression_bomb_check


def _bomb_check_of_others(size: tuple[int, int], **options: bool) -> None:
    if not _reading.get():  # reads have ImageLimits
        _bomb_check(size, **options)


Image._decompression_bomb_check = _bomb_check_of_others


class _PillowWhileReading:
    """Pattern of a warnings filter for the module that warns."""

    pattern = r"PIL\."  # scikit-learn builds the filters again from it

    def match(self, module: str) -> bool:
        return _reading.get() and module.startswith("PIL.")


@contextlib.contextmanager
def _quiet_pillow():
    """Silence Pillow's warnings and lift its pixel limit, in this thread only: `catch_warnings` and
    `MAX_IMAGE_PIXELS` would change both for every thread."""
    _mute_libtiff()
    filters = warnings.filters
    ours = [one for one in filters if isinstance(one[3], _PillowWhileReading)]
    if not ours or filters[0] is not ours[0]:  # the first that matches counts
        filters.insert(0, ("ignore", None, Warning, _PillowWhileReading(), 0))
        for one in ours:
            with contextlib.suppress(ValueError):  # another thread was quicker
                filters.remove(one)
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)
