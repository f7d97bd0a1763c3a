"""What a model attends to in a text, a picture or a recording: attention weights with names for their positions."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.capture import capture_attention
from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.models.captioner import Captions
from multimodal.models.clip import CLIP
from multimodal.models.encoder_decoder import TextToText
from multimodal.models.speech import ConformerEncoder
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.models.whisper import JointConformer, SpeechToText
from multimodal.tasks.encode.images import pixels_of_one
from multimodal.tokens.audio.log_mel import HOP, RATE, filterbank_batch, log_mel, pad_or_trim
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint

LONGEST = 30.0  # seconds of a recording, for models that take any length


class Axis(NamedTuple):
    """Positions of one side. `unit`: `token` (with `names`), `patch` (`step` pixels wide, in a `grid` of rows and
    columns behind `prefix` tokens) or `second` (`step` of them from one to the next)."""

    unit: str
    names: tuple[str, ...] = ()
    step: float = 1.0
    grid: tuple[int, int] | None = None
    prefix: int = 0


class Seen(NamedTuple):
    """`weights` sum to 1 over the keys."""

    weights: Float[Tensor, "L H T S"]
    queries: Axis
    keys: Axis


def is_picture_model(model: nn.Module) -> bool:
    return isinstance(model, ViT | CLIP | Captions)


def is_sound_model(model: nn.Module) -> bool:
    return isinstance(model, SpeechToText | JointConformer | ConformerEncoder)


def tower_of(model: nn.Module) -> ViT:
    """The part of a picture model that sees."""
    return model if isinstance(model, ViT) else model.image


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Raises CheckpointError where it is not known."""
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"model {checkpoint.source}: its tokenizer is not known, and is not guessed")
    return checkpoint.tokenizer


@torch.inference_mode()
def attention(checkpoint: Checkpoint, given: str) -> Seen:
    """Self-attention of the model over a text, a picture's or a recording's file; of an encoder-decoder its encoder's.

    Raises UsageError, TextError (a text that is empty or longer than the context), ImageError, AudioError,
    CheckpointError."""
    model = checkpoint.model
    if is_picture_model(model):
        tower, pixels = tower_of(model), picture(checkpoint, given)
        with capture_attention() as seen:
            tower.tokens(pixels[None].to(tower.positions.device))
        axis = patches(tower, pixels)
        return Seen(_own(tower.stack.blocks, seen), axis, axis)
    if is_sound_model(model):
        with capture_attention() as seen:
            _, axis = heard(model, given)
        encoder = getattr(model, "encoder", model)
        blocks = encoder.blocks if isinstance(encoder, ConformerEncoder) else encoder.stack.blocks
        return Seen(_own(blocks, seen), axis, axis)
    tokenizer = tokenizer_of(checkpoint)
    if isinstance(model, TextToText):
        stack, ids = model.encoder.stack, source_ids(checkpoint, given, None)
        with capture_attention() as seen:
            model.encode(_row(ids, model))
    elif isinstance(model, TextTransformer):
        stack, ids = model.stack, text_ids(checkpoint, given)
        with capture_attention() as seen:
            model.states(_row(ids, model))
    else:
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, whose attention is not looked at")
    axis = Axis("token", names(tokenizer, ids))
    return Seen(_own(stack.blocks, seen), axis, axis)


def text_ids(checkpoint: Checkpoint, text: str) -> list[int]:
    """A text as its model reads it. Raises TextError where there is none of it, or more than the context."""
    model, tokenizer = checkpoint.model, tokenizer_of(checkpoint)
    end = [] if model.config.causal or tokenizer.eos_id is None else [tokenizer.eos_id]
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return fitting("text", [*start, *tokenizer.encode(text), *end], model.config.context)


