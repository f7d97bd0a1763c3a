"""Open audio and video containers with PyAV: allowed demuxers, no access to other files, limited allocations."""

import ctypes
import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from multimodal.errors import MultimodalError
from multimodal.system.files import open_media
from multimodal.tokens.audio.container import starts_without_index

# Suffixes of containers that hold video.
VIDEO = "mp4 m4v mov f4v webm mkv 3gp 3g2 avi wmv asf flv ogv mpg mpeg vob m2ts"
# Allowed demuxers. Not playlists and scripts (hls, concat, dash, sdp), which name other files and addresses.
FORMATS = "wav,w64,aiff,au,caf,flac,mp3,ogg,mov,matroska,webm,aac,amr,ac3,eac3,asf,avi,flv,mpeg,mpegts,wv,ape,tta,dsf"
FORMATS += ",nistsphere"
# Not a protocol: FFmpeg reads from our file object and can open nothing by itself.
NO_PROTOCOL = "none"
# A false header makes FFmpeg allocate up to 2 GB; tables of hours of audio take a few MB.
MOST_BYTES = 128 << 20


@cache
def _limit_ffmpeg() -> None:
    """Limit FFmpeg's single allocations to `MOST_BYTES`; PyAV has no setting for it."""
    from av.container import core

    with suppress(OSError, AttributeError):
        ctypes.CDLL(core.__file__).av_max_alloc(ctypes.c_size_t(MOST_BYTES))


class _Seeking:
    """File whose `seek` returns FFmpeg's error number: PyAV prints a second exception."""

    def __init__(self, file: IO[bytes] | io.BufferedIOBase):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return self._file.seek(offset, whence)
        except (OSError, ValueError):  # an offset before the start, from a false header
            return -errno.EINVAL


@contextmanager
def demuxed(
    source: str | Path | bytes | io.BufferedIOBase | IO[bytes], name: str, error: type[MultimodalError], kind: str
) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the file. A binary file object is read from its start and stays open. `kind`: what the
    source should be, such as "recording". Raises `error`."""
    import av

    _limit_ffmpeg()
    options = {"format_whitelist": FORMATS, "protocol_whitelist": NO_PROTOCOL}
    with open_media(source, name, error) if isinstance(source, str | Path | bytes) else nullcontext(source) as file:
        try:
            container = av.open(_Seeking(file), options=options, metadata_errors="ignore")
        except (av.error.FFmpegError, ValueError) as cause:
            if starts_without_index(file):
                raise error(f"{name}: the {kind} ends early (an MP4 without its index, moov)") from None
            raise error(f"{name}: not a readable {kind} ({_cause(cause)})") from None
        with container:
            if not (container.streams.audio or container.streams.video) and starts_without_index(file):
                raise error(f"{name}: the {kind} ends early (an MP4 without its index, moov)")
            yield container, file


def _cause(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0]
