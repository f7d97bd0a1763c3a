"""Nearest rows by inner product: exact, or with FAISS (Douze et al. 2024, arXiv:2401.08281).

FAISS only finds candidates: their scores are recomputed from the stored vectors."""

import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.tasks.retrieve.faiss_file import check_faiss
from multimodal.tasks.retrieve.record import BLOCK, IndexRecord

FLAT_MOST = 200_000  # rows: exact search takes milliseconds (benchmarks/studies/search.json)
TRAINING = 40  # vectors per list; FAISS warns below 39
CANDIDATES = 4  # times `top` are rescored, since FAISS stores 8 bits per number
EFFORTS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NEAREST = 10  # neighbours that recall is measured on
SHARED = 32  # queries; with fewer, threads cost more than they save
ADDED = 1 << 14  # rows passed to FAISS at once
PREFETCH = 4  # threads that read lists; FAISS starts 32 per query


class QuerySample(NamedTuple):
    """Queries to measure recall with. `own`: their rows, if they are in the index."""

    queries: Float[Tensor, "Q D"]
    own: Int[Tensor, "Q"] | None = None


def blocks_of(vectors: Float[np.ndarray, "N D"]) -> Iterator[Float[np.ndarray, "B D"]]:
    return (np.array(vectors[start : start + BLOCK]) for start in range(0, len(vectors), BLOCK))


def exact(
    blocks: Iterable[Float[np.ndarray, "B D"]], queries: Float[Tensor, "Q D"], top: int
) -> tuple[Float[Tensor, "Q K"], Int[Tensor, "Q K"]]:
    """Scores and rows of the `top` best, in float32. Ties go to the earlier row."""
    threads = torch.get_num_threads()
    if len(queries) < SHARED:
        torch.set_num_threads(1)
    try:
        return _best(blocks, queries, top)
    finally:
        torch.set_num_threads(threads)


def _best(
    blocks: Iterable[Float[np.ndarray, "B D"]], queries: Float[Tensor, "Q D"], top: int
) -> tuple[Float[Tensor, "Q K"], Int[Tensor, "Q K"]]:
    scores, rows, start = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long), 0
    for block in blocks:
        found = queries @ torch.from_numpy(block).float().T
        if rows.shape[1] == top:  # most blocks have no better row
            worth = (found > scores[:, -1:]).any(0).nonzero().flatten()
        else:
            worth = torch.arange(len(block))
        if len(worth):
            scores = torch.cat([scores, found[:, worth]], 1)
            rows = torch.cat([rows, (worth + start).expand(len(queries), -1)], 1)
            scores, order = scores.sort(dim=1, descending=True, stable=True)
            scores, rows = scores[:, :top], rows.gather(1, order[:, :top])
        start += len(block)
    return scores, rows


def rescored(
    vectors: Float[np.ndarray, "N D"], queries: Float[Tensor, "Q D"], candidates: Int[np.ndarray, "Q M"], top: int
) -> tuple[Float[Tensor, "Q K"], Int[Tensor, "Q K"]]:
    """Exact scores of the candidates, best first. -1 is no candidate; K is the smallest count of any query."""
    found = []
    for query, own in zip(queries, candidates, strict=True):
        rows = np.sort(own[own >= 0])
        scores = torch.from_numpy(np.array(vectors[rows])).float() @ query
        scores, order = scores.sort(dim=0, descending=True, stable=True)
        found.append((scores[:top], torch.from_numpy(rows)[order[:top]]))
    least = min(len(scores) for scores, _ in found)
    return torch.stack([scores[:least] for scores, _ in found]), torch.stack([rows[:least] for _, rows in found])


def kind_for(kind: str, count: int) -> str:
    """Resolve `auto` by the number of rows; too few rows for lists are searched exactly."""
    if kind == "auto":
        return "flat" if count <= FLAT_MOST else "ivf"
    return kind if count >= 2 * TRAINING else "flat"


def kind_of_update(old: IndexRecord) -> str:
    """The kind of an index. A flat one may be as `auto` made it, and may outgrow that."""
    return "auto" if old.kind == "flat" and old.count <= FLAT_MOST else old.kind


