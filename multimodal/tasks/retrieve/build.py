"""Create and update an index of images and of frames of videos. Only new and changed files are embedded."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.errors import CheckpointError, ImageError, UsageError, VideoError
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.files import path_of
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.encode.features import encoder, kind_of
from multimodal.tasks.encode.loaded import Items
from multimodal.tasks.encode.native import encode_pixels, native_limit
from multimodal.tasks.encode.prompts import open_clip_prompts
from multimodal.tasks.encode.reader import ImageReader, clip_result
from multimodal.tasks.encode.videos import Clip, checked_batches, clip_mean
from multimodal.tasks.retrieve.faiss_file import check_faiss
from multimodal.tasks.retrieve.index import index_digest, query_vectors
from multimodal.tasks.retrieve.nearest import (
    QuerySample,
    build_search,
    calibrated,
    extend_search,
    kind_for,
    kind_of_update,
    open_search,
)
from multimodal.tasks.retrieve.options import RECALL, IndexOptions
from multimodal.tasks.retrieve.record import RECORD, IndexEntry, IndexRecord, check_file, read_index_record
from multimodal.tasks.retrieve.store import IndexWriter
from multimodal.tokens.video.names import is_video
from multimodal.tokens.video.options import ClipOptions
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.encode import vector_width
from multimodal.weights.folder import Checkpoint

QUERIES = 200  # of each kind, to measure the recall of a FAISS index
Watch = Callable[[int, int, int], None]


@dataclass
class BuildResult:
    """Images added, changed, dropped and refused, and notes for the user. `record` is None for an empty index."""

    added: int = 0
    changed: int = 0
    dropped: int = 0
    refused: list[ImageError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    record: IndexRecord | None = None


def build(
    files: Iterable[str | Path], checkpoint: Checkpoint, folder: str | Path, *, name: str = "",
    architecture: str | None = None, within: Iterable[str | Path] = (), overwrite: bool = False,
    compute_type: str = "auto", device: str = "cpu", watch: Watch = lambda *_: None,
    native: int | None = None, **options: Any,
) -> BuildResult:  # fmt: skip
    """Create the index of `files` in `folder`, or update it; `open_index` opens it.

    Files are identified by absolute path; a new size or time means changed. An interrupted build keeps every finished
    vector. Missing images are dropped if they were inside one of the folders `within`; existing ones stay, listed or
    not. `name`: model name stored for searches (default: the checkpoint's source). `watch(done, of, broken)`.
    `native`: images keep their aspect, see `IndexRecord`. `options`: see `IndexOptions`.

    Raises UsageError for an index of another model or an invalid value, CheckpointError for a damaged index."""
    folder, chosen = path_of(folder, UsageError, "index"), IndexOptions(**options)
    dtype = _dtype(folder, chosen.dtype, overwrite)
    record = _new_record(checkpoint, name or checkpoint.source, architecture, dtype, native)
    computing, built = prepare_for_inference(checkpoint, compute_type, device), BuildResult()
    with IndexWriter(folder, record, overwrite) as writer:
        todo = _todo(files, writer, chosen.sampling(), built)
        before, done = set(writer.entries), 0
        for entries, vectors, refused in _embed(todo, computing, chosen, native):
            writer.append(entries, vectors)
            renewed = sum(entry.name in before for entry in entries)
            built.changed, built.added = built.changed + renewed, built.added + len(entries) - renewed
            built.refused += refused.values()
            for file in refused:
                built.dropped += _drop(writer, todo[file])
            done += len({entry.file for entry in entries}) + len(refused)
            watch(done, len(todo), len(built.refused))
        _drop_rows(writer, [os.path.abspath(path) for path in within], built)
        if writer.rows:
            samples = partial(_samples, checkpoint=computing)
            built.record = finish(writer, chosen.kind, chosen.recall, samples, built.notes)
    return built


def _dtype(folder: Path, asked: str | None, overwrite: bool) -> str:
    if asked is None and (folder / RECORD).exists() and not overwrite:
        return read_index_record(folder).dtype
    return asked or IndexOptions.dtype.choices[0]


def _new_record(
    checkpoint: Checkpoint, name: str, architecture: str | None, dtype: str, native: int | None
) -> IndexRecord:  # fmt: skip
    encoder(checkpoint, kind_of(checkpoint))  # checks the model
    preprocessing = known_preprocessing(checkpoint)
    if native is not None:
        native_limit(checkpoint.model, native, preprocessing)
    return IndexRecord(
        name, architecture, index_digest(checkpoint), preprocessing, vector_width(checkpoint.model), dtype,
        native=native,
    )  # fmt: skip


def _todo(files: Iterable[str | Path], writer: IndexWriter, sampling: str, built: BuildResult) -> dict[str, IndexEntry]:
    """New and changed files, with their state before they are read: the next run sees a change during this one."""
    found: dict[str, IndexEntry] = {}
    clips = Counter((entry.file, entry.state) for _, entry in writer.entries.values() if entry.sampling is not None)
    sizes = {entry.file: entry.frames for _, entry in writer.entries.values() if entry.sampling is not None}
    for file in files:
        path = os.path.abspath(file)
        try:
            stat = os.stat(path)
        except OSError as error:
            built.refused.append(ImageError(f"{path}: cannot be opened ({error.strerror})"))
            continue
        entry = IndexEntry(path, stat.st_size, stat.st_mtime_ns, sampling=sampling if is_video(path) else None)
        if entry.sampling is not None:
            known = clips[path, entry.state] and clips[path, entry.state] == sizes[path]  # else a kill cut it off
        else:
            known = path in writer.entries and writer.entries[path][1] == entry
        if not known:
            found[path] = entry
    return found


def _embed(
    todo: dict[str, IndexEntry], checkpoint: Checkpoint, options: IndexOptions, native: int | None
) -> Iterator[tuple[list[IndexEntry], Float[np.ndarray, "B D"], dict[str, ImageError]]]:
    model, record = checkpoint.model, known_preprocessing(checkpoint)
    device = next(model.parameters()).device
    own = None if native is None else (model, native or None)
    whole = ClipOptions(**ClipOptions.among(vars(options))).replace(per_clip=True)
    reader = ImageReader(record, options.batch_size, options.workers, False, whole, own)
    for batch in reader.batches(Items(todo.keys(), keyed=False)):
        if isinstance(batch, Clip):
            rows = clip_result(batch, partial(_clip_rows, encode=partial(_vectors, model, device), options=options))
            failed = isinstance(rows, Exception)
            file = batch.item.key
            entries = [] if failed else [replace(todo[file], time=time, frames=len(rows)) for time, _ in rows]
            vectors = torch.zeros(0, vector_width(model)) if failed else torch.stack([vector for _, vector in rows])
            yield entries, vectors.numpy(), {file: rows} if failed else {}
            continue
        found, refused = dict[str, Tensor](), {item.key: error for item, error in batch.refused}
        made = in_parts(partial(_vectors, model, device, batch.pixels), len(batch.read))
        for (file, *_), vector in zip(batch.read, made, strict=True):
            if isinstance(vector, Exception):
                refused[file] = item_error(vector, file, ImageError)
            elif not vector.isfinite().all():
                refused[file] = ImageError(f"{file}: model {checkpoint.source} vector is not finite")
            else:
                found[file] = vector
        if batch.read and not found and not any(isinstance(one, Exception) for one in made):
            raise CheckpointError(f"model {checkpoint.source}: the vector of {batch.read[0].key} is not finite")
        vectors = torch.stack(list(found.values())) if found else torch.zeros(0, vector_width(model))
        yield [todo[file] for file in found], vectors.numpy(), refused


def _clip_rows(
    clip: Clip, encode: Callable[[Tensor, slice], Tensor], options: IndexOptions
) -> list[tuple[float | None, Float[Tensor, "D"]]]:
    """Time and vector of each frame, or of the whole clip (None). Raises VideoError."""
    rows: list[tuple[float | None, Float[Tensor, "D"]]] = []
    if options.per_clip:
        rows = [(None, F.normalize(clip_mean(clip.batches, lambda pixels: encode(pixels, slice(None))), dim=-1)[0])]
    else:
        for batch in checked_batches(clip.batches):
            rows += zip([frame.key.time for frame in batch.read], encode(batch.pixels, slice(None)), strict=True)
    if not all(vector.isfinite().all() for _, vector in rows):
        raise VideoError(f"{clip.item.key}: a vector is not finite")
    return rows


@inference_mode()
def _vectors(
    model: nn.Module, device: torch.device, pixels: Tensor | tuple[Tensor, ...], part: slice
) -> Float[Tensor, "B D"]:
    own = pixels[part].to(device, non_blocking=True) if isinstance(pixels, Tensor) else pixels[part]
    return F.normalize(encode_pixels(model, own).float().cpu(), dim=-1)


def _drop_rows(writer: IndexWriter, within: Sequence[str], built: BuildResult) -> None:
    """Drop rows of missing files and replaced rows."""
    newest = {entry.file: entry.state for _, entry in sorted(writer.entries.values(), key=itemgetter(0))}
    for name, (_, entry) in list(writer.entries.items()):
        gone = any(inside(entry.file, folder) for folder in within) and not os.path.exists(entry.file)
        if gone or entry.state != newest[entry.file]:
            del writer.entries[name]
            built.dropped += 1
    rows = np.sort(np.array([row for row, _ in writer.entries.values()], dtype=np.int64))
    if len(rows) < writer.rows:
        writer.keep(rows)


def _drop(writer: IndexWriter, entry: IndexEntry) -> int:
    """Drop the rows of a file that cannot be read; return their number."""
    if entry.sampling is None:
        return int(writer.entries.pop(entry.file, None) is not None)
    names = [name for name, (_, held) in writer.entries.items() if held.file == entry.file]
    for name in names:
        del writer.entries[name]
    return len(names)


def inside(file: str, folder: str) -> bool:
    """True if an absolute path is the folder or inside it."""
    return file == folder or file.startswith(folder.rstrip(os.sep) + os.sep)


def finish(
    writer: IndexWriter, kind: str | None, recall: float | None,
    samples: Callable[[Float[np.ndarray, "N D"]], dict[str, QuerySample]], notes: list[str],
) -> IndexRecord:  # fmt: skip
    """Build or extend the FAISS index, if the kind has one, and commit. `kind`, `recall` None: as the index has them.
    `samples`: queries to tune it with."""
    old = writer.record
    asked, recall = kind or kind_of_update(old), recall or old.recall.get("target", RECALL)
    kind = kind_for(asked, writer.rows)
    lines, search = (_is_intact(writer, part, notes) for part in ("lines", "search"))
    if writer.unchanged and lines and search and old.kind == kind and old.recall.get("target", recall) == recall:
        return old
    if kind == "flat":
        if asked not in ("auto", "flat"):
            notes.append(f"{writer.rows} images are too few for {asked}: searching exactly")
        return writer.commit(kind, 0, {}, None)
    vectors, part = writer.vectors(), writer.folder / "search.part"
    if search and old.kind == kind and writer.extended and 2 * old.count >= writer.rows:
        extend_search(vectors, writer.folder / old.names()["search"], part)
    else:
        build_search(vectors, part)
    index = open_search(part, *vectors.shape)
    effort, shares = calibrated(index, vectors, samples(vectors), recall)
    if min(shares.values()) < recall:
        notes.append(f"recall {min(shares.values()):.3f} of the ten nearest, below the target {recall}")
    return writer.commit(kind, effort, {"target": recall} | shares, part)


def _is_intact(writer: IndexWriter, part: str, notes: list[str]) -> bool:
    """True if a derived file is as written."""
    record = writer.record
    if not record.files or not record.names()[part]:
        return True
    try:
        check_file(writer.folder, record, part)
        if part == "search":
            check_faiss(writer.folder / record.names()[part], record.count, record.dimension)
    except CheckpointError as error:
        notes.append(f"{error}; rebuilt")
        return False
    return True


def _samples(vectors: Float[np.ndarray, "N D"], checkpoint: Checkpoint) -> dict[str, QuerySample]:
    """Image and text queries: texts lie in another region than images (Liang et al. 2022, arXiv:2203.02053), and
    their neighbours are harder to find."""
    rows = np.sort(np.random.default_rng(0).choice(len(vectors), min(QUERIES, len(vectors)), replace=False))
    found = {"image": QuerySample(torch.from_numpy(np.asarray(vectors[rows], np.float32)), torch.from_numpy(rows))}
    if checkpoint.tokenizer is not None:
        names = open_clip_prompts().IMAGENET_CLASSNAMES
        texts = [f"a photo of a {name}" for name in names[:: len(names) // QUERIES]]
        found["text"] = QuerySample(query_vectors(checkpoint, texts))
    return found
