"""Lost spans of a recording, and the clock that keeps times correct when packets fail or are missing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

# Tolerance for an early end; estimated lengths and codec priming stay below both.
SHORT_SECONDS, SHORT_SHARE = 0.5, 0.02
# A recorded broadcast starts inside a group of dependent packets, of which a few may not decode.
LEADING_PACKETS = 10
# Gap that is not damage: Opus omits up to 0.4 s of silence (RFC 7587, DTX).
HOLE_SECONDS = 0.45
# Codecs that omit nothing: every gap beyond the jitter is a loss.
WHOLE = ("pcm", "flac", "alac", "vorbis", "wavpack", "tta", "ape")
# Timestamps are rounded: to 1 ms (Matroska), by half a block (Vorbis).
JITTER_SECONDS = 0.03
# Containers without timestamps: losses show in the packets' byte positions only.
TIMELESS = {"mp3", "aac"}
# Gaps that reach further beyond the known (or unknown) length are clock resets and are not filled.
JUMP_SECONDS, JUMP_UNKNOWN = 10.0, 600.0
# Seconds of silence filled in per file; false timestamps could ask for years.
MOST_SILENCE = 3600.0
# Lost spans closer than this are merged.
TOGETHER_SECONDS = 0.5

LOST = "damaged: silence in place of undecodable audio"
MISSING = "missing: the recording ends early"


class DamagedSpan(NamedTuple):
    """Span (seconds) of a recording that could not be read, and the fault."""

    start: float
    end: float
    what: str


class PacketInfo(NamedTuple):
    """Packet of a container without timestamps: first byte, bytes, seconds, kind of frame; `tagged`: it follows a tag
    rather than lost packets."""

    start: int
    size: int
    seconds: float
    kind: tuple[int, int]
    tagged: bool

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass
class DecoderClock:
    """Follows a decoder: seconds returned so far, failed packets, and the silence due before each frame.

    `start`: the container's time of the first packet. `length`: total seconds if known. `promised`: the same by a
    reliable header. `pause`: longest gap that is not a loss. `scale`: called on a loss measured in bytes, for the
    factor of its length. `broken`: reading failed."""

    name: str
    start: float | None = None
    length: float | None = None
    promised: float | None = None
    timeless: bool = False
    pause: float = HOLE_SECONDS
    seconds: float = 0.0
    broken: bool = False
    failed: int = 0
    pending: int = 0
    lost: list[DamagedSpan] = field(default_factory=list)
    begin: float = 0.0
    offset: float | None = None
    place: PacketInfo | None = None
    next: PacketInfo | None = None
    skipped: int = 0
    rate: float | None = None
    behind: float = 0.0
    owed: float = 0.0
    scale: Callable[[], float] | None = None
    filled: float = 0.0

    def put(self, place: PacketInfo) -> None:
        """Set the position of the next packet, for containers without timestamps."""
        self.next = place

    def packet(self, decoded: bool) -> None:
        """Record a packet. Without timestamps, its position gives the loss before it, at the previous bytes per
        second."""
        new, old, self.next = self.next, self.place, None
        if not decoded:
            self.pending += 1
            return
        if new is None or not new.seconds:
            return
        if new.tagged:
            self.pending = 0
        elif old is not None and new.start > old.end:
            lost = (new.start - old.end) / self.rate
            self.owed += lost * self.scale() if self.scale and lost > new.seconds / 2 else lost
            self.behind = max(0, round(self.owed / new.seconds)) * new.seconds
            self.owed -= self.behind
        rate = new.size / new.seconds
        self.rate = rate if self.rate is None else self.rate + 0.02 * (rate - self.rate)
        self.place = new

    def frame(self, time: float | None, seconds: float) -> float:
        """Seconds of silence due before a frame at the container's `time` that lasts `seconds`."""
        if not self.seconds:
            self.begin = (self.start if self.pending and self.start is not None else time) or 0.0
            self.offset = None if time is None else self.begin
        gap, self.behind = self._gap(time), 0.0
        early = not self.seconds and self.pending <= LEADING_PACKETS
        if gap > self.pause or (self.pending and not early):
            self._lose(gap, LOST)
        self.failed += 0 if early else self.pending
        self.pending = 0
        self.seconds += gap + seconds
        self.filled += gap
        return gap

    def _gap(self, time: float | None) -> float:
        if self.timeless:
            gap = self.behind
        elif time is None:
            return 0.0
        else:
            self.offset = time - self.seconds if self.offset is None else self.offset
            gap = time - self.offset - self.seconds
        limit = self.seconds + JUMP_UNKNOWN if self.length is None else self.length + JUMP_SECONDS
        limit = min(limit, self.seconds + MOST_SILENCE - self.filled)
        if gap < -HOLE_SECONDS:  # joined recordings, each with its own clock
            self.offset = None if time is None else time - self.seconds
        elif self.seconds + gap > limit:
            self.offset = None if time is None else time - self.seconds
            self._lose(0.0, f"damaged: a gap of {gap:.0f} s, not filled")
        return gap if (0 if self.pending else JITTER_SECONDS) < gap <= limit - self.seconds else 0.0

    def _lose(self, gap: float, what: str) -> None:
        start = self.seconds
        if self.lost and self.lost[-1].what == what and start - self.lost[-1].end < TOGETHER_SECONDS:
            start = self.lost.pop().start
        self.lost.append(DamagedSpan(start, self.seconds + gap, what))

    def finish(self, cut: bool) -> str | None:
        """One-line summary of the damage, or None; adds an early end to `lost`. `cut`: the file ends inside its
        structure."""
        missing = (self.promised or 0) - self.seconds - max(0, self.begin)
        of = f" of {self.promised:.2f} s" if self.promised else ""
        got = f"(got {self.seconds:.2f} s{of})"
        if (missing > SHORT_SECONDS and missing > SHORT_SHARE * self.promised) or cut or self.broken:
            self.lost.append(DamagedSpan(self.seconds, self.seconds + max(missing, 0), MISSING))
            return f"{self.name}: the recording ends early {got}"
        if not self.lost and not self.failed:
            return None
        silent, first = sum(span.end - span.start for span in self.lost), self.lost[0].start if self.lost else 0
        return f"{self.name}: damaged, {silent:.2f} s replaced by silence, first at {first:.2f} s {got}"
