"""Search an image index."""

import hashlib
import json
import mmap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.clip import CLIP
from multimodal.system.records import to_record
from multimodal.tasks.encode.features import model_digest
from multimodal.tasks.encode.images import pixels_of
from multimodal.tasks.encode.loaded import Item
from multimodal.tasks.encode.native import encode_pixels, native_features, native_frames
from multimodal.tasks.encode.videos import clip_mean, frame_batches, plain_frames
from multimodal.tasks.retrieve.nearest import CANDIDATES, candidates, exact, open_search, rescored
from multimodal.tasks.retrieve.options import SearchOptions
from multimodal.tasks.retrieve.record import (
    AGAIN,
    BLOCK,
    HEADER,
    IndexRecord,
    check_file,
    mapped,
    read_entry,
    read_index_record,
)
from multimodal.tasks.retrieve.store import note_times
from multimodal.tokens.video.options import VideoOptions
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.encode import image_features, text_features
from multimodal.weights.folder import Checkpoint

MOST_LINE = 1 << 20  # bytes
CLIP_BATCH = 16  # frames of a video encoded at once


def open_index(folder: str | Path) -> "Index":
    """Open the index in a folder, memory-mapped. A damaged FAISS file gives a warning and slower exact searches.

    Raises UsageError for a missing or unfinished index, CheckpointError for another damaged file."""
    folder = Path(folder)
    record = read_index_record(folder)
    if not record.files:
        raise UsageError(f"{folder}: the index is not finished (rerun multimodal index)")
    advice, times = AGAIN, {}
    try:
        for part in ("vectors", "images"):
            times[part] = check_file(folder, record, part)
        vectors = mapped(folder, record, "vectors")
        advice = "rerun multimodal index"  # derived from the others
        times["lines"] = check_file(folder, record, "lines")
        lines = mapped(folder, record, "lines")
    except CheckpointError as error:
        if read_index_record(folder) != record:  # updated meanwhile
            return open_index(folder)
        raise CheckpointError(f"{error}; {advice}") from None
    note_times(folder, record, times)
    return Index(folder, record, vectors, lines)


class Index:
    """`vectors`: one unit vector per row."""

    def __init__(
        self, folder: Path, record: IndexRecord, vectors: Float[np.ndarray, "N D"], lines: Int[np.ndarray, "L"]
    ):
        self.folder, self.record, self.vectors, self._lines = folder, record, vectors, lines

    def __len__(self) -> int:
        return len(self.vectors)

    def search(
        self, vectors: Float[Tensor, "Q D"], top: int = SearchOptions.top.default, exact_search: bool = False
    ) -> tuple[Float[Tensor, "Q K"], Int[Tensor, "Q K"]]:
        """Cosines and rows of the nearest images, best first; K is `top`, or the number of images. Queries are
        normalized first. `exact_search` compares every row. Raises UsageError for vectors of another width."""
        if vectors.shape[1] != self.record.dimension:
            raise UsageError(
                f"{self.folder}: expected vectors of {self.record.dimension} numbers (got {vectors.shape[1]})"
            )
        queries, top = F.normalize(vectors.float().cpu(), dim=-1), min(top, len(self))
        if not len(queries) or not top:
            return torch.empty(len(queries), top), torch.empty(len(queries), top, dtype=torch.long)
        index = None if exact_search else self._index
        if index is None or top * CANDIDATES >= len(self):
            return exact(self._blocks(), queries, top)
        found = candidates(index, queries, top * CANDIDATES, self.record.effort)
        if (found >= 0).sum(1).min() < top:  # the visited lists hold too few
            return exact(self._blocks(), queries, top)
        return rescored(self._scattered, queries, found, top)

    def files(self, rows: Sequence[int] | Int[Tensor, "K"]) -> list[str]:
        """Paths of the images, FrameNames of frames of videos. Raises CheckpointError."""
        found = []
        with self._opened("images") as file:
            for row in map(int, rows):
                start, end = map(int, self._lines[row : row + 2])
                if not 0 <= start <= end <= min(start + MOST_LINE, self.record.files["images"].bytes):
                    raise CheckpointError(f"{self.folder / self.record.names()['lines']}: damaged (row {row})")
                file.seek(start)
                found.append(read_entry(file.read(end - start), file.name).name)
        return found

    def _blocks(self) -> Iterator[Float[np.ndarray, "B D"]]:
        """All rows, read rather than mapped, so that memory stays at one block."""
        with self._opened("vectors") as file:
            file.seek(HEADER)
            for start in range(0, len(self), BLOCK):
                rows = min(BLOCK, len(self) - start)
                values = np.fromfile(file, self.record.dtype, rows * self.record.dimension)
                yield values.reshape(rows, self.record.dimension)

    def _opened(self, part: str) -> BinaryIO:
        path = self.folder / self.record.names()[part]
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; the index was updated (reopen it)") from None

    @cached_property
    def _scattered(self) -> Float[np.ndarray, "N D"]:
        """Rows mapped without read-ahead: reading one leaves its neighbours on the disk."""
        with self._opened("vectors") as file:
            mapped = mmap.mmap(file.fileno(), HEADER + len(self) * self.record.row_bytes, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, self.record.dtype, offset=HEADER).reshape(len(self), self.record.dimension)

    @cached_property
    def _index(self) -> Any:
        if self.record.kind == "flat":
            return None
        try:
            note_times(self.folder, self.record, {"search": check_file(self.folder, self.record, "search")})
            path = self.folder / self.record.names()["search"]
            return open_search(path, self.record.count, self.record.dimension)
        except CheckpointError as error:
            warnings.warn(f"{error}; searching exactly; rerun multimodal index to rebuild it", stacklevel=2)
            return None


