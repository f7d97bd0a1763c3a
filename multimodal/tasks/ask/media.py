"""Images, sound and video of a conversation: read, encoded once, and written among the text as placeholders."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from multimodal.errors import AudioError, CheckpointError, MultimodalError, TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.any_to_text import AnyToText
from multimodal.models.whisper import WhisperEncoderConfig
from multimodal.tokens.audio.arrays import Samples, as_audio
from multimodal.tokens.audio.features import speech_features
from multimodal.tokens.audio.log_mel import HOP, RATE, WHISPER_SAMPLES, log_mel_windows
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.chat.format import ChatFormat, media
from multimodal.tokens.chat.messages import Kind, Message, MessagePart
from multimodal.tokens.image.arrays import as_image
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess
from multimodal.tokens.image.tiles import Tiled, markup, tiled
from multimodal.tokens.video.options import VideoOptions
from multimodal.tokens.video.reading import Frame, frames, read_info
from multimodal.weights.folder import Checkpoint

KEPT = 256 << 20  # bytes of encoded rows that are kept
MOST_SECONDS = 3600.0  # of sound in one recording
FEWER = 4  # frames of a video taken as such that may have the rows of one image


class Medium(NamedTuple):
    """`tensors`: pixels of an image's tiles or a video's frames, or windows of sound; `lengths`: frames of each window
    that are not padding; `shown`: what the pixels are of, with the `times` of a video's frames."""

    kind: Kind
    tensors: Float[Tensor, "N _ _ _"] | Float[Tensor, "N _ _"]
    lengths: Int[Tensor, "N"] | None = None
    tile: Tiled | None = None
    shown: tuple[Image.Image, ...] = ()
    times: tuple[float, ...] = ()


class Encoded(NamedTuple):
    """Rows of a medium for the decoder, their text, and the digest of what was encoded."""

    rows: Float[Tensor, "R D"]
    markup: str
    digest: bytes


