"""What of a recording is lost, and where: the clock that keeps times true when packets fail or are missing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

# Estimated lengths and codec priming stay below both.
SHORT_SECONDS, SHORT_SHARE = 0.5, 0.02
# A stream cut from a broadcast starts inside a group of dependent packets; a few of them may not decode.
LEADING_PACKETS = 10
# A jump of the container's clock that is no damage: Opus leaves out at most 0.4 s of silence (RFC 7587, DTX).
HOLE_SECONDS = 0.45
# Codecs that leave out nothing, where every jump beyond the jitter is a loss.
WHOLE = ("pcm", "flac", "alac", "vorbis", "wavpack", "tta", "ape")
# Clocks of sound containers are rounded: to 1 ms (Matroska), by half a block of Vorbis.
JITTER_SECONDS = 0.03
# Containers whose packets carry no times, where a loss shows in the packets' places in the file only.
TIMELESS = {"mp3", "aac"}
# A clock that jumps further than this beyond the known length was set anew: no such silence is filled in.
JUMP_SECONDS, JUMP_UNKNOWN = 10.0, 600.0
# No more silence than this is filled in altogether: a clock and a length that lie would ask for years of it.
MOST_SILENCE = 3600.0
# Lost spans closer than this are told as one.
TOGETHER_SECONDS = 0.5

LOST = "damaged: silence in place of what cannot be decoded"
MISSING = "missing: the recording ends early"


class Damage(NamedTuple):
    """A span (seconds) of a recording that could not be read, and what is wrong with it."""

    start: float
    end: float
    what: str


class Place(NamedTuple):
    """A packet of a container without times: first byte, bytes, seconds, kind of frame, and whether a tag and not
    lost packets lies before it."""

    start: int
    size: int
    seconds: float
    kind: tuple[int, int]
    tagged: bool

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass
class Clock:
    """Follows a decoder: seconds given out so far, what failed, and the silence due before each frame.

    `start`: the container's time of the first packet. `length`: seconds of the whole as far as known. `promised`: the
    same where the header vouches for it. `pause`: the longest jump that is no loss. `scale`: what the lengths of
    losses told by bytes are to be multiplied by, asked for when there is one. `broken`: reading it came to an error."""

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
    lost: list[Damage] = field(default_factory=list)
    begin: float = 0.0
    offset: float | None = None
    place: Place | None = None
    next: Place | None = None
    skipped: int = 0
    rate: float | None = None
    behind: float = 0.0
    owed: float = 0.0
    scale: Callable[[], float] | None = None
    filled: float = 0.0

    def put(self, place: Place) -> None:
        """Where the packet lies that is decoded next, for a container without times."""
        self.next = place

    def packet(self, decoded: bool) -> None:
        """A packet went through the decoder. The place of one without times tells what was lost before it, at the
        bytes a second of those before."""
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
        """Seconds of silence to put before a frame of the container's `time` that lasts `seconds`."""
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
        if gap < -HOLE_SECONDS:  # joined recordings: each has a clock of its own
            self.offset = None if time is None else time - self.seconds
        elif self.seconds + gap > limit:
            self.offset = None if time is None else time - self.seconds
            self._lose(0.0, f"damaged: a jump of {gap:.0f} s, not filled")
        return gap if (0 if self.pending else JITTER_SECONDS) < gap <= limit - self.seconds else 0.0

    def _lose(self, gap: float, what: str) -> None:
        start = self.seconds
        if self.lost and self.lost[-1].what == what and start - self.lost[-1].end < TOGETHER_SECONDS:
            start = self.lost.pop().start
        self.lost.append(Damage(start, self.seconds + gap, what))

    def finish(self, cut: bool) -> str | None:
        """The one-line complaint about the whole, or None; adds an early end to what is lost.

        `cut`: the file's own structure says that it goes on."""
        missing = (self.promised or 0) - self.seconds - max(0, self.begin)
        of = f" of {self.promised:.2f} s" if self.promised else ""
        got = f"(got {self.seconds:.2f} s{of})"
        if (missing > SHORT_SECONDS and missing > SHORT_SHARE * self.promised) or cut or self.broken:
            self.lost.append(Damage(self.seconds, self.seconds + max(missing, 0), MISSING))
            return f"{self.name}: the recording ends early {got}"
        if not self.lost and not self.failed:
            return None
        silent, first = sum(span.end - span.start for span in self.lost), self.lost[0].start if self.lost else 0
        return f"{self.name}: damaged, {silent:.2f} s of silence for what is lost, first at {first:.2f} s {got}"
