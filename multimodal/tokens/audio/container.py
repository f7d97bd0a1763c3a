"""Length of the audio by the container's header, unless it is only estimated from the file's size."""

import io
import re
import struct
from collections.abc import Iterator
from itertools import islice

# Containers whose demuxer gives the header's own length.
KEPT = {"mov", "flac", "caf", "aiff", "au", "wv", "ape", "tta", "dsf", "nistsphere"}
W64 = bytes.fromhex("72696666 2e91cf11 a5d628db 04c10000")
ASF_FILE = bytes.fromhex("a1dcab8c 47a9cf11 8ee400c0 0c205365")
UNCOMPRESSED = (1, 3, 0xFFFE)  # format tags of WAV: PCM, floats, either with more of a header
# Sizes in WAV headers written to a pipe, where the writer cannot seek back.
PLACEHOLDERS = (range(1), range(0x7FFFF000, 0x80000001), range(0xFFFFF000, 0x100000000))
MOST_CHUNKS = 10000  # to walk; a file of empty chunks would take minutes
MOST_FRAGMENTS = 10 * MOST_CHUNKS  # there may be several in a second
STEP = 1 << 20  # bytes searched at once
TS_PACKETS = (188, 192)  # bytes of MPEG-TS's, which begin with a G, without and with a time before it


def promised_seconds(container, stream, file: io.BufferedIOBase) -> float | None:
    """Seconds of an audio stream by its header; None if missing or only an estimate."""
    kinds = set(container.format.name.split(","))
    if "wav" in kinds:
        return _wav_seconds(file)
    if "asf" in kinds:
        return _asf_seconds(file)
    if kinds & {"matroska", "webm"}:
        return _matroska_seconds(container, stream)
    if kinds & KEPT or ("mp3" in kinds and _counts_frames(file)):
        return float(stream.duration * stream.time_base) if stream.duration else None
    return None


def bytes_at(file: io.BufferedIOBase, offset: int, size: int) -> bytes:
    """Bytes at an offset; the demuxer's position is kept."""
    if offset >= 1 << 62:  # from a false size
        return b""
    place = file.tell()
    file.seek(offset)
    data = file.read(size)
    file.seek(place)
    return data