def build_search(vectors: Float[np.ndarray, "N D"], path: Path) -> None:
    """Write inverted lists with 8 bits per number."""
    faiss = _faiss()
    count, width = vectors.shape
    lists = 2 ** round(math.log2(4 * math.sqrt(count)))
    lists = max(1, min(lists, count // TRAINING))
    index = faiss.index_factory(width, f"IVF{lists},SQ8", faiss.METRIC_INNER_PRODUCT)
    sample = np.random.default_rng(0).choice(count, min(count, max(TRAINING * lists, 1 << 14)), replace=False)
    index.train(np.asarray(vectors[np.sort(sample)], np.float32))
    add_search(index, vectors)
    faiss.write_index(index, str(path))


def add_search(index: Any, vectors: Float[np.ndarray, "N D"]) -> None:
    for start in range(index.ntotal, len(vectors), ADDED):
        index.add(np.asarray(vectors[start : start + ADDED], np.float32))


def extend_search(vectors: Float[np.ndarray, "N D"], old: Path, path: Path) -> None:
    """Write the index `old` (checked by `check_faiss`) extended by the new rows."""
    faiss = _faiss()
    index = faiss.read_index(str(old))
    add_search(index, vectors)
    faiss.write_index(index, str(path))


def open_search(path: Path, count: int, width: int) -> Any:
    """Memory-mapped FAISS index. Raises CheckpointError."""
    check_faiss(path, count, width)
    faiss = _faiss()
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: cannot be read ({str(error).splitlines()[-1][:80]})") from None
    lists = faiss.downcast_InvertedLists(index.invlists)
    lists.prefetch_nthread = PREFETCH
    _read_scattered(int(lists.ptr), lists.totsize)
    return index


def _read_scattered(start: int, size: int) -> None:
    """Turn off read-ahead, which would read ten times what a query needs. By ctypes, since the mapping is FAISS's own;
    failure is harmless."""
    before = start % mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start - before), ctypes.c_size_t(size + before), mmap.MADV_RANDOM)


def candidates(index: Any, queries: Float[Tensor, "Q D"], most: int, effort: int) -> Int[np.ndarray, "Q M"]:
    """Candidate rows, padded with -1."""
    faiss = _faiss()
    chosen = faiss.SearchParametersIVF(nprobe=max(effort, 1))
    found = index.search(queries.numpy(), most, params=chosen)[1]
    return np.where(found < index.ntotal, found, -1)  # row numbers come from the file unchecked


def recall(found: Int[Tensor, "Q K"], expected: Int[Tensor, "Q K"]) -> float:
    """Share of the expected rows that were found."""
    return float((expected[:, :, None] == found[:, None, :]).any(2).float().mean())


def calibrated(
    index: Any, vectors: Float[np.ndarray, "N D"], samples: dict[str, QuerySample], target: float
) -> tuple[int, dict[str, float]]:
    """Smallest effort at which every sample reaches the target recall of its ten nearest, and the recalls."""
    expected = {name: _others(vectors, sample) for name, sample in samples.items()}
    effort = most = min(index.nlist, EFFORTS[-1])
    shares = dict[str, float]()
    for effort in [*(effort for effort in EFFORTS if effort < most), most]:
        for name, (queries, own) in samples.items():
            rows = candidates(index, queries, CANDIDATES * NEAREST, effort)
            found = rescored(vectors, queries, rows, NEAREST + (own is not None))[1]
            shares[name] = round(recall(found, expected[name]), 4)
        if min(shares.values()) >= target:
            break
    return effort, shares


def _others(vectors: Float[np.ndarray, "N D"], sample: QuerySample) -> Int[Tensor, "Q K"]:
    """The ten nearest without the query itself."""
    rows = exact(blocks_of(vectors), sample.queries, NEAREST + 1)[1]
    if sample.own is None:
        return rows[:, :NEAREST]
    last = (rows != sample.own[:, None]).int().sort(dim=1, descending=True, stable=True).indices
    return rows.gather(1, last)[:, :NEAREST]


def _faiss() -> Any:
    """FAISS with as many threads as torch, which has its own OpenMP."""
    import faiss  # 0.2 s, and exact search does not need it

    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss
