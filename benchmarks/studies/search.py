"""Search of a million vectors: recall against exact search, latency cold and warm, memory, disk.

    python benchmarks/studies/search.py --work FOLDER [--data FOLDER] [--count 1000000]

Synthetic vectors in the manner of CLIP's: 300 topics, 20,000 clusters with sizes by Zipf's law, and a spectrum that
falls as the square root of the rank. Images share one mean vector and texts another, so that texts lie apart (the
modality gap, Liang et al. 2022, arXiv:2203.02053) and their neighbours are harder to find. With `--data` instead the
images in its `vision/`, embedded by clip-vit-16; queries are then its Flickr8k test captions and Caltech-101 val
images, which are not in the index.

Each row is a new process. Cold: the index's files leave the page cache (posix_fadvise) before the process opens the
index and searches once, the median of three. Warm: 200 queries of each modality (25 by exact search) in one batch, then
one by one: median, 95th percentile and processor time, which other work on the machine changes less. Memory is the
process's growth: its own (RssAnon), and pages of files (RssFile), which the kernel reclaims when needed. FOLDER keeps
vectors and indexes for the next call. Rows are printed and saved in `search.json`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import torch

from multimodal.tasks.retrieve.build import build, finish
from multimodal.tasks.retrieve.index import open_index, query_vectors
from multimodal.tasks.retrieve.nearest import QuerySample, recall
from multimodal.tasks.retrieve.record import IndexEntry, IndexRecord
from multimodal.tasks.retrieve.store import IndexWriter
from multimodal.tokens.image.reading import find_images
from multimodal.weights.load import load

QUERIES, EXACT = 200, 25  # by an index, and by exact search
TOPICS, CLUSTERS, BLOCK, WIDTH = 300, 20_000, 50_000, 512


class Space:
    """Clusters of images, with texts nearby."""

    def __init__(self):
        random = np.random.default_rng(0)
        spectrum = np.arange(1, WIDTH + 1) ** -0.5
        rotation = np.linalg.qr(random.standard_normal((WIDTH, WIDTH)))[0]
        self.shape = ((spectrum / np.linalg.norm(spectrum))[:, None] * rotation).astype(np.float32)
        self.image_mean, self.text_mean = unit(random.standard_normal((2, WIDTH), dtype=np.float32))
        topics = self.noise(TOPICS, random)[random.integers(TOPICS, size=CLUSTERS)]
        self.clusters = 0.6 * topics + 0.8 * self.noise(CLUSTERS, random)
        share = np.arange(1, CLUSTERS + 1) ** -0.7
        self.share = share / share.sum()

    def noise(self, count: int, random: np.random.Generator) -> np.ndarray:
        return random.standard_normal((count, WIDTH), dtype=np.float32) @ self.shape

    def points(self, count: int, random: np.random.Generator, mean: np.ndarray, near: float, far: float) -> np.ndarray:
        own = self.clusters[random.choice(CLUSTERS, count, p=self.share)]
        return unit(0.75 * mean + near * own + far * self.noise(count, random))

    def images(self, count: int, random: np.random.Generator) -> np.ndarray:
        return self.points(count, random, self.image_mean, 0.5, 0.42)

    def texts(self, count: int, random: np.random.Generator) -> np.ndarray:
        return self.points(count, random, self.text_mean, 0.3, 0.52)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def synthetic(folder: Path, count: int) -> list[str]:
    """Build the index; its queries are not those that tuned it. Returns notes."""
    space, random, notes = Space(), np.random.default_rng(1), []
    tuning, queries = ({"image": space.images(QUERIES, random), "text": space.texts(QUERIES, random)} for _ in range(2))
    np.savez(queries_file(folder), **queries)
    with IndexWriter(folder, IndexRecord("synthetic", None, "0" * 64, {}, WIDTH, "float16")) as store:
        for at in range(store.rows, count, BLOCK):
            rows = range(at, min(at + BLOCK, count))
            entries = [IndexEntry(f"/images/{row:07}.jpg", 100_000, 1_700_000_000 * 10**9) for row in rows]
            store.append(entries, space.images(len(rows), np.random.default_rng([2, at])))
        samples = {name: QuerySample(torch.from_numpy(values)) for name, values in tuning.items()}
        finish(store, "ivf", 0.95, lambda _: samples, notes)
    return notes


def real(folder: Path, data: Path) -> list[str]:
    """Build the index of all images of the data except the queries. Returns notes."""
    vision, unpacked = data / "vision", folder.parent / "tiny-imagenet"
    for tar in sorted((vision / "tiny-imagenet").glob("*.tar")):
        if not (unpacked / tar.stem).exists():
            with tarfile.open(tar) as file:
                file.extractall(unpacked / tar.stem, filter="data")
    names = ("caltech101/train", "cifar10-test", "flickr8k-1000/images")
    files = find_images([str(unpacked), *(str(vision / name) for name in names)])
    checkpoint = load("clip-vit-16")
    lines = (vision / "flickr8k-1000" / "test.jsonl").read_text().splitlines()
    captions = [caption for line in lines for caption in json.loads(line)["captions"]][:QUERIES]
    images = find_images([str(vision / "caltech101" / "val")])[::2][:QUERIES]
    queries = {"image": query_vectors(checkpoint, images=images), "text": query_vectors(checkpoint, captions)}
    np.savez(queries_file(folder), **{name: vectors.numpy() for name, vectors in queries.items()})
    return build(files, checkpoint, folder, kind="ivf", batch_size=64).notes


def queries_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".queries.npz")


def memory() -> dict[str, int]:
    """MB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(line.split()[1]) // 1024 for line in lines for name in ("RssAnon", "RssFile") if name in line}