def _wav_seconds(file: io.BufferedIOBase) -> float | None:
    """Samples of a compressed WAV by its fact chunk, since its byte rate may be a guess; else the size of the data
    chunk over the byte rate (PyAV limits its duration to the file's size). As FFmpeg, takes the first of several fmt
    chunks, and of plain samples the byte rate that follows from their size, whatever the header says."""
    offset, kind, rate, byte_rate, samples = 12, 1, 0, 0, 0
    for _ in range(MOST_CHUNKS):
        if len(header := bytes_at(file, offset, 8)) < 8:
            return None
        name, size = struct.unpack("<4sI", header)
        if name == b"fmt " and not rate:
            fields = struct.unpack("<HHIIHH", bytes_at(file, offset + 8, 16).ljust(16, b"\0"))
            kind, channels, rate, byte_rate, _, bits = fields
            if kind in UNCOMPRESSED:
                byte_rate = rate * channels * -(-bits // 8) or byte_rate
        if name == b"fact":
            samples = int.from_bytes(bytes_at(file, offset + 8, 4), "little")
        if name == b"data":
            count, each = (size, byte_rate) if kind in UNCOMPRESSED or not samples else (samples, rate)
            known = each and not any(number in span for number in (size, count) for span in PLACEHOLDERS)
            return count / each if known else None
        offset += 8 + size + size % 2
    return None


def _asf_seconds(file: io.BufferedIOBase) -> float | None:
    """Play duration (0.1 µs) less the preroll (ms) of the file properties; broadcasts have none."""
    head = bytes_at(file, 0, 65536)
    at = head.find(ASF_FILE)
    if at < 0 or len(head) < at + 92:
        return None
    play, _, preroll, flags = struct.unpack("<QQQI", head[at + 64 : at + 92])
    return None if flags & 1 else max(0.0, play / 1e7 - preroll / 1e3) or None


def _matroska_seconds(container, stream) -> float | None:
    """The stream's DURATION tag, else the segment's duration if it is the only stream."""
    if tag := re.fullmatch(r"(\d{1,6}):(\d{1,2}):(\d{1,2}(?:\.\d{1,12})?)", stream.metadata.get("DURATION", "")):
        hours, minutes, seconds = map(float, tag.groups())
        return 3600 * hours + 60 * minutes + seconds
    alone = len(container.streams) == 1 and container.duration
    return container.duration / 1e6 if alone else None


def _counts_frames(file: io.BufferedIOBase) -> bool:
    """Return True if an mp3 starts with a Xing, Info or VBRI frame; else its duration is a guess."""
    head = bytes_at(file, 0, 10)
    tag = 0
    if head[:3] == b"ID3" and len(head) == 10:
        tag = 10 + sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    frame = bytes_at(file, tag, 4096)
    return any(mark in frame for mark in (b"Xing", b"Info", b"VBRI"))


def ends_inside(file: io.BufferedIOBase) -> bool:
    """Return True if a file is shorter than its structure says, for containers without a length in seconds."""
    end, head = _size(file), bytes_at(file, 0, 24)
    if head[:4] == b"OggS":
        return _ends_inside_page(file, end)
    if head[4:8] == b"ftyp":
        return _loses_fragments(file, end)
    for size in TS_PACKETS:
        if all(bytes_at(file, n * size - TS_PACKETS[0], 1) == b"G" for n in (1, 2, 3)):
            return end % size > 0
    size = 0
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        size = 8 + struct.unpack("<I", head[4:8])[0]
    elif head[:16] == W64:
        size = struct.unpack("<Q", head[16:24])[0]
    elif head[:4] == b"caff":
        size = _caf_size(file)
    return end < size * 0.98 and not any(size - 8 in span for span in PLACEHOLDERS)


def _size(file: io.BufferedIOBase) -> int:
    place = file.tell()
    end = file.seek(0, 2)
    file.seek(place)
    return end


def _caf_size(file: io.BufferedIOBase) -> int:
    offset = 8
    for _ in range(MOST_CHUNKS):
        if len(header := bytes_at(file, offset, 12)) < 12:
            break
        size = struct.unpack(">q", header[4:])[0]
        offset += 12 + max(0, size)  # -1: the last chunk extends to the end
        if size < 0:
            break
    return offset


def _ends_inside_page(file: io.BufferedIOBase, end: int) -> bool:
    """Return True if an Ogg file stops inside its last page. (Its length stands at its end.)"""
    start = max(0, end - 2 * 65307)  # the largest page is 65,307 bytes
    tail = bytes_at(file, start, end - start)
    page = tail[tail.rfind(b"OggS") :]
    segments = page[26] if len(page) > 26 else 255
    return len(page) < 27 + segments + sum(page[27 : 27 + segments])


def _loses_fragments(file: io.BufferedIOBase, end: int) -> bool:
    """Return True if a fragmented MP4 stops inside a fragment, or goes on after a broken box, where FFmpeg stops. (Its
    length is that of the fragments found.)"""
    fragmented = False
    for kind, offset, size in islice(_boxes(file), MOST_FRAGMENTS):
        fragmented |= kind == b"moof"
        if size == 0 and kind == b"mdat":  # to the file's end
            return False
        if size < 8 or offset + size > end or not kind.isascii():
            parts = (bytes_at(file, at, STEP + 3) for at in range(offset, end, STEP))
            return fragmented and (kind in (b"moof", b"mdat") or any(b"moof" in part for part in parts))
    return False


def _boxes(file: io.BufferedIOBase) -> Iterator[tuple[bytes, int, int]]:
    """Kind, offset and size of an MP4's boxes. One too small for its header is the last."""
    offset = 0
    while len(header := bytes_at(file, offset, 8)) == 8:
        size, kind = struct.unpack(">I4s", header)
        if size == 1:
            size = int.from_bytes(bytes_at(file, offset + 8, 8), "big")
        yield kind, offset, size
        if size < 8:
            return
        offset += size


def starts_without_index(file: io.BufferedIOBase) -> bool:
    """Return True for an MP4 without its index, which recorders write last, or with a part of it."""
    end, boxes = _size(file), islice(_boxes(file), MOST_CHUNKS)
    kinds = [kind for kind, offset, size in boxes if kind != b"moov" or offset + size <= end]
    return kinds[:1] == [b"ftyp"] and b"moov" not in kinds