def source_ids(checkpoint: Checkpoint, text: str, language: str | None) -> list[int]:
    """A text as the encoder of an encoder-decoder reads it; without `language` that of no language's token."""
    from multimodal.tasks.text.languages import language_id

    tokenizer = tokenizer_of(checkpoint)
    start = [] if tokenizer.bos_id is None or tokenizer.language_ids else [tokenizer.bos_id]
    start = [language_id(tokenizer, language, "from")] if language is not None else start
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return fitting("text", [*start, *tokenizer.encode(text), *end], checkpoint.model.config.encoder.context)


def fitting(what: str, ids: list[int], context: int) -> list[int]:
    """Raises TextError for no tokens, and for too many."""
    if not ids:
        raise TextError(f"{what}: is empty")
    if len(ids) > context:
        raise TextError(f"{what}: has {len(ids)} tokens, the model's context is {context}")
    return ids


def names(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """What each token stands for; ␣ is a space, and a token that is no text by itself has its number."""
    found = []
    for number in ids:
        alone, twice = (tokenizer.decode([number] * count, skip_control=False) for count in (1, 2))
        # at the begin of a text some tokenizers drop a token's space
        text = twice.removeprefix(alone) if twice.startswith(alone) else alone
        text = "".join({" ": "␣", "\n": "↵", "\t": "⇥"}.get(sign, sign) for sign in text)
        found.append(text if text and "\ufffd" not in text else f"#{number}")
    return tuple(found)


def picture(checkpoint: Checkpoint, file: str) -> Float[Tensor, "3 H W"]:
    """A picture's pixels. Raises ImageError, CheckpointError."""
    known_preprocessing(checkpoint)
    return pixels_of_one(Path(file), checkpoint.preprocessing)


def patches(tower: ViT, pixels: Float[Tensor, "3 H W"]) -> Axis:
    rows, columns = (edge // tower.config.patch for edge in pixels.shape[-2:])
    return Axis("patch", (), tower.config.patch, (rows, columns), tower.config.prefix)


def heard(model: nn.Module, file: str) -> tuple[Float[Tensor, "1 S D"], Axis]:
    """What the encoder makes of a recording; warns of what is left out. Raises AudioError."""
    device = next(model.parameters()).device
    if isinstance(model, SpeechToText):
        encoder = model.config.encoder
        wave = _window(file, 2 * encoder.context * HOP)
        mel = log_mel(pad_or_trim(wave, 2 * encoder.context * HOP), encoder.bands)
        return model.encoder(mel[None].to(device)), Axis("second", step=2 * HOP / RATE)
    encoder = model.encoder if isinstance(model, JointConformer) else model
    features, lengths = filterbank_batch([_window(file, round(LONGEST * RATE))], encoder.config.bands)
    frames, _ = encoder(features.to(device), lengths.to(device))
    return frames, Axis("second", step=encoder.config.subsample * HOP / RATE)


def _window(file: str, samples: int) -> Float[Tensor, "T"]:
    wave = read_audio(Path(file), RATE)
    if len(wave) > samples:
        long, seen = len(wave) / RATE, samples / RATE
        warnings.warn(f"{file}: has {long:.1f} s, of which the first {seen:g} s are looked at", stacklevel=4)
    return wave[:samples]


def _row(ids: Sequence[int], model: nn.Module) -> Tensor:
    return torch.tensor([list(ids)], device=next(model.parameters()).device)


def _own(blocks: nn.ModuleList, seen: list[tuple[nn.Module, Tensor]]) -> Float[Tensor, "L H T S"]:
    """Of the first item, by layer. Raises UsageError for attention that has no weights."""
    return stacked({id(block.attention) for block in blocks}, seen)


def stacked(wanted: set[int], seen: list[tuple[nn.Module, Tensor]]) -> Float[Tensor, "L H T S"]:
    found = [weights[0].float().cpu() for module, weights in seen if id(module) in wanted]
    if not found:
        raise UsageError("this model's attention has no weights to look at (linear attention, or a sparse mask)")
    return torch.stack(found)
