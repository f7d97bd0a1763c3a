"""How long a container says its sound is, where that is a promise and not a guess from the file's size."""

import io
import struct

# The demuxers that may be tried. Playlists and scripts (hls, concat, dash) are left out: they name other files and
# addresses, which a recording given by a stranger must not make us open.
FORMATS = "wav,w64,aiff,au,caf,flac,mp3,ogg,mov,matroska,webm,aac,amr,ac3,eac3,asf,avi,flv,mpeg,mpegts,wv,ape,tta,dsf"
# Sizes that a writer to a pipe leaves in a WAV header, since it cannot come back to fill them in.
PLACEHOLDERS = (range(1), range(0x7FFFF000, 0x80000001), range(0xFFFFF000, 0x100000000))


def promised_seconds(container, file: io.BufferedIOBase) -> float | None:
    """Seconds of the first audio stream by its header; None where none is given or it is only an estimate."""
    kinds, stream = set(container.format.name.split(",")), container.streams.audio[0]
    if "wav" in kinds:
        return _wav_seconds(file)
    if kinds & {"matroska", "webm"}:
        return _matroska_seconds(container, stream)
    if kinds & {"mov", "flac", "caf", "aiff"} or ("mp3" in kinds and _counts_frames(file)):
        return float(stream.duration * stream.time_base) if stream.duration else None
    return None


def _at(file: io.BufferedIOBase, offset: int, size: int) -> bytes:
    """Bytes at an offset, leaving the place where the demuxer reads as it was."""
    place = file.tell()
    file.seek(offset)
    data = file.read(size)
    file.seek(place)
    return data


def _wav_seconds(file: io.BufferedIOBase) -> float | None:
    """Size of the data chunk over the byte rate (PyAV's duration is already cut down to the file's size)."""
    offset, byte_rate = 12, 0
    while len(header := _at(file, offset, 8)) == 8:
        name, size = struct.unpack("<4sI", header)
        if name == b"fmt ":
            byte_rate = struct.unpack("<I", _at(file, offset + 16, 4))[0]
        if name == b"data":
            known = byte_rate and not any(size in span for span in PLACEHOLDERS)
            return size / byte_rate if known else None
        offset += 8 + size + size % 2
    return None


def _matroska_seconds(container, stream) -> float | None:
    """The stream's own DURATION tag, else the segment's duration if no other stream can be the longer one."""
    tag = stream.metadata.get("DURATION", "")
    if tag.count(":") == 2:
        hours, minutes, seconds = (float(part) for part in tag.split(":"))
        return 3600 * hours + 60 * minutes + seconds
    alone = len(container.streams) == 1 and container.duration
    return container.duration / 1e6 if alone else None


def _counts_frames(file: io.BufferedIOBase) -> bool:
    """Whether an mp3 starts with a Xing, Info or VBRI frame; else its duration is a guess from the bit rate."""
    head = _at(file, 0, 10)
    tag = 0
    if head[:3] == b"ID3" and len(head) == 10:
        tag = 10 + sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    frame = _at(file, tag, 4096)
    return any(mark in frame for mark in (b"Xing", b"Info", b"VBRI"))


def ends_inside_page(file: io.BufferedIOBase) -> bool:
    """Whether an Ogg file stops inside its last page. (Its length is found at its end, so it promises none.)"""
    if _at(file, 0, 4) != b"OggS":
        return False
    end = file.seek(0, 2)
    file.seek(0)
    start = max(0, end - 2 * 65307)  # the largest page is 65,307 bytes
    tail = _at(file, start, end - start)
    page = tail[tail.rfind(b"OggS") :]
    segments = page[26] if len(page) > 26 else 255
    return len(page) < 27 + segments + sum(page[27 : 27 + segments])


def starts_without_index(file: io.BufferedIOBase) -> bool:
    """Whether an MP4 that could not be opened lacks its index: recorders write it last, so a cut file has none."""
    offset, kinds = 0, []
    while len(header := _at(file, offset, 8)) == 8:
        size, kind = struct.unpack(">I4s", header)
        if size == 1:
            size = int.from_bytes(_at(file, offset + 8, 8), "big")
        kinds.append(kind)
        if size < 8:
            break
        offset += size
    return kinds[:1] == [b"ftyp"] and b"moov" not in kinds