class MediaEncoder:
    """Reader and encoder of a checkpoint's media. What was encoded before is not encoded again. `most`: tokens that the
    context holds; more frames or sound are not read."""

    def __init__(self, checkpoint: Checkpoint, video: VideoOptions, most: int | None = None):
        self.checkpoint, self.video, self.most = checkpoint, video, most
        self.model: AnyToText = checkpoint.model
        self.format: ChatFormat = checkpoint.chat
        self.kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with each video that the model does not take as one medium as its frames with their times, and
        its sound among them. Raises UsageError for a kind of input that the model does not take, TextError for more
        images than the context holds, before they are read."""
        count = sum(part.kind == "image" for part in media(messages))
        self._check_count(count)
        made = []
        for one in messages:
            parts: list[MessagePart] = []
            for given in one.parts:
                with _naming(given):
                    for part in self.opened_parts(given):
                        count += part.kind == "image" and part is not given
                        self._check_count(count)
                        parts.append(part)
            made.append(replace(one, parts=tuple(parts)))
        return made

    def opened_parts(self, part: MessagePart) -> Iterator[MessagePart]:
        if part.kind == "video" and self.format.video is None and self.format.image is not None:
            yield from self._frames(part.value)
            return
        if part.kind != "text" and part.kind not in self.format.markers:
            known = ", ".join(self.format.markers) or "text alone"
            raise UsageError(f"model {self.checkpoint.source}: takes no {part.kind} (it takes {known})")
        yield part

    def _frames(self, source: Any) -> Iterator[MessagePart]:
        """Frames in order of time, each after its time; a window of sound stands before the frames that it begins
        with."""
        sound = self._sound_of(source)
        for frame in frames(source, self.video):
            while sound and sound[0][0] <= frame.time:
                start, samples = sound.pop(0)
                yield MessagePart("audio", samples, start)
            yield MessagePart("text", f"{frame.time:.1f} s: ")
            yield MessagePart("image", frame.image, frame.time)
        yield from (MessagePart("audio", samples, start) for start, samples in sound)

    def _sound_of(self, source: Any) -> list[tuple[float, Samples]]:
        """(start in s, samples) of windows of a video's audio track."""
        if self.format.audio is None or (start := read_info(source).audio_start) is None:
            return []
        wave, size = self._wave(source), self.window
        return [
            (start + first / RATE, Samples(wave[None, first : first + size].numpy(), RATE))
            for first in range(0, len(wave), size)
        ]

    @property
    def window(self) -> int:
        """Samples of a window of sound."""
        config = self.model.config.audio
        return 2 * config.context * HOP if isinstance(config, WhisperEncoderConfig) else WHISPER_SAMPLES

    def _check_count(self, count: int) -> None:
        """Raise TextError if so many images alone cannot fit the context."""
        config = self.model.config
        if self.most is None or config.crosses or not count or config.image is None:
            return
        each = config.image_connector.count(self._patches, config.image.grid)
        if count * each > self.most:
            raise TextError(f"{count} images need at least {count * each} tokens, the model's context is {self.most}")

    @property
    def _patches(self) -> int:
        config = self.model.config
        return math.prod(config.image.grid) + config.image_prefix * config.image.prefix

    @inference_mode()
    def __call__(self, messages: Sequence[Message]) -> list[Encoded]:
        """Encode the media of opened messages, in order. Raises ImageError, AudioError, VideoError."""
        return [self._encoded(one) for one in self.read_all(messages)]

    def read_all(self, messages: Sequence[Message]) -> Iterator[Medium]:
        """Read the media of opened messages, in order. Raises ImageError, AudioError, VideoError."""
        parts = list(media(messages))
        several = sum(part.kind == "image" for part in parts) > 1
        return (self.read(part, several) for part in parts)

    def read(self, part: MessagePart, several: bool) -> Medium:
        """Pixels or frames of one part. `several`: it is one of several images. Raises the errors of its kind."""
        with _naming(part):
            return self._read(part, several)

    def _read(self, part: MessagePart, several: bool) -> Medium:
        if part.kind == "audio":
            return self._windows(self._wave(part.value))
        record = self.checkpoint.preprocessing
        if record is None:
            raise CheckpointError(f"model {self.checkpoint.source}: checkpoint has no preprocessing")
        if part.kind == "image":
            image = as_image(part.value)
            tile = tiled(image, record, several)
            return Medium("image", tile.pixels, tile=tile, shown=(image,))
        read: list[Frame] = []
        for frame in frames(part.value, self.video):
            self._check_count(-(-(len(read) + 1) // FEWER))
            read.append(frame)
        if record.tiling is not None and record.tiling.video is not None:
            record = record.replace(mean=record.tiling.video[0], std=record.tiling.video[1])
        pixels = torch.stack([preprocess(one.image, record) for one in read])
        return Medium("video", pixels, None, None, tuple(x.image for x in read), tuple(x.time for x in read))

    def _wave(self, source: Any) -> Float[Tensor, "T"]:
        sound = as_audio(source)
        if isinstance(sound, Samples):
            return torch.cat(list(sound.stream(30.0)))
        most = self._most_seconds
        wave = read_audio(sound, max_seconds=most + 1)
        if len(wave) > most * RATE:
            name = "<bytes>" if isinstance(sound, bytes) else sound
            why = "" if most == MOST_SECONDS else f", which fill the model's context of {self.most} tokens"
            raise AudioError(f"{name}: is longer than {most:g} s{why}")
        return wave

    @property
    def _most_seconds(self) -> float:
        """Seconds of sound that the context holds, at most an hour."""
        config = self.model.config
        if self.most is None or config.crosses or config.audio is None:
            return MOST_SECONDS
        if isinstance(config.audio, WhisperEncoderConfig):
            states = config.audio.context
        else:
            states = self.window // HOP // config.audio.subsample
        rows = max(1, config.audio_connector.count(states))
        return min(MOST_SECONDS, math.ceil(self.most / rows * self.window / RATE) + 1.0)

    def _windows(self, wave: Float[Tensor, "T"]) -> Medium:
        config = self.model.config.audio
        if isinstance(config, WhisperEncoderConfig):
            return Medium("audio", *log_mel_windows(wave, config.bands, self.window))
        return Medium("audio", *speech_features(config.features, list(wave.split(self.window)), config.bands))

    def _encoded(self, one: Medium) -> Encoded:
        hashed = hashlib.sha256(one.tensors.contiguous().numpy().tobytes())
        place = None if one.tile is None else (one.tile.grid, one.tile.size)
        lengths = None if one.lengths is None else one.lengths.tolist()  # silence and padding may be the same
        hashed.update(repr((one.kind, *one.tensors.shape, place, lengths)).encode())
        digest = hashed.digest()
        if (rows := self.kept.get(digest)) is None:
            rows = self.kept[digest] = self._rows(one)
        self.kept.move_to_end(digest)
        while len(self.kept) > 1 and sum(x.nbytes for x in self.kept.values()) > KEPT:
            self.kept.popitem(last=False)
        return Encoded(rows, self.markup(one, len(rows)), digest)

    def markup(self, one: Medium, rows: int) -> str:
        """Text of a medium with so many rows: its markers, in the model's frame."""
        marker = "" if self.model.config.crosses else self.format.markers[one.kind]
        if one.tile is None:
            return marker * rows
        return markup(marker, rows, one.tile.grid, self.checkpoint.preprocessing.tiling)

    @inference_mode()
    def _rows(self, one: Medium) -> Float[Tensor, "R D"]:
        device = self.model.decoder.device
        tensors = one.tensors.to(device)
        if one.kind == "audio":
            return torch.cat(self.model.encode_audio(tensors, one.lengths.to(device)))
        rows = torch.cat([self.model.encode_images(part) for part in tensors.split(16)])
        return assembled(self.model, one, rows, self.checkpoint.preprocessing)


@contextmanager
def _naming(part: MessagePart) -> Iterator[None]:
    """Begin errors with the part's place."""
    try:
        yield
    except MultimodalError as error:
        if not part.place:
            raise
        raise type(error)(f"{part.place}: {error}") from None


def assembled(
    model: AnyToText, one: Medium, rows: Float[Tensor, "N M D"], record: Preprocessing
) -> Float[Tensor, "R D"]:  # fmt: skip
    """Rows of an image or a video from those of its tiles or frames."""
    if one.kind == "video":
        return model.assemble_frames(rows)
    return model.assemble(rows, one.tile.grid, one.tile.size, record.tiling.most if record.tiling is not None else 9)


def row_count(model: AnyToText, one: Medium, record: Preprocessing | None) -> int:
    """Number of rows that a medium becomes, without encoding it."""
    config = model.config
    if one.kind == "audio":
        return sum(config.audio_connector.count(config.audio.states(length)) for length in one.lengths.tolist())
    grid = tuple(side // config.image.patch for side in one.tensors.shape[-2:])
    each = config.image_connector.count(math.prod(grid) + config.image_prefix * config.image.prefix, grid)
    if model.newline is None:
        return len(one.tensors) * each
    rows = torch.zeros(len(one.tensors), each, config.decoder.width, dtype=torch.float32)
    return len(assembled(model, one, rows, record))
