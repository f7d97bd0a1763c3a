"""What a model computes, as stacks over so many positions: the ground of `counts`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from multimodal.blocks.conformer import Subsample
from multimodal.blocks.stack import Stack
from multimodal.errors import UsageError
from multimodal.models.captioner import Captioner
from multimodal.models.clip import CLIP
from multimodal.models.coca import CoCa
from multimodal.models.encoder_decoder import TextToText
from multimodal.models.git import GIT
from multimodal.models.speech import ConformerEncoder, SpeechEncoder
from multimodal.models.tabular import FTTransformer
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.models.whisper import JointConformer, SpeechToText
from multimodal.tokens.audio.log_mel import HOP, RATE

SECOND = RATE // HOP  # frames


@dataclass(frozen=True)
class Tower:
    """One stack with what is before and behind it, of one item.

    `amount` of the `unit`: 1024 tokens, 1 image, 30 seconds. `flops`: of what is outside the stack. `wide`, `narrow`:
    numbers that its training keeps outside the stack, always of 4 bytes, and of the type of linear maps. `mask`:
    `none`, `shared` by heads, or `heads`, a bias that each head has of its own. `cached`: generation keeps keys and
    values, of at most `window` tokens. `turned`: queries and keys are rotated. `narrow_stem`: what comes into the stack
    is a linear map's result, thus in its type."""

    name: str
    body: Stack | ConformerEncoder
    positions: int
    amount: int | float
    unit: str
    source: int = 0
    mask: str = "none"
    flops: int = 0
    wide: int = 0
    narrow: int = 0
    cached: bool = False
    window: int | None = None
    turned: bool = False
    narrow_stem: bool = False


def towers(model: nn.Module, length: int | None, seconds: int | float) -> list[Tower]:
    """Those of one item. `length`: tokens, None: the model's context; `seconds` of sound, where the model does not say
    how many."""
    return _KINDS[type(model)](model, length, seconds)


def linear_flops(module: nn.Module | None, positions: int) -> int:
    """Two for each weight of a linear map and position (a product and a sum)."""
    maps = [] if module is None else [part for part in module.modules() if isinstance(part, nn.Linear)]
    return 2 * positions * sum(part.weight.numel() for part in maps)


def _text(name: str, m: TextTransformer, length: int | None, source: int = 0, prefix: int = 0) -> Tower:
    config, count = m.config, m.config.context if length is None else length
    if config.limit is not None and count > config.limit:
        raise UsageError(f"length {count}: the context of the model's {name} is {config.limit}")
    flops = linear_flops(m.widen, count) + linear_flops(m.transform, count) + linear_flops(m.detect, count)
    flops += linear_flops(m.pool, 1) + linear_flops(m.classes, 1)
    inner, wide, narrow = config.embed_width or config.width, 0, (count + prefix) * config.width
    wide += count * inner if config.stem_norm else 0
    narrow += count * inner if config.embed_width else 0
    if config.tied is not None:
        table = m.head if m.head is not None else m.embed
        flops += 2 * count * table.weight.numel()
        wide += count * config.vocabulary  # the log-softmax of the loss
        narrow += 3 * count * inner if config.transform else 0
    mask = "shared" if config.causal or prefix else "none"
    mask = "heads" if config.positions.kind in ("bucket", "alibi") else mask
    cached = config.causal and config.tied is not None
    return Tower(
        name,
        m.stack,
        count + prefix,
        count,
        "token",
        source,
        mask,
        flops,
        wide,
        narrow,
        cached,
        config.window,
        turned=config.positions.kind == "rotary",
        narrow_stem=config.embed_width is not None,
    )


def _picture(m: ViT) -> Tower:
    rows, columns = m.config.grid
    patches, width = rows * columns, m.config.width
    count, pixels = patches + m.config.prefix, m.config.channels * m.config.image[0] * m.config.image[1]
    flops = 2 * patches * m.embed.weight.numel() + linear_flops(m.head, 1)
    if m.pool is not None:
        seen, attention = count if m.config.map_prefix else patches, m.pool.attention
        maps = linear_flops(attention.query, 1) + linear_flops(attention.out, 1) + linear_flops(m.pool.feed, 1)
        flops += maps + linear_flops(attention.key, seen) + linear_flops(attention.value, seen) + 4 * seen * width
    wide = count * width if m.stem_norm is not None else 0
    return Tower(
        "image", m.stack, count, 1, "image", flops=flops, wide=wide, narrow=pixels + count * width, narrow_stem=True
    )


def _whisper(m: SpeechEncoder) -> Tower:
    count, width = m.config.context, m.config.width
    flops = 2 * count * (2 * m.stem.first.weight.numel() + m.stem.second.weight.numel())
    narrow = count * (2 * m.config.bands + 2 * 2 * width + width + width)
    return Tower("sound", m.stack, count, 2 * count / SECOND, "second", flops=flops, narrow=narrow)


