"""Forward passes of each kind of model, part by part, for `cost`."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import StackConfig
from multimodal.errors import UsageError
from multimodal.models.any_to_text import AnyToText
from multimodal.models.captioner import VisionEncoderDecoder
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa
from multimodal.models.conformer import ConformerCTC, ConformerEncoder
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.speech.canary import Canary
from multimodal.models.speech.moonshine import Moonshine, MoonshineEncoder
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.models.speech.transducer import Transducer
from multimodal.models.speech.wave_encoder import WaveEncoder
from multimodal.models.tabular import FTTransformer
from multimodal.models.text import TextTransformer
from multimodal.models.vision.git import GIT
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper, WhisperEncoder
from multimodal.tokens.audio.log_mel import HOP, RATE

FRAMES = RATE // HOP  # a second
# the models that read each option
READERS = {"length": (TextTransformer,), "seconds": (ConformerEncoder, WaveEncoder, MoonshineEncoder)}


class Sizes(NamedTuple):
    """`length`: tokens, None for the model's context. `seconds` of audio, where the model takes any length."""

    batch: int
    length: int | None
    seconds: int | float


class Part(NamedTuple):
    """A part of the model, after its forward pass. `amount` of the `unit`: 1024 tokens, 1 image, 30 seconds.
    `positions`: length of its sequence. `outputs`: logits or features of a batch. `cached`: numbers of the keys and
    values that generation keeps for each item. `flops` and `in_attention`: of the batch, counted by `cost`."""

    name: str
    unit: str
    amount: int | float
    positions: int
    outputs: tuple[Tensor, ...] = ()
    cached: int = 0
    flops: int = 0
    in_attention: int = 0


def parts(model: nn.Module, sizes: Sizes) -> Iterator[Part]:
    """Runs the parts of a model one after another."""
    return KINDS[type(model)](model, sizes)


def _ids(name: str, model: TextTransformer, sizes: Sizes) -> Tensor:
    config, length = model.config, sizes.length
    if length is not None and config.limit is not None and length > config.limit:
        raise UsageError(f"length {length}: the context of the model's {name} is {config.limit}")
    return torch.zeros(sizes.batch, config.context if length is None else length, dtype=torch.long)


def _cached(stack: StackConfig, positions: int, source: int = 0) -> int:
    cross = stack.block.cross
    return (
        2
        * stack.layers
        * (positions * _key_width(stack.block.attention) + (source * _key_width(cross) if cross else 0))
    )


def _key_width(a: AttentionConfig) -> int:
    return a.key_heads * a.head_size


def _decoder_part(
    name: str, model: TextTransformer, ids: Tensor, outputs: tuple[Tensor, ...], prefix: int = 0, source: int = 0
) -> Part:
    config, count = model.config, ids.shape[1]
    held = min(prefix + count, config.window or prefix + count)
    cached = _cached(config.stack, held, source) if config.causal and config.tied is not None else 0
    return Part(name, "token", count, prefix + count, outputs, cached)


def _text(name: str, model: TextTransformer, sizes: Sizes, source: Tensor | None = None) -> Part:
    ids = _ids(name, model, sizes)
    states = model.states(ids, source)
    outputs = [] if model.config.tied is None else [model.logits(states)]
    if any(head is not None for head in (model.pool, model.classes, model.project)):
        pooled = model.pooled(states)
        heads = [head for head in (model.classes, model.project) if head is not None]
        outputs += [head(pooled) for head in heads] or [pooled]
    outputs += [head(states) for head in (model.detect, model.tags, model.spans) if head is not None]
    return _decoder_part(name, model, ids, tuple(outputs) or (states,), 0, 0 if source is None else source.shape[1])


def _pixels(model: ViT, sizes: Sizes) -> Tensor:
    return torch.empty(sizes.batch, model.config.channels, *model.config.image)


def _image(model: ViT, *outputs: Tensor) -> Part:
    rows, columns = model.config.grid
    return Part("image", "image", 1, rows * columns + model.config.prefix, outputs)


def _audio(model: ConformerEncoder | WaveEncoder | MoonshineEncoder, sizes: Sizes) -> tuple[Tensor, Part]:
    if isinstance(model, WaveEncoder | MoonshineEncoder):
        count = round(sizes.seconds * RATE)
        frames, _ = model(torch.empty(sizes.batch, count), torch.full((sizes.batch,), count))
        return frames, Part("audio", "second", sizes.seconds, frames.shape[1], (frames,))
    count = round(sizes.seconds * FRAMES)
    features = torch.empty(sizes.batch, count, model.config.bands if model.stem is not None else model.config.width)
    frames, _ = model(features, torch.full((sizes.batch,), count))
    return frames, Part("audio", "second", sizes.seconds, frames.shape[1], (frames,))


def _vit(m: ViT, sizes: Sizes) -> Iterator[Part]:
    yield _image(m, m(_pixels(m, sizes)))


def _clip(m: CLIP, sizes: Sizes) -> Iterator[Part]:
    yield _image(m.image, m.encode_image(_pixels(m.image, sizes)))
    ids = _ids("text", m.text, sizes)
    pooled = m.text.states(ids)[:, -1]  # `encode_text` reads the ids, which hold nothing
    yield _decoder_part("text", m.text, ids, (pooled if m.text_project is None else m.text_project(pooled),))


