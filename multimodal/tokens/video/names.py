"""Which sources are videos, and names of their frames."""

import os
from pathlib import Path
from typing import Any

from multimodal.tokens.demux import VIDEO

SUFFIXES = {f".{name}" for name in VIDEO.split()}
HEAD = 189  # bytes: two packets of a transport stream
# Brands of ISO files that hold images or sound (ISO/IEC 23008-12, 14496-12).
NO_VIDEO = {b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"hevc", b"hevx", b"M4A ", b"M4B "}
MARKS = (b"\x1aE\xdf\xa3", b"FLV\x01", b"\0\0\1\xba", bytes.fromhex("3026b2758e66cf11"))  # Matroska, FLV, MPEG, ASF


class FrameName(str):
    """Name of a frame, such as "clip.mp4 @ 12.4 s", with the `path` of its video and its `time`."""

    path: str
    time: float

    def __new__(cls, path: str, time: float) -> "FrameName":
        made = super().__new__(cls, f"{path} @ {f'{time:.3f}'.rstrip('0').rstrip('.')} s")
        made.path, made.time = path, time
        return made

    def __getnewargs__(self) -> tuple[str, float]:
        return self.path, self.time


def is_video(source: Any) -> bool:
    """Return True for a video rather than an image: a path or URL by its suffix; bytes, a file object or a file of
    another suffix by its first bytes."""
    return _names_video(str(source)) if isinstance(source, str | os.PathLike) else _starts_video(first_bytes(source))


def first_bytes(source: Any) -> bytes:
    """First bytes of a file, bytes or a file object that can go back; none of anything else."""
    if isinstance(source, bytes):
        return source[:HEAD]
    head: Any = b""
    try:
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            if path.is_file():  # a pipe could block
                with path.open("rb") as file:
                    head = file.read(HEAD)
        elif callable(getattr(source, "read", None)) and getattr(source, "seekable", lambda: False)():
            place = source.tell()
            head = source.read(HEAD)
            source.seek(place)
    except (OSError, ValueError):  # also of a closed file, or one opened as text: reading it says what is wrong
        return b""
    return head if isinstance(head, bytes) else b""


def _names_video(name: str) -> bool:
    from multimodal.tokens.image.reading import SUFFIXES as IMAGES

    url = name.lower().startswith(("http://", "https://"))
    suffix = os.path.splitext(name.partition("?")[0] if url else name)[1].lower()
    if url or suffix in SUFFIXES or suffix in IMAGES:
        return suffix in SUFFIXES
    return _starts_video(first_bytes(name))


def _starts_video(head: bytes) -> bool:
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return head[8:12] not in NO_VIDEO
    stream = len(head) == HEAD and head[0] == head[188] == 0x47
    return stream or head.startswith(MARKS) or (head[:4] == b"RIFF" and head[8:12] == b"AVI ")
