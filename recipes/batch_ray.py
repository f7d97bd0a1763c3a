r"""Classify, embed, transcribe or caption many files with Ray Data on one machine or a cluster (install `.[ray]`).

    python recipes/batch_ray.py --task classify --labels "a dog" "a cat" --data photos --output results
    python recipes/batch_ray.py --task transcribe --data calls.jsonl --output results --format jsonl --gpus 1 --actors 8

Data: a folder, a CSV or JSONL manifest, tars, or parquet with a column `bytes`, `path` or `text`. Each shard of the
input becomes one file, named by its items and the settings and moved into place when it is complete: a lost worker
repeats its shard, and `--resume` leaves finished shards alone; shards of other items, settings or files of the model
are refused. An item that fails is a row with its error, and the recipe ends with 1; it is tried again if its shard is
deleted.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from multimodal import Captioner, Classifier, Embedder, Transcriber
from multimodal.data.loader import BROKEN
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import open_source
from multimodal.errors import DataError, MultimodalError, UsageError, one_line
from multimodal.system.assets import model_path
from multimodal.system.files import sha256, write_whole
from multimodal.system.options import NonNegativeFloat, Positive
from multimodal.train import log, start

Columns = dict[str, np.ndarray]
COLUMNS = ("bytes", "path", "text")  # of parquet


@dataclass(frozen=True)
class BatchRun:
    task: Literal["classify", "embed", "transcribe", "caption"]
    data: Path  # folder, manifest, tar or parquet
    output: Path  # folder of the results
    model: str | None = None  # name, folder or hub repository (default: that of the task's command)
    labels: tuple[str, ...] = ()  # for --task classify with a CLIP; a ViT with a head has its own
    language: str | None = None  # for --task transcribe
    format: Literal["parquet", "jsonl"] = "parquet"
    rows: Positive = 256  # items per shard
    batch: Positive = 32  # images or windows computed together
    actors: Positive = 2  # workers, each with a model of its own
    cpus: NonNegativeFloat = 0.9  # of each worker; leave some for the reader
    gpus: NonNegativeFloat = 0  # of each worker
    resume: bool = False  # keep the shards that --output has
    trust: Trust = OWN_FOLDER

    def __post_init__(self):
        if self.labels and self.task != "classify":
            raise UsageError("needs --task classify", argument="labels")
        if self.task == "classify" and not self.labels and self.model is None:
            raise UsageError("--task classify needs labels, or a ViT with a head", argument="labels")


def task_of(run: BatchRun) -> Callable[[Columns], Columns]:
    """The object that maps columns to columns."""
    model, device = [run.model] if run.model else [], "cuda" if run.gpus else "cpu"
    if run.task == "classify":
        named: dict[str, Any] = {"labels": run.labels or None}
        return Classifier(*model, **named, batch_size=run.batch, device=device)
    if run.task == "embed":
        return Embedder(*model, batch_size=run.batch, device=device)
    if run.task == "caption":
        return Captioner(*model, batch_size=run.batch, device=device)
    named = {"language": run.language} if run.language else {}
    return Transcriber(*model, **named, batch_size=run.batch, device=device)


class FileItems:
    """Items of a folder, manifest or tar: names, and columns of a range of them."""

    def __init__(self, data: Path, trust: Trust):
        self.source = open_source(data, trust=trust)
        self.names = [self.source.name(key) for key in range(len(self.source))]
        self.identities = list(map(self.source.identity, range(len(self.source))))

    def shards(self, rows: int) -> Iterator[range]:
        for first in range(0, len(self.names), rows):
            yield range(first, min(first + rows, len(self.names)))

    def columns(self, keys: range) -> tuple[Columns, dict[int, str]]:
        """Columns `file` and `bytes` or `path`, and the errors of items that cannot be read by their place."""
        media, errors = [], {}
        for place, key in enumerate(keys):
            try:
                media.append(self.source.read(key).media)
            except BROKEN as error:
                media.append(None)
                errors[place] = str(error)
        packed = any(isinstance(one, bytes) for one in media)
        plain = lambda one: one if isinstance(one, bytes) else one.read_bytes() if packed else str(one)
        values = [(b"" if packed else "") if one is None else plain(one) for one in media]
        files = np.array([self.names[key] for key in keys], object)
        return {"file": files, "bytes" if packed else "path": np.array(values, object)}, errors


class ParquetItems:
    """Rows of a parquet file; each shard lies within a row group."""

    def __init__(self, data: Path):
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise MultimodalError("pyarrow is missing: pip install '.[ray]'") from None
        try:
            self.file = parquet.ParquetFile(data)
        except Exception as error:  # pyarrow's own
            raise DataError(f"{data}: cannot be read as parquet ({str(error).splitlines()[0]:.100})") from None
        self.column = next((name for name in COLUMNS if name in self.file.schema_arrow.names), None)
        if self.column is None:
            found = ", ".join(self.file.schema_arrow.names)
            raise DataError(f"{data}: expected a column {', '.join(COLUMNS)} (got {found})")
        self.keep = [name for name in self.file.schema_arrow.names if name != "bytes"]
        self.starts = np.cumsum(
            [0, *(self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups))]
        )
        self.names = [f"{data.name}:{row}" for row in range(self.starts[-1])]
        self.identities = [f"{(status := data.stat()).st_size} {status.st_mtime_ns}"] * len(self.names)

    def shards(self, rows: int) -> Iterator[range]:
        for group in range(self.file.num_row_groups):
            first, stop = int(self.starts[group]), int(self.starts[group + 1])
            yield from (range(at, min(at + rows, stop)) for at in range(first, stop, rows))

    def columns(self, keys: range) -> tuple[Columns, dict[int, str]]:
        group = int(np.searchsorted(self.starts, keys.start, "right")) - 1
        first = keys.start - int(self.starts[group])
        table = self.file.read_row_group(group, columns=list({*self.keep, self.column})).slice(first, len(keys))
        made = {"file": np.array([self.names[key] for key in keys], object)}
        return made | {name: _objects(table[name].to_pylist()) for name in table.column_names}, {}


def _objects(values: list[Any]) -> np.ndarray:
    """An array of objects, also of equally long lists."""
    made = np.empty(len(values), object)
    made[:] = values
    return made


def items_of(run: BatchRun) -> FileItems | ParquetItems:
    return ParquetItems(run.data) if run.data.suffix == ".parquet" else FileItems(run.data, run.trust)


def model_files(model: str | None) -> list[list[str]]:
    """Paths and sums of a model's files; of none for a model of a hub."""
    place = model_path(model) if model else Path()
    files = [place] if place.is_file() else sorted(place.rglob("*")) if model and place.is_dir() else []
    return [[str(path.relative_to(place)), sha256(path)] for path in files if path.is_file()]


