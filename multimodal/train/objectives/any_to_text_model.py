"""An any-to-text model to train: a new one on trained encoders, or a known one on others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multimodal.blocks.connector import ConnectorConfig
from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError, multiple_of
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerEncoder
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.models.vit import ViT, ViTConfig
from multimodal.models.whisper import WhisperEncoder
from multimodal.system.options import Natural, Positive, Rate
from multimodal.tokens.chat.format import CONTROLS, END, plain_format
from multimodal.tokens.text.bytepair import SPECIALS, BytePairTokenizer
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.train.objectives.text.language import gpt2_weights
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class AnySettings:
    """Sizes of a new model; with `--init` only `dropout` applies."""

    vocabulary: Positive = 1280
    width: Positive = 144
    layers: Positive = 4
    heads: Positive = 4
    context: Positive = 512
    dropout: Rate | None = None  # of the decoder: by default 0, with --init as it has it
    image_layers: Natural = 0  # first layers of the image encoder to use, without its final norm (0: all, with it)
    shuffle: Positive = 2  # a square of that many patches a side becomes one row
    stack: Positive = 2  # so many states of sound become one row

    def __post_init__(self):
        multiple_of("heads", self, "width")


def begin(image: Checkpoint | None, audio: Checkpoint | None, texts: Iterable[str], s: AnySettings) -> Checkpoint:
    """A new decoder and connectors on copies of the encoders of trained models, with a vocabulary learned from `texts`.

    Raises CheckpointError for a model without such an encoder or its preprocessing."""
    tower, encoder = _image_encoder(image), _audio_encoder(audio)
    tokenizer = _tokenizer(BytePairTokenizer.train(texts, s.vocabulary), CONTROLS)
    stack = transformer(s.width, s.layers, s.heads, 4 * s.width, dropout=s.dropout or 0.0)
    decoder = TextConfig(
        tokenizer.vocab_size, s.context, stack, causal=True, tied=True, positions=PositionConfig("rotary")
    )
    connector = lambda part, **more: part and ConnectorConfig(part.config.width, s.width, hidden=s.width, **more)
    grid = tower.config.grid if tower else (0, 0)
    places = grid[0] // s.shuffle * (grid[1] // s.shuffle)
    form = plain_format(image=tower is not None, audio=encoder is not None)
    model = AnyToText(AnyToTextConfig(
        decoder, tuple(tokenizer.control_names[name] for name in form.markers.values()), tower and tower.config,
        connector(tower, shuffle=s.shuffle, positions=places), s.image_layers or None, audio=encoder and encoder.config,
        audio_connector=connector(encoder, stack=s.stack),
    ))  # fmt: skip
    gpt2_weights(model.decoder)
    for own, trained in ((model.image, tower), (model.audio, encoder)):
        if own is not None:
            own.load_state_dict(trained.state_dict())
    return Checkpoint(model, tokenizer, image.preprocessing if image else None, chat=form)


def with_encoders(known: Checkpoint, image: Checkpoint | None, audio: Checkpoint | None) -> Checkpoint:
    """The same decoder and connectors on copies of other models' encoders (None: its own), with images of its own size.

    Raises CheckpointError for an encoder of another kind of states than the connector takes."""
    new = {"image": _image_encoder(image), "audio": _audio_encoder(audio)}
    new = {part: encoder for part, encoder in new.items() if encoder is not None}
    if not new:
        return known
    config, weights = known.model.config, known.model.state_dict()
    for part, encoder in new.items():
        old, other = getattr(config, part), encoder.config
        size = known.preprocessing.size if part == "image" and known.preprocessing else (0, 0)
        if (takes := _states(old, size)) != (gives := _states(other, size)):
            source = {"image": image, "audio": audio}[part].source
            raise CheckpointError(f"{known.source}: its {part} connector takes {takes}, and {source} gives {gives}")
        if part == "image" and (config.image_layers or 0) > other.stack.layers:
            raise CheckpointError(f"{known.source}: reads layer {config.image_layers} of {other.stack.layers}")
        weights = {name: value for name, value in weights.items() if not name.startswith(f"{part}.")}
        weights |= {f"{part}.{name}": value for name, value in encoder.state_dict().items()}
    model = AnyToText(replace(config, **{part: encoder.config for part, encoder in new.items()}))
    model.load_state_dict(weights)
    record = replace(image.preprocessing, size=known.preprocessing.size) if image else known.preprocessing
    shared = tuple(one for one in known.shared if one.part not in new)
    return replace(known, model=model, preprocessing=record, shared=shared)


def _states(config: Any, size: tuple[int, int]) -> str:
    """Name of an encoder's states of sound, or of an image of that size."""
    if not isinstance(config, ViTConfig):
        return f"states of width {config.width}" if config else "nothing"
    return f"states of {size[0] / config.patch:g}x{size[1] / config.patch:g} patches of width {config.width}"


def _image_encoder(known: Checkpoint | None) -> ViT | None:
    if known is None:
        return None
    tower = known.model.image if isinstance(known.model, CLIP) else known.model
    if not isinstance(tower, ViT) or known.preprocessing is None:
        raise CheckpointError(f"{known.source}: expected a model with an image encoder and its preprocessing")
    return tower


def _audio_encoder(known: Checkpoint | None) -> WhisperEncoder | ConformerEncoder | None:
    if known is None:
        return None
    found = known.model if isinstance(known.model, ConformerEncoder) else getattr(known.model, "encoder", None)
    if not isinstance(found, WhisperEncoder | ConformerEncoder):
        raise CheckpointError(f"{known.source}: expected a model with an audio encoder")
    return found


def _tokenizer(learned: BytePairTokenizer, names: Sequence[str]) -> HubTokenizer:
    """The learned tokenizer with control tokens after its own."""
    own = learned.vocab_size
    control = {name: i for i, name in enumerate(SPECIALS)} | {name: own + i for i, name in enumerate(names)}
    return HubTokenizer(learned.pipeline(), control, own + len(names), pad_id=0, eos_id=control[END])
