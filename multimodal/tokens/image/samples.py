"""Samples as 8 bits where Pillow leaves them deeper or misreads them."""

import re
from io import BufferedIOBase
from typing import Any

import numpy as np
from PIL import Image, ImageChops, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from multimodal.errors import ImageError

# 16 to 8 bits by rounding v·255/65535.
EIGHT_BITS = ((np.arange(65536) * 255 + 32767) // 65535).astype(np.uint8)
BITS, PHOTOMETRIC, PLANES, FORMAT = 258, 262, 284, 339  # tags of TIFF 6.0
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")  # SOS, length, components
SIZE_MARKERS = b"\xff\x4f\xff\x51"  # SOC and SIZ begin the codestream of a JPEG 2000
MOST_SCANS = 500  # of a JPEG, each of which may touch all pixels; libjpeg-turbo's advice
DEEP = {"LA": "ya16le", "RGB": "rgb48le", "RGBA": "rgba64le"}  # FFmpeg's names by Pillow's


def open_image(file: BufferedIOBase, formats: tuple[str, ...]) -> Image.Image:
    """Pillow's image of a file. Raises ImageError for a TIFF whose samples Pillow does not know."""
    try:
        return Image.open(file, formats=formats)
    except UnidentifiedImageError:
        file.seek(0)
        if (head := file.read(8))[:4] not in (b"II*\0", b"MM\0*"):
            raise
        tags: Any = ImageFileDirectory_v2(head)
        file.seek(tags.next)
        tags.load(file)
        if not tags.get(BITS):
            raise
        kind = {2: "signed", 3: "float"}.get(tags.get(FORMAT, (1,))[0], "unsigned")
        samples = f"{len(tags[BITS])} x {tags[BITS][0]}-bit {kind} samples, photometric {tags.get(PHOTOMETRIC)}"
        raise ImageError(f"TIFF of a kind that is not supported ({samples})") from None


def load(image: Image.Image) -> Image.Image:
    """The image with its pixels; those are mended that Pillow misreads. Raises ImageError."""
    tiles, stream = getattr(image, "tile", None), None
    if tiles and image.format == "PNG":
        _scale_key(image, tiles[0].args)
    elif tiles and image.format == "TIFF":
        _widen_planes(image)
    elif tiles and image.format == "JPEG2000":
        stream = _deep_stream(image)
    elif tiles and image.format in ("JPEG", "MPO"):
        _check_scans(image)
    image.load()
    return image if stream is None else _of_stream(stream, DEEP[image.mode])


def _scale_key(image: Image.Image, samples: Any) -> None:
    """Scale the transparent grey of 2 or 4 bits to 8, as Pillow does with the pixels."""
    key, step = image.info.get("transparency"), {"L;2": 85, "L;4": 17}.get(samples)
    if step and isinstance(key, int):
        image.info = {**image.info, "transparency": key * step}


def _check_scans(image: Any) -> None:
    """Raise ImageError for a JPEG of too many scans, with those of thumbnails and further frames."""
    scans, place = 0, image.fp.tell()
    image.fp.seek(0)
    tail = b""
    while data := image.fp.read(1 << 20):
        scans += len(SCAN.findall(tail + data))
        tail = data[-4:]
    image.fp.seek(place)
    if scans > MOST_SCANS:
        raise ImageError(f"JPEG of {scans} scans (limit {MOST_SCANS})")


def _widen_planes(image: Any) -> None:
    """Pillow reads the planes of 16-bit colours, if not compressed, as 8 bits."""
    tags, tiles = image.tag_v2, image.tile
    if tags.get(PLANES) == 2 and tags.get(BITS, (8,))[0] == 16 and tiles[0].codec_name == "raw":
        order = "L" if tags.prefix == b"II" else "B"
        image.tile = [tile._replace(args=(f"{tile.args[0]};16{order}", *tile.args[1:])) for tile in tiles]


def _deep_stream(image: Any) -> bytes | None:
    """A JPEG 2000 whose colours have more than 8 bits: Pillow's rounding wraps the brightest to 0."""
    image.fp.seek(0)
    data = image.fp.read() if image.mode in DEEP else b""
    start = data.find(SIZE_MARKERS) + 42  # Ssiz of each component, 3 bytes apart: bits - 1, and the sign
    return data if any(depth & 127 > 7 for depth in data[start : start + 3 * len(image.getbands()) : 3]) else None


def _of_stream(data: bytes, kind: str) -> Image.Image:
    import av  # slow

    codec = av.CodecContext.create("jpeg2000", "r")
    frames: Any = [*codec.decode(av.Packet(data)), *codec.decode(None)]
    if not frames or frames[0].format.name != kind:
        got = frames[0].format.name if frames else "no pixels"
        raise ImageError(f"JPEG 2000 of more than 8 bits must be decoded as {kind} (got {got})")
    return Image.fromarray(EIGHT_BITS[frames[0].to_ndarray()])


def eight_bit_key(image: Image.Image) -> Image.Image:
    """Reduce a PNG's transparent colour to 8 bits, as Pillow does with the pixels of 16-bit RGB."""
    key = image.info.get("transparency")
    if image.mode == "La":
        return image.convert("LA")  # premultiplied grey cannot convert to RGBA directly
    if image.mode != "RGB" or not isinstance(key, tuple) or max(key) < 256:
        return image
    image = image.copy()
    image.info = {**image.info, "transparency": tuple(part >> 8 for part in key)}
    return image


def scaled(image: Image.Image, name: str) -> tuple[Image.Image, Image.Image | None]:
    """Deep grey as (8-bit grey, alpha). White is 65535 in integers of files (4095 in TIFFs of 12 bits); in floats the
    smallest of 1, 255 and 65535 that covers all samples, since files do not state it, and in Pillow's mode I without a
    file the smaller of 255 and 65535, since `convert("I")` keeps the range of 8 bits. Raises ImageError for other
    ranges."""
    samples, tags = np.asarray(image), getattr(image, "tag_v2", {})
    wrong = samples.size - int(np.isfinite(samples).sum())
    if wrong:
        raise ImageError(f"{name}: samples that are not finite ({wrong} of {samples.size})")
    if image.mode == "I" and image.format == "TIFF" and tags.get(FORMAT, (1,)) == (1,):
        samples = samples.view(np.uint32)  # Pillow has no unsigned mode
    low, high = samples.min(), samples.max()
    if low < 0 or high > 65535:
        raise ImageError(f"{name}: grey samples outside 0..65535 ({low:g}..{high:g})")
    hidden = image.info.get("transparency")
    alpha = None if hidden is None else Image.fromarray(np.where(samples == hidden, 0, 255).astype(np.uint8))
    if image.mode == "F":
        white = next(w for w in (1, 255, 65535) if high <= w)
        grey, alpha = np.rint(samples * np.float32(255 / white)).astype(np.uint8), None
    elif image.mode == "I" and image.format is None and high <= 255:
        grey = samples.astype(np.uint8)
    else:
        grey = EIGHT_BITS[samples * 16 + samples // 256 if tags.get(BITS) == (12,) else samples]
    shown = Image.fromarray(grey)
    return ImageChops.invert(shown) if tags.get(PHOTOMETRIC) == 0 else shown, alpha
