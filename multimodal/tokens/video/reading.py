"""Video files as frames with times, streamed with constant memory."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

from PIL import Image

from multimodal.errors import UsageError, VideoError
from multimodal.system.files import source_name
from multimodal.tokens.audio.container import ends_inside, promised_seconds
from multimodal.tokens.audio.damage import SHORT_SECONDS, SHORT_SHARE, DamagedSpan
from multimodal.tokens.demux import demuxed
from multimodal.tokens.video.decoding import Decoder
from multimodal.tokens.video.options import VideoOptions
from multimodal.tokens.video.sampling import Listed, Times, grid, scene_times
from multimodal.tokens.video.upright import Upright, check_frame

DEFAULTS = VideoOptions()
MISSING = "missing: the video ends early"
VideoInput = str | Path | bytes | BufferedIOBase | IO[bytes]


class DamagedVideo(UserWarning):
    """A video ends early or is damaged; its readable frames are used."""


class Frame(NamedTuple):
    """`time`: seconds from the start of the video. `image`: upright RGB with square pixels."""

    time: float
    image: Image.Image


class VideoInfo(NamedTuple):
    """`duration`: seconds. `width`, `height`: as shown. `rate`: mean frames per second, None if not stated.
    `audio_start`: seconds from the start of the video to the first sample of `read_audio`; None without audio."""

    duration: float
    width: int
    height: int
    rate: float | None
    audio_start: float | None

    @property
    def has_audio(self) -> bool:
        return self.audio_start is not None


def frames(
    source: VideoInput, options: VideoOptions = DEFAULTS, damage: list[DamagedSpan] | None = None
) -> Iterator[Frame]:
    """Yield sampled frames in order of time. A frame is the one shown at a wanted time, which seeks do not change.

    Presentation times, rotation and the shape of pixels are respected; one frame is in memory at a time. `source`: a
    path, bytes, or a seekable binary file. Frames that cannot be decoded are left out, and a video may end early:
    `damage` receives the spans; without it a DamagedVideo warning tells.

    Raises VideoError for a source without a readable frame; an attached cover is none."""
    name, spans, count = _name(source), [], 0
    times = _scene_times(source, options, name, spans)
    with _measured(source, name, times is None and not _is_endless(options)) as (container, stream, file, span):
        times = times or grid(options, *span)
        decoder = Decoder(container, stream, name, spans)
        upright = Upright(stream.sample_aspect_ratio, name)
        for time, decoded in decoder.at(times):
            count += 1
            yield Frame(round(time, 6) + 0.0, upright(decoded))  # not -0.0, of MPEG-TS
        if not count:
            raise decoder.none()
        if decoder.finished:
            spans += _early_end(decoder, container, stream, file)
    spans = list(dict.fromkeys(spans))  # a search for scenes has met them before
    if damage is not None:
        damage += spans
    elif spans:
        more = f" and {len(spans) - 1} more" if len(spans) > 1 else ""
        text = f"{name}: {spans[0].what} ({spans[0].start:.2f} to {spans[0].end:.2f} s{more})"
        warnings.warn(DamagedVideo(text), stacklevel=2)


def frame_at(source: VideoInput, time: float) -> Frame:
    """The frame shown at `time` (seconds). Raises VideoError."""
    name = _name(source)
    with opened(source, name) as (container, stream, _):
        decoder = Decoder(container, stream, name, [])
        for found, decoded in decoder.at(Listed([max(time, 0.0)])):
            return Frame(round(found, 6) + 0.0, Upright(stream.sample_aspect_ratio, name)(decoded))
        raise decoder.none()


def read_info(source: VideoInput) -> VideoInfo:
    """Facts of a video, by its header and its first frame. Raises VideoError."""
    name = _name(source)
    size = frame_at(source, 0.0).image.size
    with _measured(source, name, True) as (container, stream, _, (_, duration)):
        start, sound = (container.start_time or 0) / 1e6, next(iter(container.streams.audio), None)
        first = None
        if sound is not None:
            first = max(0.0, float((sound.start_time or 0) * (sound.time_base or 0)) - start)
        return VideoInfo(duration, *size, float(stream.average_rate) if stream.average_rate else None, first)


@contextmanager
def opened(source: VideoInput, name: str) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the container, its video stream (the first default one, else the first) and the file."""
    if not isinstance(source, str | Path | bytes):
        source.seek(0)
    with demuxed(source, name, VideoError, "video") as (container, file):
        if not (streams := _shown(container)):
            kinds = ", ".join(stream.type for stream in container.streams) or "no streams"
            cover = "; an attached cover image is not a video" if container.streams.video else ""
            raise VideoError(f"{name}: no video stream ({container.format.name}: {kinds}{cover})")
        readable = [one for one in streams if one.codec_context is not None]
        if not readable:
            raise VideoError(f"{name}: unknown video codec ({container.format.name})")
        stream = next((one for one in readable if one.disposition & type(one.disposition).default), readable[0])
        if stream.width and stream.height:  # 0 if only the frames state it
            check_frame(stream.width, stream.height, name)
        yield container, stream, file


