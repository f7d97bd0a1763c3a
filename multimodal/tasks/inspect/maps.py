"""Self-attention over a text, an image or an audio file, with names for its positions."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.capture import capture_attention
from multimodal.errors import TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.captioner import CaptionModel
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC, ConformerEncoder
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.models.speech.transducer import Transducer
from multimodal.models.text import TextTransformer
from multimodal.models.vision.tower import ConvTower
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper
from multimodal.tasks.encode.images import pixels_of_one
from multimodal.tokens.audio.features import speech_features
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel, pad_or_trim
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint

LONGEST = 30.0  # seconds of audio, for models of any length


class Axis(NamedTuple):
    """Positions of queries or keys. `unit`: `token` (with `names`), `patch` (`step` pixels, in a `grid` of rows and
    columns after `prefix` tokens) or `second` (`step` seconds apart)."""

    unit: str
    names: tuple[str, ...] = ()
    step: float = 1.0
    grid: tuple[int, int] | None = None
    prefix: int = 0


class AttentionMap(NamedTuple):
    """`weights` sum to 1 over the keys."""

    weights: Float[Tensor, "L H T S"]
    queries: Axis
    keys: Axis


def is_image_model(model: nn.Module) -> bool:
    return isinstance(model, ViT | CLIP | CaptionModel)


def is_audio_model(model: nn.Module) -> bool:
    return isinstance(model, Whisper | ConformerCTC | Transducer | SpeechSeq2Seq | ConformerEncoder)


def image_tower(model: nn.Module) -> ViT | ConvTower:
    """Image tower of an image model."""
    return model if isinstance(model, ViT) else model.image


def tower_of(model: nn.Module) -> ViT:
    """The image tower, if it attends to patches. Raises UsageError for a convolutional one."""
    if isinstance(tower := image_tower(model), ConvTower):
        raise UsageError(f"expected an image tower of patches, got {type(tower).__name__}, which is convolutional")
    return tower


@inference_mode()
def attention(checkpoint: Checkpoint, input_: str) -> AttentionMap:
    """Self-attention over a text, or an image or audio file; of an encoder-decoder, that of the encoder.

    Raises UsageError, TextError (an empty text or one longer than the context), ImageError, AudioError,
    CheckpointError."""
    model = checkpoint.model
    if is_image_model(model):
        return image_attention(tower_of(model), read_pixels(checkpoint, input_))
    if is_audio_model(model):
        with capture_attention() as captured:
            _, axis = encode_audio(model, input_)
        encoder = getattr(model, "encoder", model)
        blocks = encoder.blocks if isinstance(encoder, ConformerEncoder) else encoder.stack.blocks
        return AttentionMap(_own(blocks, captured), axis, axis)
    tokenizer = checkpoint.required_tokenizer()
    if isinstance(model, EncoderDecoder):
        stack, ids = model.encoder.stack, source_ids(checkpoint, input_)
        with capture_attention() as captured:
            model.encode(_row(ids, model))
    elif isinstance(model, TextTransformer):
        stack, ids = model.stack, text_ids(checkpoint, input_)
        with capture_attention() as captured:
            model.states(_row(ids, model))
    else:
        raise UsageError(f"model {checkpoint.source}: expected text, images or speech, got {checkpoint.kind}")
    axis = Axis("token", names(tokenizer, ids))
    return AttentionMap(_own(stack.blocks, captured), axis, axis)


def text_ids(checkpoint: Checkpoint, text: str) -> list[int]:
    """Token ids of a text. Raises TextError for an empty text or one longer than the context."""
    model, tokenizer = checkpoint.model, checkpoint.required_tokenizer()
    start, end = tokenizer.frame
    end = [] if model.config.causal else end
    return fitting("text", [*start, *tokenizer.encode(text), *end], model.config.context)


def source_ids(checkpoint: Checkpoint, text: str) -> list[int]:
    """Token ids for an encoder."""
    tokenizer = checkpoint.required_tokenizer()
    start, end = tokenizer.frame
    start = [] if tokenizer.language_ids else start
    return fitting("text", [*start, *tokenizer.encode(text), *end], checkpoint.model.config.encoder.context)


def fitting(what: str, ids: list[int], context: int) -> list[int]:
    """Return `ids`. Raises TextError for none or too many."""
    if not ids:
        raise TextError(f"{what}: is empty")
    if len(ids) > context:
        raise TextError(f"{what}: has {len(ids)} tokens, the model's context is {context}")
    return ids


def names(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """Text of each token, with ␣ for a space; a token that is not text has its number."""
    found = []
    for number in ids:
        alone, twice = (tokenizer.decode([number] * count, skip_control=False) for count in (1, 2))
        # some tokenizers drop the space of the first token
        text = twice.removeprefix(alone) if twice.startswith(alone) else alone
        text = "".join({" ": "␣", "\n": "↵", "\t": "⇥"}.get(sign, sign) for sign in text)
        found.append(text if text and "\ufffd" not in text else f"#{number}")
    return tuple(found)


@inference_mode()
def image_attention(tower: ViT, pixels: Float[Tensor, "3 H W"]) -> AttentionMap:
    """Self-attention over a preprocessed image."""
    with capture_attention() as captured:
        tower.tokens(pixels[None].to(tower.embed.weight.device))
    axis = patches(tower, pixels)
    return AttentionMap(_own(tower.stack.blocks, captured), axis, axis)


def read_pixels(checkpoint: Checkpoint, file: str) -> Float[Tensor, "3 H W"]:
    """Read and preprocess an image. Raises ImageError, CheckpointError."""
    known_preprocessing(checkpoint)
    return pixels_of_one(Path(file), checkpoint.preprocessing)


def patches(tower: ViT, pixels: Float[Tensor, "3 H W"]) -> Axis:
    rows, columns = (edge // tower.config.patch for edge in pixels.shape[-2:])
    return Axis("patch", (), tower.config.patch, (rows, columns), tower.config.prefix)


def encode_audio(model: nn.Module, file: str) -> tuple[Float[Tensor, "1 S D"], Axis]:
    """Encoder states of an audio file; warns if it is cut. Raises AudioError."""
    device = next(model.parameters()).device
    if isinstance(model, Whisper):
        encoder = model.config.encoder
        wave = _window(file, 2 * encoder.context * HOP)
        mel = log_mel(pad_or_trim(wave, 2 * encoder.context * HOP), encoder.bands)
        return model.encoder(mel[None].to(device)), Axis("second", step=2 * HOP / RATE)
    encoder = model if isinstance(model, ConformerEncoder) else model.encoder
    wave = _window(file, round(LONGEST * RATE))
    features, lengths = speech_features(encoder.config.features, [wave], encoder.config.bands)
    frames, _ = encoder(features.to(device), lengths.to(device))
    return frames, Axis("second", step=encoder.config.seconds)


def _window(file: str, samples: int) -> Float[Tensor, "T"]:
    wave = read_audio(Path(file), RATE)
    if len(wave) > samples:
        long, seen = len(wave) / RATE, samples / RATE
        warnings.warn(f"{file}: has {long:.1f} s, only the first {seen:g} s are used", stacklevel=4)
    return wave[:samples]


def _row(ids: Sequence[int], model: nn.Module) -> Tensor:
    return torch.tensor([list(ids)], device=next(model.parameters()).device)


def _own(blocks: nn.ModuleList, captured: list[tuple[nn.Module, Tensor]]) -> Float[Tensor, "L H T S"]:
    """Self-attention of the first item, by layer. Raises UsageError for attention without weights."""
    return stacked({id(block.attention) for block in blocks}, captured)


def stacked(modules: set[int], captured: list[tuple[nn.Module, Tensor]]) -> Float[Tensor, "L H T S"]:
    found = [weights[0].float().cpu() for module, weights in captured if id(module) in modules]
    if not found:
        raise UsageError("attention without weights (linear attention)")
    return torch.stack(found)
