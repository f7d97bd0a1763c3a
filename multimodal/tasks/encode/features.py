"""Vectors of the images of a data source, optionally cached in a file."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.datasets.image_sets import ImageSet
from multimodal.data.loader import BROKEN
from multimodal.data.pending import PendingItems
from multimodal.errors import CheckpointError, DataError, ImageError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.system.files import write_whole
from multimodal.system.records import to_record
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.encode.images import batches, name_of
from multimodal.tasks.encode.native import encode_native, native_batches, native_limit, vision
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.encode import evaluating
from multimodal.weights.files.tensor_files import read_tensors
from multimodal.weights.folder import Checkpoint

Kind = Literal["embedding", "pooled"]
Watch = Callable[[int, int, int], None]


class Features(NamedTuple):
    """Vectors of the items `keys`, in order. `broken`: skipped images, with the cause."""

    vectors: Float[Tensor, "N D"]
    keys: list[int]
    broken: list[str]


def kind_of(checkpoint: Checkpoint) -> Kind:
    """The vectors that stand for an image."""
    return "embedding" if isinstance(checkpoint.model, CLIP) else "pooled"


def encoder(checkpoint: Checkpoint, kind: Kind) -> Callable[[Float[Tensor, "B 3 H W"]], Float[Tensor, "B D"]]:
    """Function from pixels to vectors. `embedding`: CLIP's unit vectors. `pooled`: output of the ViT before its head or
    projection, as in CLIP's linear probes (Radford et al. 2021, appendix A.3); for CoCa the unit vectors.

    Raises UsageError for a model without such vectors, CheckpointError for a checkpoint without preprocessing."""
    model = checkpoint.model
    if kind == "embedding" and not isinstance(model, CLIP):
        raise UsageError(f"model {checkpoint.source}: expected a CLIP model, got {checkpoint.kind}")
    if not isinstance(model, CLIP | ViT):
        raise UsageError(f"model {checkpoint.source}: expected a CLIP or ViT model, got {checkpoint.kind}")
    known_preprocessing(checkpoint)
    if kind == "embedding" or (isinstance(model, CLIP) and type(model) is not CLIP):  # CoCa has its own pooling
        return model.encode_image
    tower = model.image if isinstance(model, CLIP) else model
    if tower.config.pool == "none":
        raise UsageError(f"model {checkpoint.source}: expected a pooled vector (pool is 'none')")
    return tower.features


def unit_vectors(checkpoint: Checkpoint, pooled: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
    """Convert `pooled` features of a CLIP to `embedding` features."""
    if type(checkpoint.model) is not CLIP:
        return pooled
    with inference_mode():
        weight = next(checkpoint.model.parameters())
        return checkpoint.model.project_image(pooled.to(weight.device)).float().cpu()


def image_features(
    checkpoint: Checkpoint, images: ImageSet, kind: Kind = "embedding", batch_size: int = 32,
    workers: int | None = None, cache: Path | None = None, watch: Watch = lambda *_: None, native: int | None = None,
    digest: str | None = None,
) -> Features:  # fmt: skip
    """Encode the images of a set: float32 vectors on the CPU. Unreadable images are listed in `broken`, after those of
    the set. `cache`: folder of feature files, one per model and image bytes; a prepared model needs the `digest` that
    `model_digest` gave before preparation. `native`: keep the aspect ratio, with at most this many patches (0: as many
    as the model learned). `watch(done, of, broken)`.

    Raises DataError if no image can be read, UsageError, CheckpointError."""
    encode, read = _encoding(checkpoint, kind, native)
    file = _cache_file(cache, checkpoint, digest, images, f"{kind}" if native is None else f"{kind}-native{native}")
    if file is not None and file.exists():
        return _read(file, images)
    items, vectors, keys = PendingItems(images.source, images.keys), [], []
    with inference_mode(), evaluating(checkpoint.model):
        for batch in read(items.media(), checkpoint.preprocessing, batch_size=batch_size, workers=workers):
            made = in_parts(lambda part: encode(batch.pixels[part]).float().cpu(), len(batch.read))  # noqa: B023
            for media, one in [*zip(batch.read, made, strict=True), *batch.refused]:
                key = items.take(media)
                if isinstance(one, Exception):
                    items.skip(key, item_error(one, name_of(media), ImageError))
                else:
                    keys.append(key)
                    vectors.append(one)
            watch(len(keys), len(images.keys), len(items.broken))
    broken = [*images.broken, *items.causes()]
    if not keys:
        raise DataError(f"{images.where}: no image can be read ({broken[0] if broken else '0 found'})")
    found = Features(torch.stack(vectors), keys, broken)
    if wrong := (~found.vectors.isfinite().all(1)).nonzero().flatten().tolist():
        name = images.source.name(keys[wrong[0]])
        raise CheckpointError(f"model {checkpoint.source}: the vector of {name} is not finite ({len(wrong)} in all)")
    if file is not None:
        _write(file, found, len(images.broken))
    return found


def _encoding(checkpoint: Checkpoint, kind: Kind, native: int | None) -> tuple[Callable, Callable]:
    """Functions from the pixels of a batch to vectors, and from images to batches."""
    encode, model = encoder(checkpoint, kind), checkpoint.model
    if native is None:
        device = next(model.parameters()).device
        return lambda pixels: encode(pixels.to(device, non_blocking=True)), batches
    seen = vision(model) if kind == "pooled" and type(model) is CLIP else model
    most = native_limit(model, native, known_preprocessing(checkpoint))
    return partial(encode_native, seen), partial(native_batches, seen, max_tokens=most)


def model_digest(checkpoint: Checkpoint) -> str:
    """sha256 of names, types, shapes and bytes of the model's tensors as loaded. Raises UsageError for a model prepared
    for inference, whose tensors differ."""
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.original().state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def images_digest(images: ImageSet) -> str:
    """sha256 of keys and bytes of the readable images."""
    digest = hashlib.sha256()
    for key in images.keys:
        digest.update(f"{key}\n".encode())
        try:
            media = images.source.read(key).media
            if not isinstance(media, bytes) and not media.is_file():  # reading a pipe would block
                continue
            data = media if isinstance(media, bytes) else media.read_bytes()
        except BROKEN:
            continue
        digest.update(f"{len(data)}\n".encode() + data)
    return digest.hexdigest()


def _cache_file(
    cache: Path | None, checkpoint: Checkpoint, digest: str | None, images: ImageSet, kind: str
) -> Path | None:  # fmt: skip
    if cache is None:
        return None
    if cache.exists() and not cache.is_dir():
        raise UsageError(f"{cache}: expected a folder for the feature cache")
    # modules too: models prepared for other arithmetic have the same tensors
    settings = repr((kind, str(checkpoint.model), to_record(checkpoint.model.config), checkpoint.preprocessing))
    model = hashlib.sha256(f"{digest or model_digest(checkpoint)} {settings}".encode()).hexdigest()
    return cache / f"{kind}-{model[:16]}-{images_digest(images)[:16]}.safetensors"


def _read(file: Path, images: ImageSet) -> Features:
    from safetensors import safe_open

    try:
        tensors = read_tensors(file)
    except CheckpointError as error:
        raise DataError(f"{error}; delete it") from None
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
    if tensors.keys() != {"vectors", "keys"} or "broken" not in metadata:
        raise DataError(f"{file}: not a feature file; delete it")
    return Features(tensors["vectors"], tensors["keys"].tolist(), [*images.broken, *json.loads(metadata["broken"])])


def _write(file: Path, found: Features, known: int) -> None:
    from safetensors.torch import save

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"broken": json.dumps(found.broken[known:])}
        write_whole(file, save({"vectors": found.vectors, "keys": torch.tensor(found.keys)}, metadata))
    except OSError as error:
        raise UsageError(f"{file.parent}: cannot be written ({error.strerror})") from None