def shard_files(run: BatchRun, items: FileItems | ParquetItems) -> dict[Path, range]:
    """File and items of each shard; the file of items that have changed, or of a changed model, has another name."""
    settings = [run.task, run.model, list(run.labels), run.language, str(run.data.resolve()), model_files(run.model)]
    found = {}
    for keys in items.shards(run.rows):
        own = [[items.names[key], items.identities[key]] for key in keys]
        digest = hashlib.sha256(json.dumps([settings, own]).encode()).hexdigest()
        found[run.output / f"{keys.start:09}-{digest[:12]}.{run.format}"] = keys
    return found


def table_bytes(columns: Columns, form: str) -> bytes:
    rows = {name: [v.tolist() if isinstance(v, np.ndarray) else v for v in values] for name, values in columns.items()}
    if form == "jsonl":
        lines = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        return "".join(json.dumps(_plain(line), ensure_ascii=False) + "\n" for line in lines).encode()
    import pyarrow
    import pyarrow.parquet as parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table(rows), file)
    return file.getvalue()


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: the score or vector of a failed item is null."""
    line = {name: value.item() if isinstance(value, np.generic) else value for name, value in line.items()}
    first = lambda value: value[0] if isinstance(value, list) and value else value
    return {name: None if first(value) != first(value) else value for name, value in line.items()}


def failures(path: Path) -> int:
    """Number of failed items in a finished shard."""
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                return sum(bool(json.loads(line)["error"]) for line in file)
        import pyarrow.parquet as parquet

        return sum(map(bool, parquet.read_table(path, columns=["error"])["error"].to_pylist()))
    except (ValueError, LookupError, OSError) as error:  # pyarrow's are ValueErrors
        raise DataError(f"{path}: cannot be read ({one_line(error)}); delete it to compute it again") from None


class ShardWorker:
    """Called by Ray with the first items of shards: computes and writes each of them."""

    def __init__(self, run: BatchRun):
        import torch

        torch.set_num_threads(max(1, int(run.cpus)))
        self.run, self.task, self.items = run, task_of(run), items_of(run)
        self.files = {keys.start: (path, keys) for path, keys in shard_files(run, self.items).items()}

    def __call__(self, batch: Columns) -> Columns:
        failed = [self._write(*self.files[int(first)]) for first in batch["first"]]
        return {"first": batch["first"], "failed": np.array(failed)}

    def _write(self, path: Path, keys: range) -> int:
        columns, errors = self.items.columns(keys)
        made = self.task(columns)
        for place, error in errors.items():
            made["error"][place] = error
        write_whole(path, table_bytes(made, self.run.format))
        return sum(map(bool, made["error"]))


def main(run: BatchRun) -> None:
    run = replace(run, data=run.data.resolve(), output=run.output.resolve())
    files = shard_files(run, items_of(run))
    run.output.mkdir(parents=True, exist_ok=True)
    if (there := [path for path in run.output.iterdir() if path.suffix == f".{run.format}"]) and not run.resume:
        raise UsageError(
            f"{run.output}: has results ({len(there)} files); --resume keeps those of the same input", argument="output"
        )
    if other := sorted({*there} - {*files}):
        raise UsageError(f"{run.output}: has {len(other)} results of other input or settings (such as {other[0].name})",
                         argument="output")  # fmt: skip
    left = {path: keys for path, keys in files.items() if not path.exists()}
    failed = sum(map(failures, files.keys() - left.keys()))
    log.info(f"{len(files)} shards, {len(files) - len(left)} finished before, with {failed} failed items")
    for count, (first, errors) in enumerate(_computed(run, left), len(files) - len(left) + 1):
        failed += errors
        log.info(f"shard {count} of {len(files)} (from item {first}): {errors} items failed")
    if failed:
        raise DataError(f"{failed} items failed; their rows have the error")


def _computed(run: BatchRun, left: dict[Path, range]) -> Iterator[tuple[int, int]]:
    """Yield the first item and the failures of each shard as it is written."""
    if not left:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MultimodalError("ray is missing: pip install '.[ray]'") from None
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    shards = ray.data.from_items([{"first": keys.start} for keys in left.values()], override_num_blocks=len(left))
    pool = ray.data.ActorPoolStrategy(size=min(run.actors, len(left)))
    done = shards.map_batches(
        ShardWorker, fn_constructor_args=(run,), batch_size=1, compute=pool, num_cpus=run.cpus, num_gpus=run.gpus
    )
    for row in done.iter_rows():
        yield row["first"], row["failed"]


if __name__ == "__main__":
    start(main)
