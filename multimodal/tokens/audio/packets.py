"""Byte positions of mp3 and ADTS packets, which have no timestamps: losses show as gaps between them."""

import io
from functools import lru_cache

from multimodal.tokens.audio.container import bytes_at
from multimodal.tokens.audio.damage import DecoderClock, PacketInfo

# Bit rates of layer III in kbit/s by index, of MPEG 1 and of MPEG 2 and 2.5; 0: unknown.
MPEG1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
MPEG2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
# Bytes to search for an ADTS packet after the demuxer's position.
FAR = 1 << 20


def tell_place(packet, tick: float, file, clock: DecoderClock) -> bool:
    """Give the clock a packet's position. Return False if it does not start with a frame, or with one unlike both
    neighbours, which would also corrupt the decoder's sample rate."""
    data, last = bytes(packet), clock.place
    size, kind = frame_size(data[:6]), frame_kind(data)
    if size == 0 or packet.pos is None:
        return False
    if clock.pending and last and bytes_at(file, packet.pos + clock.skipped, len(data)) != data:
        # positions of ADTS packets do not count skipped bytes
        clock.skipped += max(0, bytes_at(file, packet.pos + clock.skipped, FAR).find(data))
    place, size = packet.pos + clock.skipped, min(size or len(data), len(data))
    if last and last.kind != kind and not _starts_frame(file, place + size, data):
        return False
    tagged = last is not None and last.end < place and _is_tag(file, last.end)
    clock.put(PacketInfo(place, size, tick * (packet.duration or 0), kind, tagged))
    return True


def ends_in_frame(file: io.BufferedIOBase, last: PacketInfo | None) -> bool:
    """Return True if a file ends inside the `last` decoded packet or a frame after it."""
    place = last.start if last else 0
    while last and frame_kind(head := bytes_at(file, place, 6)) == last.kind and (size := frame_size(head)):
        if len(bytes_at(file, place, size)) < size:
            return True
        place += size
    return False


def frame_size(head: bytes) -> int | None:
    """Bytes of an mp3 (layer III) or ADTS frame by its first 6 bytes; packets before damage are longer. 0: not a frame,
    None: not stated."""
    if len(head) < 6 or head[0] != 0xFF or head[1] < 0xE0:
        return 0
    if not head[1] & 6:
        return (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
    return _layer_size(head[1], head[2])


@lru_cache(maxsize=256)  # the frames of a recording have few headers
def _layer_size(second: int, third: int) -> int | None:
    """Bytes of a frame by two bytes of its header, None for others than layer III."""
    first, layer = second & 0x08, second >> 1 & 3
    kilobits, rate = (MPEG1 if first else MPEG2)[third >> 4], third >> 2 & 3
    if layer != 1 or not kilobits or rate == 3:
        return None
    hertz = (44100, 48000, 32000)[rate] >> {3: 0, 2: 1, 0: 2}.get(second >> 3 & 3, 0)
    return (144 if first else 72) * 1000 * kilobits // hertz + (third >> 1 & 1)


def _starts_frame(file: io.BufferedIOBase, place: int, like: bytes) -> bool:
    """Return True for a frame of the same version, layer and rate as the header `like`."""
    return frame_kind(bytes_at(file, place, 6)) == frame_kind(like)


def frame_kind(head: bytes) -> tuple[int, int]:
    """Version, layer and sample rate bits of an mp3 or ADTS frame, which differ in junk."""
    return (head[1] & 0xFE, head[2] & (0x0C if head[1] & 6 else 0xFC)) if len(head) > 2 else (0, 0)


def _is_tag(file: io.BufferedIOBase, place: int) -> bool:
    """Return True for a tag (ID3, APE, Lyrics3), which joined recordings have between packets."""
    return bytes_at(file, place, 8).startswith((b"ID3", b"TAG", b"APETAG", b"LYRICS"))
