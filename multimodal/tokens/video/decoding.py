"""Decoded frames of a video stream in order of time, and those shown at given times."""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from multimodal.errors import VideoError
from multimodal.tokens.audio.damage import JITTER_SECONDS, SHORT_SECONDS, DamagedSpan
from multimodal.tokens.video.sampling import Times
from multimodal.tokens.video.upright import check_frame

LOST = "damaged: undecodable frames"
ROUNDING = 1e-6  # seconds by which a time may lie before the frame that it means
JUMP_SECONDS = 1.0  # first distance over which a seek is tried
DECODING_TIMES_ONLY = ("avi", "asf")  # formats without presentation times, which FFmpeg guesses, wrong with B-frames

TimedFrame = tuple[float, Any]  # seconds from the container's start, av.VideoFrame


class Decoder:
    """Decodes one video stream. `damage` receives the spans whose frames are lost.

    `end`: of the last packet, in seconds. `finished`: the stream has been read to its end. `failed`: packets that could
    not be decoded, the last one for the `cause`."""

    def __init__(self, container: Any, stream: Any, name: str, damage: list[DamagedSpan]):
        self.container, self.stream, self.name, self.damage = container, stream, name, damage
        self.start = (container.start_time or 0) / 1e6
        self.tick = float(stream.time_base or 0)
        self.step = 1 / float(stream.average_rate) if stream.average_rate else JITTER_SECONDS
        self.end, self.finished = 0.0, False
        self.failed, self.cause = 0, ""
        self._packets = container.demux(stream)
        # A frame's dts is that of the packet with which the decoder gives it: the time at which it is shown.
        self._by_dts = container.format.name in DECODING_TIMES_ONLY
        self._reach = JUMP_SECONDS  # frames up to this far ahead are decoded; beyond it a seek is cheaper
        self._shift = 0.0  # seconds added to timestamps since they restarted
        self._time: float | None = None  # of the last frame
        self._key: float | None = None  # time of the key frame that was sought
        self._lost: float | None = None  # since when frames are lost

    def none(self) -> VideoError:
        """The error of a stream without frames."""
        failed = f", {self.failed} failed: {self.cause}" if self.failed else ""
        return VideoError(f"{self.name}: no frames (0 decoded{failed})")

    def frames(self) -> Iterator[TimedFrame]:
        """Frames from the present position on, without those that cannot be decoded."""
        import av

        while True:
            try:
                packet = next(self._packets)
            except StopIteration:
                break
            except (av.error.FFmpegError, OSError, IndexError):
                self._lose(None)
                break
            if packet.size and (time := self._seconds(packet)) is not None:
                self.end = max(self.end, time + self.tick * (packet.duration or 0))
            try:
                decoded = packet.decode()
            except av.error.FFmpegError as error:
                self.failed, self.cause = self.failed + 1, error.strerror
                self._lose(self._seconds(packet))
                continue
            for frame in decoded:
                yield from self._timed(frame)
        self.finished = True
        if self._lost is None and self.damage and self.end - (self._time or 0.0) > SHORT_SECONDS:
            self._lost = self._time  # a decoder may give up without an error
        if self._lost is not None:
            self.damage.append(DamagedSpan(self._lost, max(self._lost, self.end), LOST))
            self._lost = None

    def _timed(self, frame: Any) -> Iterator[TimedFrame]:
        time = self._seconds(frame)
        if time is None:
            time = 0.0 if self._time is None else self._time + self.step  # without dts the last frames
        elif self._key is not None and time < self._key - ROUNDING:
            return  # may refer to frames before the key frame
        elif self._time is not None and time <= self._time:
            self._shift += self._time + self.step - time
            time, self._reach = self._time + self.step, math.inf  # seeks need one clock
        if frame.is_corrupt:
            self._lose(time)
            return
        check_frame(frame.width, frame.height, self.name)
        if self._lost is not None:
            self.damage.append(DamagedSpan(min(self._lost, time), time, LOST))
            self._lost = None
        if self._by_dts and self._time is not None:
            self.step = time - self._time  # AVI's header may state the rate of fields
        self._time = time
        yield time, frame

    def _seconds(self, timed: Any) -> float | None:
        """Time of a packet or frame."""
        ticks = timed.dts if self._by_dts or timed.pts is None else timed.pts
        return None if ticks is None else ticks * self.tick - self.start + self._shift

    def _lose(self, time: float | None) -> None:
        if self._lost is None:
            self._lost = (self._time or 0.0) if time is None else time

    def at(self, times: Times) -> Iterator[TimedFrame]:
        """The frame shown at each time, each frame once: the last one at or before it, or the first of all. Times
        after the end have none, unless no other time has one."""
        frames = self.frames()
        shown, held = None, next(frames, None)
        ahead, time = next(frames, None), times.next(0.0)
        while held is not None and time is not None:
            far = ahead is not None and time - ahead[0] > self._reach
            place = time if far and self._may_gain(ahead[0], time) else -1.0
            while place >= 0 and self._jump(place):
                frames = self.frames()
                ahead = next(frames, None)
                later = ahead is not None and ahead[0] > time + ROUNDING  # decoders may give a key frame late
                place = self._key - 2 * ROUNDING if later else -1.0
            while ahead is not None and ahead[0] <= time + ROUNDING:
                held, ahead = ahead, next(frames, None)
            over = ahead is None and time > max(self.end - ROUNDING, held[0] + ROUNDING)
            if shown is None or (held is not shown and not over):
                yield held
            shown = held
            if ahead is None:
                return
            time = times.next(max(ahead[0] - ROUNDING, math.nextafter(time, math.inf)))

    def _may_gain(self, now: float, time: float) -> bool:
        """Return False if the container lists all frames, and no key frame between `now` and `time`."""
        index = self.stream.index_entries
        if not 0 < self.stream.frames <= len(index):
            return True
        before = index.search_timestamp(int((time + self.start) / self.tick))
        return before < 0 or index[before].timestamp * self.tick - self.start > now

    def _jump(self, time: float) -> bool:
        """Continue with the key frame at or before `time`, if the container can seek. Its frames and all after it
        are exact."""
        import av

        for place in _places(time):
            try:
                self.container.seek(int((place + self.start) / self.tick), stream=self.stream)
            except (av.error.FFmpegError, OSError, ZeroDivisionError):
                if place == time:
                    self._reach = math.inf
                    return False
                continue
            key = self._next_key()
            if key is not None and key <= time + ROUNDING:
                self._reach, self._key, self._time = max(self._reach, time - key), key, None
                return True
        self._packets, self._reach = iter(()), math.inf  # not even the start can be read again
        return True

    def _next_key(self) -> float | None:
        """Time of the next key packet, which is read next."""
        import av

        packets = self.container.demux(self.stream)
        try:
            for packet in packets:
                if packet.size and packet.is_keyframe:
                    self._packets = chain([packet], packets)
                    return self._seconds(packet)
        except (av.error.FFmpegError, OSError, IndexError):
            pass
        return None


def _places(time: float) -> Iterator[float]:
    """Times to seek to until there is a key frame at or before `time`: ever earlier ones. MPEG transport streams find
    their first packet only from before their start."""
    yield time
    back = JUMP_SECONDS
    while back < time:
        yield time - back
        back *= 2
    yield from (0.0, -10.0)