def index_digest(checkpoint: Checkpoint) -> str:
    """sha256 of the tensors and configuration: equal digests mean comparable vectors. Raises as `model_digest`."""
    config = json.dumps(to_record(checkpoint.model.config), sort_keys=True)
    return hashlib.sha256(f"{model_digest(checkpoint)} {config}".encode()).hexdigest()


def model_for(index: "Index", checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the preprocessing of the index. Raises UsageError for another model."""
    if index.record.model_sha256 != index_digest(checkpoint):
        built = f"{index.folder}: was built with model {index.record.model}"
        raise UsageError(f"{built}, but {checkpoint.source} has other weights")
    return replace(checkpoint, preprocessing=index.record.preprocessing)


@inference_mode()
def query_vectors(
    checkpoint: Checkpoint, texts: Sequence[str] = (), images: Sequence[Any] = (), native: int | None = None
) -> Float[Tensor, "Q D"]:
    """Vectors of texts, then of images (path, bytes or PIL image), on the CPU in float32. `native`: the index's.

    Raises TextError, ImageError, UsageError."""
    model = checkpoint.model
    found = []
    if texts:
        if not isinstance(model, CLIP):
            raise UsageError(f"model {checkpoint.source}: texts need a CLIP model, got {checkpoint.kind}")
        checkpoint.required_tokenizer()
        for text in texts:
            if not text.strip():
                raise TextError("a query is empty")
        found.append(text_features(model, checkpoint.tokenizer, texts))
    if images:
        device = next(model.parameters()).device
        record = known_preprocessing(checkpoint)
        if native is None:
            vectors = image_features(model, pixels_of(images, record).to(device))
        else:
            vectors = native_features(model, images, record, native or None)
        found.append(F.normalize(vectors.float(), dim=-1))
    return torch.cat([vectors.float().cpu() for vectors in found])


@inference_mode()
def clip_vector(
    checkpoint: Checkpoint, source: Any, options: VideoOptions, native: int | None = None
) -> Float[Tensor, "1 D"]:
    """Mean of the unit vectors of a video's frames, on the CPU in float32. Raises VideoError."""
    record = known_preprocessing(checkpoint)
    preparation = plain_frames(record, CLIP_BATCH)
    if native is not None:
        preparation = native_frames(checkpoint.model, record, native or None, CLIP_BATCH)
    encode = lambda pixels: F.normalize(encode_pixels(checkpoint.model, pixels).float(), dim=-1)
    return clip_mean(frame_batches(Item(source, source, 0), preparation, options), encode)
