"""Searching a million vectors: recall against an exact search, latency cold and warm, memory, disk, time to build.

    python benchmarks/studies/search.py --work FOLDER --data FOLDER [--sources made-up] [--kinds ivf hnsw]
        [--count 1000000]

Vectors are made up in the manner of CLIP's: 300 topics, 20,000 clusters of them with sizes as of Zipf's law, and a
spectrum that falls as the square root of the rank; images share one mean vector and texts another, so that texts lie
apart (the modality gap, Liang et al. 2022, arXiv:2203.02053) and their neighbours are harder to find. `--data`: the
images in `vision/` are embedded by clip-vit-16 too; queries are its Flickr8k test captions and Caltech-101 val
images, which are then not in the index.

Each row is a fresh process. Cold: the index's files are put out of the page cache (posix_fadvise) before the process
opens the index and searches once, three times each, the median, and what that fetched from the disk. Warm: 200 queries
of each sort (25 exactly) all at once, then one by one: median, 95th percentile, and processor time, which other work on
the machine changes less. Memory is what the process has grown by in them, its own (RssAnon) and pages of files
(RssFile), which the kernel takes back at will. FOLDER keeps vectors and indexes, which a second call takes as they are.
Printed, and kept in `search.json` beside this file, in the place of older rows of the kind."""

import argparse
import json
import os
import platform
import shutil
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

HERE = Path(__file__).resolve().parent
QUERIES, EXACT = 200, 25  # searched by an index, and exactly
TOPICS, CLUSTERS, BLOCK = 300, 20_000, 50_000


class Space:
    """Clusters of images, and texts beside them."""

    def __init__(self, width: int):
        random = np.random.default_rng(0)
        self.width = width
        spectrum = np.arange(1, width + 1) ** -0.5
        turn = np.linalg.qr(random.standard_normal((width, width)))[0]
        self.shape = ((spectrum / np.linalg.norm(spectrum))[:, None] * turn).astype(np.float32)
        self.picture_mean, self.text_mean = unit(random.standard_normal((2, width), dtype=np.float32))
        topics = self.noise(TOPICS, random)[random.integers(TOPICS, size=CLUSTERS)]
        self.clusters = 0.6 * topics + 0.8 * self.noise(CLUSTERS, random)
        share = np.arange(1, CLUSTERS + 1) ** -0.7
        self.share = share / share.sum()

    def noise(self, count: int, random: np.random.Generator) -> np.ndarray:
        return random.standard_normal((count, self.width), dtype=np.float32) @ self.shape

    def pictures(self, count: int, random: np.random.Generator) -> np.ndarray:
        own = self.clusters[random.choice(CLUSTERS, count, p=self.share)]
        return unit(0.75 * self.picture_mean + 0.5 * own + 0.42 * self.noise(count, random))

    def texts(self, count: int, random: np.random.Generator) -> np.ndarray:
        own = self.clusters[random.choice(CLUSTERS, count, p=self.share)]
        return unit(0.75 * self.text_mean + 0.3 * own + 0.52 * self.noise(count, random))


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def made_up(folder: Path, kind: str, count: int, width: int) -> dict:
    """The index of made-up vectors, and queries beside it that were not used to tune it."""
    space, random = Space(width), np.random.default_rng(1)
    tuning, asked = [
        {"picture": space.pictures(QUERIES, random), "text": space.texts(QUERIES, random)} for _ in range(2)
    ]
    keep_queries(folder, asked)
    wanted = IndexRecord("made-up", None, "0" * 64, {}, width, "float16")
    start, notes = time.perf_counter(), []
    with IndexWriter(folder, wanted) as store:
        for at in range(store.rows, count, BLOCK):
            rows = range(at, min(at + BLOCK, count))
            entries = [IndexEntry(f"/pictures/{row:07}.jpg", 100_000, 1_700_000_000 * 10**9) for row in rows]
            store.append(entries, space.pictures(len(rows), np.random.default_rng([2, at])))
        written = time.perf_counter()
        samples = {name: QuerySample(torch.from_numpy(values)) for name, values in tuning.items()}
        finish(store, kind, 0.95, lambda _: samples, notes)
    return {"vectors_s": round(written - start, 1), "index_s": round(time.perf_counter() - written, 1), "notes": notes}


def real(folder: Path, kind: str, data: Path, work: Path) -> dict:
    """The index of all images of the data but those that are queries."""
    vision, unpacked = data / "vision", work / "tiny-imagenet"
    for tar in sorted((vision / "tiny-imagenet").glob("*.tar")):
        if not (unpacked / tar.stem).exists():
            with tarfile.open(tar) as file:
                file.extractall(unpacked / tar.stem, filter="data")
    names = ("caltech101/train", "cifar10-test", "flickr8k-1000/images")
    files = find_images([str(unpacked), *(str(vision / name) for name in names)])
    checkpoint = load("clip-vit-16")
    lines = (vision / "flickr8k-1000" / "test.jsonl").read_text().splitlines()
    captions = [caption for line in lines for caption in json.loads(line)["captions"]][:QUERIES]
    pictures = find_images([str(vision / "caltech101" / "val")])[::2][:QUERIES]
    asked = {"picture": query_vectors(checkpoint, images=pictures), "text": query_vectors(checkpoint, captions)}
    keep_queries(folder, {name: vectors.numpy() for name, vectors in asked.items()})
    start = time.perf_counter()
    built = build(files, checkpoint, folder, kind=kind, batch_size=64)
    return {"pictures_and_index_s": round(time.perf_counter() - start, 1), "notes": built.notes}


def queries_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".queries.npz")


def keep_queries(folder: Path, asked: dict[str, np.ndarray]) -> None:
    queries_file(folder).parent.mkdir(parents=True, exist_ok=True)
    np.savez(queries_file(folder), **asked)


