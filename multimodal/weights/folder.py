"""The project's checkpoint folder: model.safetensors, config.json, tokenizer, preprocessing.json, chat.json, card.json,
and last manifest.json with the sha256 of each of them."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multimodal.errors import CheckpointError, UsageError
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.coca import CoCa, CoCaConfig
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoder, ConformerEncoderConfig
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.speech.canary import Canary, CanaryConfig
from multimodal.models.speech.moonshine import Moonshine, MoonshineConfig
from multimodal.models.speech.transducer import Transducer, TransducerConfig
from multimodal.models.tabular import FTTransformer, TabularConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vision.git import GIT, GITConfig
from multimodal.models.vit import ViT, ViTConfig
from multimodal.models.whisper import Whisper, WhisperConfig
from multimodal.system import memory
from multimodal.system.files import path_of, printable, read_json, replacing, sha256, shown
from multimodal.system.records import from_record, to_record
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.image.arrays import ImageInput, as_image, images_of
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.weights.card import check_card
from multimodal.weights.encode import image_features, text_features
from multimodal.weights.files.shared import SharedPart, own_tensors, shared_tensors, shipped_folder
from multimodal.weights.files.store_options import Store
from multimodal.weights.files.stored import from_stored, to_stored
from multimodal.weights.files.tensor_files import read_tensors
from multimodal.weights.fit import check_size, check_vocabulary
from multimodal.weights.table import check_finite, check_like

FORMAT = 1
MOST_LAYERS = 1000
LEAST_TENSORS = 4  # a layer: two of attention, two of the feed-forward
TOKENIZER, WEIGHTS = "tokenizer_config.json", "model.safetensors"
KINDS: dict[str, tuple[type[nn.Module], type]] = {
    "vit": (ViT, ViTConfig), "clip": (CLIP, CLIPConfig), "coca": (CoCa, CoCaConfig), "git": (GIT, GITConfig),
    "speech_to_text": (Whisper, WhisperConfig), "conformer": (ConformerEncoder, ConformerEncoderConfig),
    "joint_conformer": (ConformerCTC, ConformerCTCConfig),
    "transducer": (Transducer, TransducerConfig),
    "moonshine": (Moonshine, MoonshineConfig), "canary": (Canary, CanaryConfig),
    "captioner": (VisionEncoderDecoder, VisionEncoderDecoderConfig),
    "text": (TextTransformer, TextConfig),
    "text_to_text": (EncoderDecoder, EncoderDecoderConfig),
    "any_to_text": (AnyToText, AnyToTextConfig),
    "tabular": (FTTransformer, TabularConfig),
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A model in eval mode with its tokenizer and preprocessing.

    `source`: where it came from. `card`: facts for people (licence, training data, figures). `prepared`: compute dtype
    and device set by `prepare_for_inference`; None: as loaded. `chat`: how it writes messages."""

    model: nn.Module
    tokenizer: Tokenizer | None = None
    preprocessing: Preprocessing | None = None
    source: str = ""
    card: dict[str, Any] = field(default_factory=dict)
    prepared: tuple[str, torch.device] | None = None
    chat: ChatFormat | None = None
    shared: tuple[SharedPart, ...] = ()

    @property
    def kind(self) -> str:
        return kind_of(self.model)

    def __repr__(self) -> str:
        count = sum(one.numel() for one in self.model.parameters())
        return f"Checkpoint({self.source!r}, {type(self.model).__name__}, {count / 1e6:,.1f} M parameters)"

    def required_tokenizer(self) -> Tokenizer:
        """Raises CheckpointError for a checkpoint without a tokenizer."""
        if self.tokenizer is None:
            raise CheckpointError(f"model {self.source}: checkpoint has no tokenizer")
        return self.tokenizer

    def preprocess(self, image: ImageInput) -> Float[Tensor, "3 H W"]:
        """Pixels of an image, as the model takes them. Raises ImageError, CheckpointError without preprocessing."""
        if self.preprocessing is None:
            raise CheckpointError(f"model {self.source}: checkpoint has no preprocessing")
        return preprocess(as_image(image), self.preprocessing)

    def tokenize(self, texts: str | Iterable[str]) -> Int[Tensor, "N T"]:
        """Ids of texts with the control tokens, padded to the longest. Raises TextError. Warns (TextCut) of texts cut
        to the context."""
        tokenizer, config = self.required_tokenizer(), getattr(self.model, "config", None)
        parts = (config, *(getattr(config, name, None) for name in ("text", "encoder", "decoder")))
        limits = [tokenizer.context, *[part.context for part in parts if isinstance(part, TextConfig)][:1]]
        longest = min((limit for limit in limits if limit is not None), default=None)
        return tokenizer.batch([texts] if isinstance(texts, str) else texts, longest).ids

    def encode_image(self, images: ImageInput | Sequence[ImageInput]) -> Float[Tensor, "N D"]:
        """Unit vectors of one or several images by a CLIP, or the pooled output of a ViT. `Embedder` takes more at a
        time. Raises ImageError, UsageError for another model."""
        if not isinstance(self.model, CLIP | ViT):
            raise UsageError(f"model {self.source}: expected a CLIP or ViT model, got {self.kind}")
        if not (several := images_of(images)):
            raise UsageError("must hold at least one image (got 0)", argument="images")
        # a copy, since a tensor of inference mode is of no use in training
        return image_features(self.model, torch.stack([self.preprocess(image) for image in several])).clone()

    def encode_text(self, texts: str | Iterable[str]) -> Float[Tensor, "N D"]:
        """Unit vectors of one or several texts by a CLIP; `Embedder` encodes with text models. Raises TextError,
        UsageError for another model."""
        if not isinstance(self.model, CLIP):
            raise UsageError(f"model {self.source}: expected a CLIP model, got {self.kind}")
        several = [texts] if isinstance(texts, str) else texts
        return text_features(self.model, self.required_tokenizer(), several).clone()

    def original(self) -> nn.Module:
        """The model as loaded. Raises UsageError if it was prepared for inference."""
        if self.prepared is not None:
            raise UsageError(f"model {self.source}: expected a model as loaded, got one prepared for inference")
        return self.model