def is_audio_alone(source: VideoInput) -> bool:
    """Return True for a container with audio and no video, but for a cover: a recording of a phone or a browser."""
    place = source.tell() if callable(getattr(source, "tell", None)) else None
    try:
        with demuxed(source, _name(source), VideoError, "video") as (container, _):
            return bool(container.streams.audio) and not _shown(container)
    except VideoError:  # reading it says what is wrong
        return False
    finally:
        if place is not None:
            source.seek(place)


def _shown(container: Any) -> list[Any]:
    """Video streams that are no attached cover."""
    return [one for one in container.streams.video if not one.disposition & type(one.disposition).attached_pic]


def _scene_times(source: VideoInput, options: VideoOptions, name: str, damage: list[DamagedSpan]) -> Times | None:
    if options.scenes is None:
        return None
    with opened(source, name) as (container, stream, file):
        decoder = Decoder(container, stream, name, damage)
        times = scene_times(decoder.frames(), options.scenes, options.max_frames)
        damage += _early_end(decoder, container, stream, file)
        return times


def _is_endless(options: VideoOptions) -> bool:
    """Return True for a grid that needs no length of the video."""
    return options.every_s is not None and options.max_frames is None


@contextmanager
def _measured(
    source: VideoInput, name: str, needed: bool
) -> Iterator[tuple[Any, Any, Any, tuple[float, float | None]]]:
    """`opened`, with the first frame and, if `needed`, the length of the video in seconds: by the header, or where it
    states none, by the packets. Of Matroska that does not start at 0, writers state the length or the end."""
    with ExitStack() as stack:
        container, stream, file = stack.enter_context(opened(source, name))
        tick, start = float(stream.time_base or 0), (container.start_time or 0) / 1e6
        first, length = max(0.0, (stream.start_time or 0) * tick - start), None
        if not needed:
            first = 0.0
        elif stream.duration:
            length = stream.duration * tick
        elif container.duration and container.duration / 1e6 > first and not (_is_matroska(container) and start > 0):
            length = container.duration / 1e6 - first
        else:
            length = max(_packets_end(container, stream) - start - first, 0.0)
            stack.close()
            container, stream, file = stack.enter_context(opened(source, name))
        yield container, stream, file, (first, length)


def _packets_end(container: Any, stream: Any) -> float:
    import av

    end, tick = 0.0, float(stream.time_base or 0)
    with suppress(av.error.FFmpegError, OSError):
        if container.duration:
            container.seek(container.duration)
    try:
        for packet in container.demux(stream):
            if packet.pts is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * tick)
    except (av.error.FFmpegError, OSError, IndexError):
        pass
    return end


def _is_matroska(container: Any) -> bool:
    return "matroska" in container.format.name


def _early_end(decoder: Decoder, container: Any, stream: Any, file: Any) -> list[DamagedSpan]:
    promised = promised_seconds(container, stream, file) or 0.0
    late = max(0.0, (stream.start_time or 0) * decoder.tick - decoder.start)
    missing = promised + (-decoder.start if _is_matroska(container) else late) - decoder.end  # FFmpeg's tag is the end
    short = missing > SHORT_SECONDS and missing > SHORT_SHARE * promised
    return [DamagedSpan(decoder.end, decoder.end + max(missing, 0.0), MISSING)] if short or ends_inside(file) else []


def _name(source: VideoInput) -> str:
    """Name of a source in errors. Raises UsageError for another type, and a file that cannot seek."""
    if isinstance(source, bytes):
        return "<bytes>"
    if isinstance(source, str | Path):
        return source_name(source)
    if not callable(getattr(source, "read", None)) or not getattr(source, "seekable", lambda: False)():
        raise UsageError(f"video: expected a path, bytes or a seekable file (got {type(source).__name__})")
    return f"<{type(source).__name__}>"
