"""Vectors of the pictures of a data source, which a file may keep for the next time."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.datasets.image_sets import PictureSet
from multimodal.data.loader import BROKEN
from multimodal.errors import CheckpointError, DataError, ImageError, UsageError
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.system.files import write_whole
from multimodal.system.records import to_record
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.encode.images import batches, name_of
from multimodal.tasks.encode.native import encode_native, native_batches, tokens_of, vision
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint, read_tensors

Kind = Literal["embedding", "pooled"]
Watch = Callable[[int, int, int], None]


class Features(NamedTuple):
    """Vectors of the items `keys`, in their order; what was left out, and why."""

    vectors: Float[Tensor, "N D"]
    keys: list[int]
    broken: list[str]


def encoder(checkpoint: Checkpoint, kind: Kind) -> Callable[[Float[Tensor, "B 3 H W"]], Float[Tensor, "B D"]]:
    """`embedding`: the unit vectors that a CLIP compares with texts. `pooled`: what a ViT, or the ViT of a CLIP, pools
    before its head or projection, as the linear probes of CLIP take it (Radford et al. 2021, appendix A.3); of a CoCa
    the unit vectors.

    Raises UsageError for a model that has none, CheckpointError where its preprocessing is not known."""
    model = checkpoint.model
    if kind == "embedding" and not isinstance(model, CLIP):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, and this needs a clip")
    if not isinstance(model, CLIP | ViT):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, and this needs a clip or a vit")
    known_preprocessing(checkpoint)
    if kind == "embedding" or (isinstance(model, CLIP) and type(model) is not CLIP):  # CoCa pools in a way of its own
        return model.encode_image
    tower = model.image if isinstance(model, CLIP) else model
    if tower.config.pool == "none":
        raise UsageError(f"model {checkpoint.source}: pools no vector of a picture (pool 'none')")
    return tower.features


def unit_vectors(checkpoint: Checkpoint, pooled: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
    """The `embedding` features of a CLIP that belong to these `pooled` ones."""
    if type(checkpoint.model) is not CLIP:
        return pooled
    with torch.inference_mode():
        weight = next(checkpoint.model.parameters())
        return checkpoint.model.project_image(pooled.to(weight.device)).float().cpu()


def picture_features(
    checkpoint: Checkpoint, pictures: PictureSet, kind: Kind = "embedding", batch_size: int = 32,
    workers: int | None = None, cache: Path | None = None, watch: Watch = lambda *_: None, native: int | None = None,
    digest: str | None = None,
) -> Features:  # fmt: skip
    """Vectors in float32 on the CPU. A picture that cannot be read is one of `broken`, which begins with those of the
    set; `watch(done, of, broken)`. `cache`: a folder of files, each for one model and the bytes of some pictures;
    a prepared model needs its `digest` for it, that `model_digest` gave before.
    `native`: pictures at their own aspect, of at most so many patches (0: as many as the model learned).

    Raises DataError where no picture can be read, UsageError, CheckpointError."""
    encode, read = _ways(checkpoint, kind, native)
    file = _kept(cache, checkpoint, digest, pictures, f"{kind}" if native is None else f"{kind}-native{native}")
    if file is not None and file.exists():
        return _read(file, pictures)
    items, vectors, keys = _Items(pictures), [], []
    with torch.inference_mode():
        for batch in read(items.media(), checkpoint.preprocessing, batch_size=batch_size, workers=workers):
            made = in_parts(lambda part: encode(batch.pixels[part]).float().cpu(), len(batch.read))  # noqa: B023
            failed = [(media, one) for media, one in zip(batch.read, made, strict=True) if isinstance(one, Exception)]
            refused = batch.refused + [(media, item_error(one, name_of(media), ImageError)) for media, one in failed]
            keys += items.settle(len(batch.read) + len(batch.refused), refused)
            vectors += [one for one in made if not isinstance(one, Exception)]
            watch(len(keys), len(pictures.keys), len(items.broken))
    broken = [*pictures.broken, *(items.broken[key] for key in sorted(items.broken))]
    if not keys:
        raise DataError(f"{pictures.where}: no picture can be read ({broken[0] if broken else '0 found'})")
    found = Features(torch.stack(vectors), keys, broken)
    if wrong := (~found.vectors.isfinite().all(1)).nonzero().flatten().tolist():
        name = pictures.source.name(keys[wrong[0]])
        raise CheckpointError(f"model {checkpoint.source}: the vector of {name} is not finite ({len(wrong)} such)")
    if file is not None:
        _write(file, found, len(pictures.broken))
    return found


def _ways(checkpoint: Checkpoint, kind: Kind, native: int | None) -> tuple[Callable, Callable]:
    """From the pixels of a batch to vectors, and from pictures to batches."""
    encode, model = encoder(checkpoint, kind), checkpoint.model
    if native is None:
        device = next(model.parameters()).device
        return lambda pixels: encode(pixels.to(device, non_blocking=True)), batches
    seen = vision(model) if kind == "pooled" and type(model) is CLIP else model
    most = tokens_of(model, native or None)
    return lambda pixels: encode_native(seen, pixels).features, partial(native_batches, seen, max_tokens=most)


class _Items:
    """The pictures on their way to the model, so that a refused one is known by its name."""

    def __init__(self, pictures: PictureSet):
        self.pictures, self.broken = pictures, dict[int, str]()
        self.waiting: deque[tuple[int, str, Any]] = deque()

    def media(self) -> Iterator[Path | bytes]:
        for key in self.pictures.keys:
            try:
                sample = self.pictures.source.read(key)
            except BROKEN as error:
                self._leave_out(key, self.pictures.source.name(key), error)
            else:
                self.waiting.append((key, self.pictures.source.name(key), sample.media))
                yield sample.media

    def settle(self, count: int, refused: list[tuple[Any, Exception]]) -> list[int]:
        """Keys of those read among the next `count`."""
        causes = {id(media): error for media, error in refused}
        read = []
        for key, name, media in [self.waiting.popleft() for _ in range(count)]:
            if id(media) in causes:
                text = str(causes[id(media)])
                prefix = f"{len(media)} bytes: " if isinstance(media, bytes) else ""
                self._leave_out(key, name, text.removeprefix(prefix).removeprefix("<bytes>: "))
            else:
                read.append(key)
        return read

    def _leave_out(self, key: int, name: str, cause: object) -> None:
        text = str(cause)
        self.broken[key] = text if name in text else f"{name}: {text}"


def model_digest(checkpoint: Checkpoint) -> str:
    """sha256 of the names, types, shapes and bytes of the model's tensors as they were loaded. Raises UsageError for
    one prepared for inference, whose tensors are others."""
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.original().state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def pictures_digest(pictures: PictureSet) -> str:
    """sha256 of the places in the source and the bytes of the pictures, as far as they can be read."""
    digest = hashlib.sha256()
    for key in pictures.keys:
        digest.update(f"{key}\n".encode())
        try:
            media = pictures.source.read(key).media
            if not isinstance(media, bytes) and not media.is_file():  # a pipe would be waited for
                continue
            data = media if isinstance(media, bytes) else media.read_bytes()
        except BROKEN:
            continue
        digest.update(f"{len(data)}\n".encode() + data)
    return digest.hexdigest()


def _kept(
    cache: Path | None, checkpoint: Checkpoint, digest: str | None, pictures: PictureSet, kind: str
) -> Path | None:  # fmt: skip
    if cache is None:
        return None
    if cache.exists() and not cache.is_dir():
        raise UsageError(f"--features_cache {cache}: is a file, and a folder is needed")
    # the modules too: a model for other arithmetic is made of the same tensors
    made = repr((kind, str(checkpoint.model), to_record(checkpoint.model.config), checkpoint.preprocessing))
    model = hashlib.sha256(f"{digest or model_digest(checkpoint)} {made}".encode()).hexdigest()
    return cache / f"{kind}-{model[:16]}-{pictures_digest(pictures)[:16]}.safetensors"


def _read(file: Path, pictures: PictureSet) -> Features:
    from safetensors import safe_open

    try:
        tensors = read_tensors(file)
    except CheckpointError as error:
        raise DataError(f"{error}; delete it") from None
    with safe_open(file, "pt") as opened:
        told = opened.metadata() or {}
    if tensors.keys() != {"vectors", "keys"} or "broken" not in told:
        raise DataError(f"{file}: holds no features of pictures; delete it")
    return Features(tensors["vectors"], tensors["keys"].tolist(), [*pictures.broken, *json.loads(told["broken"])])


def _write(file: Path, found: Features, known: int) -> None:
    from safetensors.torch import save

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        told = {"broken": json.dumps(found.broken[known:])}
        write_whole(file, save({"vectors": found.vectors, "keys": torch.tensor(found.keys)}, told))
    except OSError as error:
        raise UsageError(f"--features_cache {file.parent}: cannot be written ({error.strerror})") from None