@dataclass(frozen=True)
class Record:
    """`config.json`. `tokenizer`: sha256 of each file of the tokenizer that the model was trained with. `store`: number
    type of the weights. `shared`: parts that are not in the folder, and `models`: sha256 of the weights of the models
    that have them."""

    format: int
    kind: str
    config: dict[str, Any]
    tokenizer: dict[str, str]
    store: Store
    shared: tuple[SharedPart, ...] = ()
    models: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise CheckpointError(f"expected format {FORMAT} (got {self.format})")
        if self.kind not in KINDS:
            raise CheckpointError(f"unknown kind {shown(self.kind)}")


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`: sha256 of each other file of the folder."""

    sha256: dict[str, str]

    def __post_init__(self) -> None:
        if not {"config.json", WEIGHTS} <= self.sha256.keys():
            raise CheckpointError("must list config.json and model.safetensors")
        if wrong := [name for name in self.sha256 if Path(name).name != name or "\0" in name]:
            raise CheckpointError(f"lists {shown(wrong[0])}, which is outside this folder")


def kind_of(model: nn.Module) -> str:
    """Name in config.json of the model's class, or of the class that it refines. Raises CheckpointError for others."""
    for own in type(model).__mro__:
        for name, (model_class, _) in KINDS.items():
            if own is model_class:
                return name
    raise CheckpointError(f"expected a model of kind {', '.join(KINDS)} (got {type(model).__name__})")


def save_folder(checkpoint: Checkpoint, folder: Path, store: Store = "float32") -> None:
    """Write a checkpoint folder atomically, replacing an older one. `store`: see `files/stored.py`.

    Raises CheckpointError for a tokenizer with more tokens than the model embeds and for weights that are not finite in
    `store` or not those of the model's configuration, UsageError for a model prepared for inference and for a `folder`
    that holds other files."""
    from safetensors.torch import save

    kind = checkpoint.kind  # first, since a wrapper around a model has no configuration
    check_vocabulary(checkpoint.tokenizer, checkpoint.model.config, str(folder))
    with _replacing(folder) as made:
        where, shared = checkpoint.source or str(folder), checkpoint.shared
        state = checkpoint.original().state_dict()
        _check_weights(state, build(KINDS[kind][0], checkpoint.model.config).state_dict(), where)
        tensors = to_stored(own_tensors(state, _shared(shared, state, where), where), store, where)
        write_durably(made / WEIGHTS, save(tensors))
        tokenizer = _saved_tokenizer(checkpoint.tokenizer, made)
        config = Record(FORMAT, kind, to_record(checkpoint.model.config), tokenizer, store, shared,
                        {one.model: sha256(shipped_folder(one, where) / WEIGHTS) for one in shared})  # fmt: skip
        write_durably(made / "config.json", _json(to_record(config)))
        if checkpoint.preprocessing:
            write_durably(made / "preprocessing.json", _json(checkpoint.preprocessing.to_dict()))
        if checkpoint.chat:
            write_durably(made / "chat.json", _json(to_record(checkpoint.chat)))
        if checkpoint.card:
            write_durably(made / "card.json", _json(checkpoint.card))


def _check_weights(own: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    for name in [*expected, *own]:
        found, right = (list(side[name].shape) if name in side else "none" for side in (own, expected))
        if found != right:
            raise CheckpointError(
                f"model {where}: {name}: expected shape {right} by the model's configuration, got {found}; merge "
                "adapters, make pruning permanent, and give a changed part its configuration"
            )


def check_place(folder: Path) -> None:
    """Raise UsageError if `folder` holds anything but a checkpoint, since replacing it would delete that."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UsageError(f"{folder}: exists and is not a checkpoint folder; name another")
    try:
        sums = read_json(folder / "manifest.json").get("sha256")
    except CheckpointError:
        sums = None
    known = {"manifest.json", *(sums if isinstance(sums, dict) else ())}
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise UsageError(f"{folder}: holds {foreign[0]}, which is not part of a checkpoint; name another folder")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which gets its manifest and replaces `folder` at the end. Raises as `check_place` does."""
    folder = Path(os.path.realpath(folder))  # replaces the target of a link, not the link
    check_place(folder)
    with replacing(folder) as made:
        yield made
        sums = {path.name: sha256(path) for path in sorted(made.iterdir())}
        write_durably(made / "manifest.json", _json({"sha256": sums}))


def load_folder(folder: Path) -> Checkpoint:
    """Load a checkpoint folder. Raises CheckpointError for a missing, changed or inconsistent file."""
    folder = path_of(folder, CheckpointError)
    sums, where = _check_manifest(folder), str(folder / "config.json")
    record = from_record(Record, read_json(folder / "config.json"), where)
    model_class, config_class = KINDS[record.kind]
    value = from_record(config_class, record.config, where)
    tokenizer = _tokenizer(folder, record, sums)
    check_vocabulary(tokenizer, value, where)
    preprocessing = None
    if (path := folder / "preprocessing.json").exists():
        preprocessing = from_record(Preprocessing, read_json(path), str(path))
        check_size(preprocessing, value, str(path))
    chat, card = folder / "chat.json", folder / "card.json"
    chat = from_record(ChatFormat, read_json(chat), str(chat)) if chat.exists() else None
    card = check_card(read_json(card), str(card)) if card.exists() else {}
    tensors = read_tensors(folder / WEIGHTS)
    try:
        model = build(model_class, value, len(tensors) if not record.shared else None)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{where}: the model cannot be built ({printable(repr(error))[:200]})") from None
    weights = str(folder / WEIGHTS)
    tensors = from_stored(tensors, weights) if record.store == "int8" else tensors
    fill(model, tensors | _shared_as_saved(record, model.state_dict(), where), weights)
    return Checkpoint(model.eval(), tokenizer, preprocessing, str(folder), card, chat=chat, shared=record.shared)


def _shared(parts: Sequence[SharedPart], own: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    return shared_tensors(parts, own, lambda path: load_folder(path).model, where)


def _shared_as_saved(record: Record, own: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Shared tensors. Raises CheckpointError if a model that has them is another than when the folder was written."""
    for one in record.shared:
        if sha256(shipped_folder(one, where) / WEIGHTS) != record.models.get(one.model):
            raise CheckpointError(f"{where}: {one.part} is of another version of {one.model} than the shipped one")
    return _shared(record.shared, own, where)


def _saved_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> dict[str, str]:
    """Write the tokenizer's files; return the sha256 of each."""
    if tokenizer is None:
        return {}
    before = set(folder.iterdir())
    tokenizer.save(folder)
    return {path.name: sha256(path) for path in sorted(set(folder.iterdir()) - before)}


def _tokenizer(folder: Path, record: "Record", sums: dict[str, str]) -> Tokenizer | None:
    """The tokenizer that the model was saved with. Raises CheckpointError for another one, whose ids would differ."""
    exists = (folder / TOKENIZER).exists()
    if exists and not record.tokenizer:
        raise CheckpointError(f"{folder / TOKENIZER}: config.json lists no tokenizer of this model")
    for name, expected in record.tokenizer.items():
        if sums.get(name) != expected:
            actual = sums[name][:12] + "…" if name in sums else "none"
            raise CheckpointError(
                f"{folder / name}: is not the tokenizer that the model was trained with (sha256 {actual}, config.json "
                f"has {expected[:12]}…)"
            )
    return tokenizer_from(folder) if exists else None


def build(model_class: type[nn.Module], config: Any, tensors: int | None = None) -> nn.Module:
    """Build the model on the meta device. `tensors`: number of tensors in its file. Raises CheckpointError for more
    layers than the file can fill, or than can be built in seconds."""
    stacks = _stacks(config)
    if (layers := max(map(max, stacks), default=0)) > MOST_LAYERS:
        raise CheckpointError(f"layers: {layers}, more than {MOST_LAYERS}")
    if tensors is not None and LEAST_TENSORS * (layers := sum(own for _, own in stacks)) > tensors:
        raise CheckpointError(f"layers: {layers} in all, more than the {tensors} tensors of the file can fill")
    with torch.device("meta"), _Undrawn():
        return model_class(config)


DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _Undrawn(TorchFunctionMode):
    """Skip random initialization: on the meta device torch would import its whole compiler for it (seconds)."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in DRAWS:
            return args[0] if args else kwargs["tensor"]
        if function is torch.randn:
            return torch.empty(*args, **kwargs)
        return function(*args, **kwargs)


def _stacks(config: Any) -> list[tuple[int, int]]:
    """Layers of each stack in a configuration, at any depth, and how many of them have their own weights."""
    if not is_dataclass(config):
        return []
    inner = [stack for f in fields(config) for stack in _stacks(getattr(config, f.name))]
    layers = getattr(config, "layers", None)
    return [*inner, (layers, getattr(config, "shared", None) or layers)] if isinstance(layers, int) else inner


def fill(model: nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Set all parameters and buffers, as float32. Raises CheckpointError for a missing, unexpected, misshapen or
    not finite tensor."""
    own = model.state_dict()
    for name in sorted(own.keys() - tensors.keys()):
        raise CheckpointError(f"{where}: tensor {name!r} is missing")
    for name in sorted(tensors.keys() - own.keys()):
        raise CheckpointError(f"{where}: unexpected tensor {name!r}")
    for name, tensor in tensors.items():
        check_like(name, tensor, own[name], where)
    check_finite(tensors, where)
    model.load_state_dict({name: _owned(tensor) for name, tensor in tensors.items()}, strict=True, assign=True)


def _owned(tensor: Tensor) -> Tensor:
    """Float32 in storage of its own. PyTorch's fused AdamW (torch 2.11, on a CPU) updates transposed views in the wrong
    places; FSDP2 and safetensors refuse them, and safetensors' `save_model` parts of a fused tensor too."""
    wide = tensor.float() if tensor.is_floating_point() else tensor
    whole = wide.is_contiguous() and wide.untyped_storage().nbytes() == wide.nbytes
    return wide if whole else wide.clone(memory_format=torch.contiguous_format)


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _check_manifest(folder: Path) -> dict[str, str]:
    """The manifest's sums, compared with the files. Raises CheckpointError."""
    path = folder / "manifest.json"
    sums = from_record(Manifest, read_json(path), str(path)).sha256
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though manifest.json lists it")
        memory.require(path.stat().st_size, path)  # before hashing for minutes
        if sha256(path) != expected:
            raise CheckpointError(f"{path}: sha256 differs from the manifest's {printable(expected)[:12]}…")
    for path in folder.glob("*.json"):
        if path.name not in sums and path.name != "manifest.json":
            raise CheckpointError(f"{path}: not listed in manifest.json")
    return sums