def _conformer(m: ConformerEncoder, seconds: int | float) -> Tower:
    frames, flops, narrow = round(seconds * SECOND), 0, 0
    if m.stem is not None:
        frames, flops, narrow = _subsampled(m.stem, frames, m.config.bands)
    mask = "shared" if m.config.chunk else "none"
    narrow += frames * m.config.width
    return Tower(
        "sound", m, frames, seconds, "second", mask=mask, flops=flops, narrow=narrow, turned=m.config.rotary,
        narrow_stem=m.stem is not None,
    )  # fmt: skip


def _subsampled(stem: Subsample, frames: int, bands: int) -> tuple[int, int, int]:
    """Frames after the stem, its FLOPs, and the numbers that it keeps."""
    channels, flops, kept = stem.first.out_channels, 0, frames * bands
    for stage in range(len(stem.depthwise) + 1):
        frames, bands = (frames + 1) // 2, (bands + 1) // 2
        cells = frames * bands
        convs = [stem.depthwise[stage - 1], stem.pointwise[stage - 1]] if stage else [stem.first]
        flops += 2 * cells * sum(conv.weight.numel() for conv in convs)
        kept += channels * cells * (len(convs) + 1)  # each output, and the last one padded
    return frames, flops + linear_flops(stem.project, frames), kept


def _clip(m: CLIP, length: int | None, seconds: int | float) -> list[Tower]:
    image, text = _picture(m.image), _text("text", m.text, length)
    return [_with(image, linear_flops(m.image_project, 1)), _with(text, linear_flops(m.text_project, 1))]


def _coca(m: CoCa, length: int | None, seconds: int | float) -> list[Tower]:
    image, text = _picture(m.image), _text("text", m.text, length, prefix=1)  # its class token
    seen, flops, width = image.positions, linear_flops(m.image_project, 1), m.config.embed
    if m.image_pool is not None:
        queries, attention = len(m.image_pool.query), m.image_pool.attention
        flops += linear_flops(attention.query, queries) + linear_flops(attention.out, queries)
        flops += linear_flops(attention.key, seen) + linear_flops(attention.value, seen) + 4 * queries * seen * width
        seen = queries
    count = text.positions - 1
    wide, narrow = count * m.config.text.vocabulary, count * m.config.text.width
    words = Tower("captions", m.decoder, count, count, "token", seen - 1, "shared", linear_flops(m.words, count), wide,
                  narrow, cached=True)  # fmt: skip
    return [_with(image, flops), _with(text, linear_flops(m.text_project, 1), cached=True), words]


def _captioner(m: Captioner, length: int | None, seconds: int | float) -> list[Tower]:
    image = _picture(m.image)
    return [image, _text("captions", m.decoder, length, source=image.positions)]


def _git(m: GIT, length: int | None, seconds: int | float) -> list[Tower]:
    image = _picture(m.image)
    text = _text("captions", m.decoder, length, prefix=image.positions)
    return [_with(image, linear_flops(m.project, image.positions)), text]


def _text_to_text(m: TextToText, length: int | None, seconds: int | float) -> list[Tower]:
    source = _text("source", m.encoder, length)
    return [source, _text("target", m.decoder, length, source=source.positions)]


def _speech_to_text(m: SpeechToText, length: int | None, seconds: int | float) -> list[Tower]:
    sound = _whisper(m.encoder)
    return [sound, _text("text", m.decoder, length, source=sound.positions)]


def _joint(m: JointConformer, length: int | None, seconds: int | float) -> list[Tower]:
    sound = _conformer(m.encoder, seconds)
    sound = _with(sound, linear_flops(m.ctc, sound.positions), wide=sound.positions * (m.config.vocabulary + 1))
    return [sound] if m.decoder is None else [sound, _text("text", m.decoder, length, source=sound.positions)]


def _table(m: FTTransformer, length: int | None, seconds: int | float) -> list[Tower]:
    count = m.config.numbers + len(m.config.categories) + 1  # and the class token
    head, width = linear_flops(m.head, 1), m.config.width
    return [Tower("table", m.stack, count, 1, "row", flops=head, wide=count, narrow=count * width)]


def _with(tower: Tower, flops: int, wide: int = 0, cached: bool | None = None) -> Tower:
    cached = tower.cached if cached is None else cached
    return replace(tower, flops=tower.flops + flops, wide=tower.wide + wide, cached=cached)


_KINDS: dict[type[nn.Module], Callable[..., list[Tower]]] = {
    TextTransformer: lambda m, length, seconds: [_text("text", m, length)],
    FTTransformer: _table,
    ViT: lambda m, length, seconds: [_picture(m)],
    ConformerEncoder: lambda m, length, seconds: [_conformer(m, seconds)],
    CLIP: _clip, CoCa: _coca, Captioner: _captioner, GIT: _git, TextToText: _text_to_text,
    SpeechToText: _speech_to_text, JointConformer: _joint,
}  # fmt: skip