def child(folder: Path, cold: bool, exact: bool) -> dict:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    queries = {name: torch.from_numpy(values) for name, values in np.load(queries_file(folder)).items()}
    if not exact:
        import faiss  # noqa: F401  its import is not part of a search
    before, start = memory(), time.perf_counter()
    index = open_index(folder)
    index.search(queries["text"][:1], 10, exact)
    if cold:
        return {"cold_ms": round((time.perf_counter() - start) * 1000, 1)}
    result = {}
    for name, vectors in queries.items():
        index.search(vectors, 10, exact)  # fills the page cache
        times, rows, used = [], [], time.process_time()
        vectors = vectors[:EXACT] if exact else vectors
        for vector in vectors:
            start = time.perf_counter()
            rows.append(index.search(vector[None], 10, exact)[1])
            times.append(time.perf_counter() - start)
        result |= {f"{name}_median_ms": round(statistics.median(times) * 1000, 2),
                   f"{name}_p95_ms": round(float(np.percentile(times, 95)) * 1000, 2),
                   f"{name}_cpu_ms": round((time.process_time() - used) / len(vectors) * 1000, 2)}  # fmt: skip
        queries[name] = vectors, torch.cat(rows)
    result["grown_mb"] = {name: value - before[name] for name, value in memory().items()}
    for name, (vectors, rows) in queries.items() if not exact else ():
        expected = index.search(vectors, 10, True)[1]
        result |= {f"{name}_recall@{k}": round(recall(rows[:, :k], expected[:, :k]), 4) for k in (1, 10)}
    return result


def evict(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_child(task: str, folder: Path, threads: int, exact: bool) -> dict:
    command = [sys.executable, __file__, "--task", task, "--work", str(folder), *(["--exact"] if exact else [])]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=3600)
    return json.loads(done.stdout)


def measure(folder: Path, threads: int, exact: bool) -> dict:
    colds = []
    for _ in range(3):
        evict(folder)
        colds.append(run_child("cold", folder, threads, exact))
    return sorted(colds, key=lambda row: row["cold_ms"])[1] | run_child("warm", folder, threads, exact)


def save(row: dict) -> None:
    """Add the row, or replace an older one of its kind."""
    path = Path(__file__).with_suffix(".json")
    keys = ("source", "count", "search", "threads")
    rows = [old for old in json.loads(path.read_text())["rows"] if any(old[key] != row[key] for key in keys)]
    result = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "rows": [*rows, row]}
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the indexes (4 GB for a million)")
    parser.add_argument("--data", type=Path, help="folder with vision/ (default: synthetic vectors)")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--task", choices=["cold", "warm"], help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(child(args.work, args.task == "cold", args.exact)))
        return
    source = "clip-vit-16" if args.data else "synthetic"
    folder = args.work / source
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "index.json").exists():
        print(real(folder, args.data) if args.data else synthetic(folder, args.count))
    record = json.loads((folder / "index.json").read_text())
    facts = {key: record[key] for key in ("kind", "count", "dimension", "dtype", "effort", "recall")}
    facts["mb"] = {part: round(file["bytes"] / 1e6, 1) for part, file in record["files"].items()}
    for exact in (False, True):
        for threads in (1, 2):
            row = {"source": source} | facts | {"search": "exact" if exact else record["kind"], "threads": threads}
            row |= measure(folder, threads, exact)
            print(json.dumps(row), flush=True)
            save(row)


if __name__ == "__main__":
    main()
