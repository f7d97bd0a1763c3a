"""Making and renewing an index of pictures: only what is new or has changed is given to the model."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, ImageError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.clip import CLIP
from multimodal.system.files import path_of
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.encode.images import batches
from multimodal.tasks.encode.prompts import open_clip_prompts
from multimodal.tasks.retrieve.faiss_file import check_faiss
from multimodal.tasks.retrieve.index import index_digest, query_vectors
from multimodal.tasks.retrieve.nearest import (
    KINDS,
    Sample,
    build_search,
    calibrated,
    extend_search,
    kind_for,
    open_search,
)
from multimodal.tasks.retrieve.record import DTYPES, RECORD, Entry, IndexRecord, check_file, read_index_record
from multimodal.tasks.retrieve.store import Store
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint

QUERIES = 200  # of each kind, to measure how many of the nearest a FAISS index finds
Watch = Callable[[int, int, int], None]


@dataclass
class Built:
    """What a call did to an index: numbers of pictures, those that could not be read, and what there is to say.
    `record` is None where no picture is in it."""

    added: int = 0
    changed: int = 0
    dropped: int = 0
    refused: list[ImageError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    record: IndexRecord | None = None


def build(
    files: Iterable[str | Path], checkpoint: Checkpoint, folder: str | Path, *, name: str = "",
    architecture: str | None = None, within: Iterable[str | Path] = (), kind: str = "auto", dtype: str | None = None,
    recall: float = 0.95, overwrite: bool = False, batch_size: int = 32, workers: int | None = None,
    compute_type: str = "auto", device: str = "cpu", watch: Watch = lambda *_: None,
) -> Built:  # fmt: skip
    """Makes the index of `files` in `folder`, or brings the one there up to date; `open_index` opens it.

    A file is known by its absolute path, and has changed where its size or time has. A stop at any moment loses no
    vector that was made. Pictures of the index that are gone are dropped if they were inside one of the folders
    `within`; those that are there stay, named or not. `name`: what a search gives to `load` (default: the checkpoint's
    source). `kind`: flat (exact), ivf, hnsw, or auto (flat up to `FLAT_MOST` pictures, then ivf). `dtype`: float16 or
    float32 (default: the index's own; float16 for a new one). `recall`: the share of the ten nearest that ivf and hnsw
    are tuned to find. `watch(done, of, broken)`.

    Raises UsageError for an index of another model or an unusable value, CheckpointError for a damaged index."""
    folder = path_of(folder, UsageError, "index")
    wanted = _wanted(checkpoint, name or checkpoint.source, architecture, _dtype(folder, dtype, overwrite), kind)
    computing, built = prepare_for_inference(checkpoint, compute_type, device), Built()
    with Store(folder, wanted, overwrite) as store:
        todo = _todo(files, store, built)
        before, done = set(store.entries), 0
        for entries, vectors, refused in _embedded(todo, computing, batch_size, workers):
            store.append(entries, vectors)
            renewed = sum(entry.file in before for entry in entries)
            built.changed, built.added = built.changed + renewed, built.added + len(entries) - renewed
            built.refused += refused.values()
            for file in refused:
                built.dropped += store.entries.pop(file, None) is not None
            done += len(entries) + len(refused)
            watch(done, len(todo), len(built.refused))
        _leave_out(store, [os.path.abspath(path) for path in within], built)
        if store.rows:
            built.record = finish(store, kind, recall, lambda vectors: _samples(vectors, computing), built.notes)
    return built


def _dtype(folder: Path, asked: str | None, overwrite: bool) -> str:
    if asked is not None and asked not in DTYPES:
        raise UsageError(f"dtype {asked!r}: unknown (one of {', '.join(DTYPES)})")
    if asked is None and (folder / RECORD).exists() and not overwrite:
        return read_index_record(folder).dtype
    return asked or DTYPES[0]


def _wanted(checkpoint: Checkpoint, name: str, architecture: str | None, dtype: str, kind: str) -> IndexRecord:
    if kind not in KINDS:
        raise UsageError(f"kind {kind!r}: unknown (one of {', '.join(KINDS)})")
    if not isinstance(checkpoint.model, CLIP):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, an index needs a clip")
    preprocessing = known_preprocessing(checkpoint)
    return IndexRecord(
        name, architecture, index_digest(checkpoint), preprocessing, checkpoint.model.config.embed, dtype
    )


def _todo(files: Iterable[str | Path], store: Store, built: Built) -> dict[str, Entry]:
    """The files that the index has not, as they are before they are read: a change meanwhile is seen the next time."""
    found: dict[str, Entry] = {}
    for file in files:
        path = os.path.abspath(file)
        try:
            stat = os.stat(path)
        except OSError as error:
            built.refused.append(ImageError(f"{path}: cannot be opened ({error.strerror})"))
            continue
        entry = Entry(path, stat.st_size, stat.st_mtime_ns)
        if path not in store.entries or store.entries[path][1] != entry:
            found[path] = entry
    return found


def _embedded(
    todo: dict[str, Entry], checkpoint: Checkpoint, batch_size: int, workers: int | None
) -> Iterator[tuple[list[Entry], Float[np.ndarray, "B D"], dict[str, ImageError]]]:
    model = checkpoint.model
    device = next(model.parameters()).device
    for batch in batches(todo, known_preprocessing(checkpoint), batch_size, workers):
        found, refused = dict[str, Tensor](), dict(batch.refused)
        made = in_parts(partial(_vectors, model, device, batch.pixels), len(batch.read))
        for file, vector in zip(batch.read, made, strict=True):
            if isinstance(vector, Exception):
                refused[file] = item_error(vector, file, ImageError)
            elif not vector.isfinite().all():
                refused[file] = ImageError(f"{file}: model {checkpoint.source} gives a vector that is not finite")
            else:
                found[file] = vector
        if batch.read and not found and not any(isinstance(one, Exception) for one in made):
            raise CheckpointError(f"model {checkpoint.source}: the vector of {batch.read[0]} is not finite")
        vectors = torch.stack(list(found.values())) if found else torch.zeros(0, model.config.embed)
        yield [todo[file] for file in found], vectors.numpy(), refused


@torch.inference_mode()
def _vectors(model: CLIP, device: torch.device, pixels: Tensor, part: slice) -> Float[Tensor, "B D"]:
    return F.normalize(model.encode_image(pixels[part].to(device, non_blocking=True)).float().cpu(), dim=-1)


def _leave_out(store: Store, within: Sequence[str], built: Built) -> None:
    """Drops rows of pictures that are gone, and rows that newer ones have replaced."""
    for file in list(store.entries):
        if any(inside(file, folder) for folder in within) and not os.path.exists(file):
            del store.entries[file]
            built.dropped += 1
    rows = np.sort(np.array([row for row, _ in store.entries.values()], dtype=np.int64))
    if len(rows) < store.rows:
        store.keep(rows)


def inside(file: str, folder: str) -> bool:
    """Of absolute paths; a file is inside itself."""
    return file == folder or file.startswith(folder.rstrip(os.sep) + os.sep)


def finish(
    store: Store, kind: str, recall: float, samples: Callable[[Float[np.ndarray, "N D"]], dict[str, Sample]],
    notes: list[str],
) -> IndexRecord:  # fmt: skip
    """Makes or renews the FAISS index where the kind has one, and commits. `samples`: queries to tune it with."""
    old, asked, kind = store.record, kind, kind_for(kind, store.rows)
    lines, search = (_whole(store, part, notes) for part in ("lines", "search"))
    if store.unchanged and lines and search and old.kind == kind and old.recall.get("target", recall) == recall:
        return old
    if kind == "flat":
        if asked not in ("auto", "flat"):
            notes.append(f"{store.rows} pictures are too few for {asked}: the index is searched exactly")
        return store.commit(kind, 0, {}, None)
    vectors, part = store.vectors(), store.folder / "search.part"
    if search and old.kind == kind and store.extended and 2 * old.count >= store.rows:
        extend_search(vectors, store.folder / old.names()["search"], part)
    else:
        build_search(vectors, kind, part)
    index = open_search(part, kind, *vectors.shape)
    effort, shares = calibrated(index, vectors, samples(vectors), recall)
    if min(shares.values()) < recall:
        notes.append(f"recall {min(shares.values()):.3f} of the ten nearest, under the {recall} asked for")
    return store.commit(kind, effort, {"target": recall} | shares, part)


def _whole(store: Store, part: str, notes: list[str]) -> bool:
    """Whether a file that was made from others is as it was written."""
    record = store.record
    if not record.files or not record.names()[part]:
        return True
    try:
        check_file(store.folder, record, part)
        if part == "search":
            check_faiss(store.folder / record.names()[part], record.kind, record.count, record.dimension)
    except CheckpointError as error:
        notes.append(f"{error}; made again")
        return False
    return True


def _samples(vectors: Float[np.ndarray, "N D"], checkpoint: Checkpoint) -> dict[str, Sample]:
    """Queries as people have them: texts lie in another region than pictures (Liang et al. 2022, arXiv:2203.02053),
    and their neighbours are harder to find."""
    rows = np.sort(np.random.default_rng(0).choice(len(vectors), min(QUERIES, len(vectors)), replace=False))
    found = {"picture": Sample(torch.from_numpy(np.asarray(vectors[rows], np.float32)), torch.from_numpy(rows))}
    if checkpoint.tokenizer is not None:
        names = open_clip_prompts().IMAGENET_CLASSNAMES
        texts = [f"a photo of a {name}" for name in names[:: len(names) // QUERIES]]
        found["text"] = Sample(query_vectors(checkpoint, texts))
    return found