def memory() -> dict[str, int]:
    """MB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(line.split()[1]) // 1024 for line in lines for name in ("RssAnon", "RssFile") if name in line}


def read_bytes() -> int:
    """Bytes that the kernel fetched from disk for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def child(folder: Path, threads: int, cold: bool, exact: bool) -> dict:
    torch.set_num_threads(threads)
    asked = {name: torch.from_numpy(values) for name, values in np.load(queries_file(folder)).items()}
    if folder.joinpath("index.json").exists() and not exact:
        import faiss  # noqa: F401  its import is no part of a search
    before, fetched, start = memory(), read_bytes(), time.perf_counter()
    index = open_index(folder)
    index.search(asked["text"][:1], 10, exact)
    first = time.perf_counter() - start
    grown = {name: value - before[name] for name, value in memory().items()}
    if cold:
        fetched = round((read_bytes() - fetched) / 1e6, 1)
        return {"cold_ms": round(first * 1000, 1), "cold_read_mb": fetched, "cold_grown_mb": grown}
    result, found = {}, {}
    for queries in asked.values():  # so that all that they touch is in the page cache
        index.search(queries, 10, exact)
    for name, queries in asked.items():
        seconds, found[name], began = [], [], time.process_time()
        queries = queries[:EXACT] if exact else queries
        for query in queries:
            start = time.perf_counter()
            found[name].append(index.search(query[None], 10, exact)[1])
            seconds.append(time.perf_counter() - start)
        result |= {f"{name}_median_ms": round(statistics.median(seconds) * 1000, 2),
                   f"{name}_p95_ms": round(float(np.percentile(seconds, 95)) * 1000, 2),
                   f"{name}_cpu_ms": round((time.process_time() - began) / len(queries) * 1000, 2)}  # fmt: skip
    result["grown_mb"] = {name: value - before[name] for name, value in memory().items()}
    for name, queries in asked.items() if not exact else ():
        wanted, rows = index.search(queries, 10, True)[1], torch.cat(found[name])
        result |= {f"{name}_recall@1": round(recall(rows[:, :1], wanted[:, :1]), 4),
                   f"{name}_recall@10": round(recall(rows, wanted), 4)}  # fmt: skip
    return result


def evict(folder: Path) -> None:
    """Puts the files out of the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def fresh(task: str, folder: Path, threads: int, exact: bool) -> dict:
    command = [sys.executable, __file__, "--task", task, "--work", str(folder), "--build_threads", str(threads)]
    done = subprocess.run([*command, *(["--exact"] if exact else [])], capture_output=True, text=True, check=True,
                          env=os.environ | {"OMP_NUM_THREADS": str(threads)}, timeout=3600)  # fmt: skip
    return json.loads(done.stdout)


def measure(folder: Path, threads: int, exact: bool) -> dict:
    colds = []
    for _ in range(3):
        evict(folder)
        colds.append(fresh("cold", folder, threads, exact))
    middle = sorted(colds, key=lambda row: row["cold_ms"])[1]
    return middle | fresh("warm", folder, threads, exact)


def described(folder: Path) -> dict:
    record = json.loads((folder / "index.json").read_text())
    sizes = {part: round(facts["bytes"] / 1e6, 1) for part, facts in record["files"].items()}
    return {key: record[key] for key in ("kind", "count", "dimension", "dtype", "effort", "recall")} | {"mb": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the indexes (4 GB for a million)")
    parser.add_argument("--data", type=Path, help="folder with vision/")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", choices=["ivf", "hnsw"], default=["ivf", "hnsw"])
    parser.add_argument("--sources", nargs="+", choices=["made-up", "clip-vit-16"], default=["made-up", "clip-vit-16"])
    parser.add_argument("--build_threads", type=int, default=2)
    parser.add_argument("--task", choices=["cold", "warm"], help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(child(args.work, args.build_threads, args.task == "cold", args.exact)))
        return
    if not args.data and "clip-vit-16" in args.sources:
        parser.error("--data: name it, or --sources made-up")
    torch.set_num_threads(args.build_threads)
    for source in args.sources:
        for kind in args.kinds:
            folder = args.work / f"{source}-{kind}"
            facts = {"source": source, "build": made(folder, source, kind, args)} | described(folder)
            print(json.dumps(facts), flush=True)
            for exact in (False, True) if kind == args.kinds[0] else (False,):
                for threads in (1, 2):
                    row = facts | {"search": "exact" if exact else kind, "threads": threads, "load": os.getloadavg()[0]}
                    row |= measure(folder, threads, exact)
                    print(json.dumps({key: row[key] for key in row.keys() - facts.keys()}), flush=True)
                    keep(row)


def made(folder: Path, source: str, kind: str, args: argparse.Namespace) -> dict:
    """Makes the index where it is not there yet; what that took."""
    kept = folder.with_name(f"{folder.name}.build.json")
    if kept.exists():
        return json.loads(kept.read_text())
    others = [path for path in args.work.glob(f"{source}-*") if path.is_dir() and path != folder]
    if others and not folder.exists():  # the same vectors
        shutil.copytree(others[0], folder)
        print(f"{folder}: with the vectors of {others[0]}", flush=True)
    if source == "made-up":
        built = made_up(folder, kind, args.count, args.width)
    else:
        built = real(folder, kind, args.data, args.work)
    built["vectors"] = "copied" if others else "made"
    kept.write_text(json.dumps(built))
    return built


def keep(row: dict) -> None:
    """In the place of an older row of its kind in `search.json`."""
    path = HERE / "search.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    names = ("source", "count", "search", "threads")
    rows = [other for other in kept if [other[name] for name in names] != [row[name] for name in names]] + [row]
    result = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