def _coca(m: CoCa, sizes: Sizes) -> Iterator[Part]:
    tokens, _ = m._image_tokens(_pixels(m.image, sizes))
    yield _image(m.image, m.project_image(m.image.pooled(tokens)))
    ids = _ids("text", m.text, sizes)
    count, source = ids.shape[1], tokens[:, 1:]
    texts, words = m._texts(ids)
    yield Part("text", "token", count, count + 1, (texts,), _cached(m.config.text.stack, count + 1))
    logits = m.words(m._decoded(words[:, :count], source))
    yield Part("captions", "token", count, count, (logits,), _cached(m.config.decoder, count, source.shape[1]))


def _captioner(m: VisionEncoderDecoder, sizes: Sizes) -> Iterator[Part]:
    source = m.encode(_pixels(m.image, sizes))
    yield _image(m.image)
    yield _text("captions", m.decoder, sizes, source)


def _git(m: GIT, sizes: Sizes) -> Iterator[Part]:
    source = m.encode(_pixels(m.image, sizes))
    yield _image(m.image)
    ids = _ids("captions", m.decoder, sizes)
    yield _decoder_part("captions", m.decoder, ids, (m._logits(ids, source),), source.shape[1])


def _any_to_text(m: AnyToText, sizes: Sizes) -> Iterator[Part]:
    source = None
    if m.image is not None:
        source = m.encode_images(_pixels(m.image, sizes))
        yield _image(m.image)
    if m.audio is not None:
        conformer = isinstance(m.audio, ConformerEncoder)
        states, part = _audio(m.audio, sizes) if conformer else _whisper_audio(m.audio, sizes)
        source = m.audio_connector(states)
        yield part._replace(outputs=(source,))
    yield _text("text", m.decoder, sizes, source if m.config.crosses else None)


def _encoder_decoder(m: EncoderDecoder, sizes: Sizes) -> Iterator[Part]:
    ids = _ids("source", m.encoder, sizes)
    source = m.encode(ids)
    yield Part("source", "token", ids.shape[1], ids.shape[1])
    yield _text("target", m.decoder, sizes, source)


def _whisper_audio(encoder: WhisperEncoder, sizes: Sizes) -> tuple[Tensor, Part]:
    frames = 2 * encoder.config.context
    source = encoder(torch.empty(sizes.batch, encoder.config.bands, frames))
    return source, Part("audio", "second", frames / FRAMES, source.shape[1])


def _whisper(m: Whisper, sizes: Sizes) -> Iterator[Part]:
    source, part = _whisper_audio(m.encoder, sizes)
    yield part
    yield _text("text", m.decoder, sizes, source)


def _conformer(m: ConformerEncoder, sizes: Sizes) -> Iterator[Part]:
    yield _audio(m, sizes)[1]


def _conformer_ctc(m: ConformerCTC, sizes: Sizes) -> Iterator[Part]:
    frames, part = _audio(m.encoder, sizes)
    yield part._replace(outputs=(m.ctc_logits(frames),))
    if m.decoder is not None:
        yield _text("text", m.decoder, sizes, frames)


def _seq2seq(m: SpeechSeq2Seq, sizes: Sizes) -> Iterator[Part]:
    frames, part = _audio(m.encoder, sizes)
    frames = m.project(frames) if isinstance(m, Canary) and m.project is not None else frames
    yield part
    yield _text("text", m.decoder, sizes, frames)


def _transducer(m: Transducer, sizes: Sizes) -> Iterator[Part]:
    frames, part = _audio(m.encoder, sizes)
    texts, _ = m.predict(torch.full((sizes.batch, 1), m.config.blank))
    yield part._replace(outputs=(m.join(m.from_audio(frames), texts),))


def _table(m: FTTransformer, sizes: Sizes) -> Iterator[Part]:
    numbers = torch.empty(sizes.batch, m.config.numbers, 1) * m.weight
    rows = m.table(torch.zeros(sizes.batch, len(m.config.categories), dtype=torch.long))
    cells = torch.cat([numbers, rows], 1) + m.bias
    tokens = torch.cat([m.class_token.expand(len(cells), 1, -1), cells], 1)
    state = m.stack(tokens, only=torch.zeros(len(tokens), dtype=torch.long))[:, 0]
    yield Part("table", "row", 1, tokens.shape[1], (m.head(torch.relu(state)),))


KINDS: dict[type[nn.Module], Callable[[Any, Sizes], Iterator[Part]]] = {
    TextTransformer: lambda m, sizes: iter([_text("text", m, sizes)]), FTTransformer: _table, ViT: _vit,
    ConformerEncoder: _conformer, CLIP: _clip, CoCa: _coca, VisionEncoderDecoder: _captioner, GIT: _git,
    EncoderDecoder: _encoder_decoder, Whisper: _whisper, ConformerCTC: _conformer_ctc, AnyToText: _any_to_text,
    Transducer: _transducer, Moonshine: _seq2seq, Canary: _seq2seq,
}  # fmt: skip
