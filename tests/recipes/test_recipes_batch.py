"""Batches with Ray Data: shards, rows, resuming; and, where Ray is installed, a worker that is killed."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from multimodal import classify
from multimodal.errors import DataError, MultimodalError, UsageError
from recipes import batch_ray
from tests.helpers.folders import every_kind, write_image


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    every_kind(folder)
    return folder / "clip"


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        write_image(folder / f"{number}.png", ("red", "blue")[number % 2])
    (folder / "4.png").write_text("broken")
    return folder


def settings(clip, photos, tmp_path, **changes):
    values = {"task": "classify", "data": photos, "output": tmp_path / "out", "model": str(clip), "rows": 3,
              "labels": ("red", "blue"), "format": "jsonl"}  # fmt: skip
    return batch_ray.BatchRun(**values | changes)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def check(rows: list[dict], photos: Path, clip: Path) -> None:
    """Each item once, with the row of a single call."""
    assert [row["file"] for row in rows] == [str(photos / f"{number}.png") for number in range(10)]
    for number, row in enumerate(rows):
        if number == 4:
            assert (row["label"], row["score"]) == ("", None)
            assert "4.png: not a readable image" in row["error"]
        else:
            best = classify(row["path"], ["red", "blue"], clip)[0]["scores"][0]
            assert (row["label"], row["error"]) == (best["label"], "")
            assert row["score"] == pytest.approx(best["score"], abs=1e-6)


@pytest.mark.ci
def test_a_worker_writes_each_shard_once(clip, photos, tmp_path):
    run = settings(clip, photos, tmp_path)
    run.output.mkdir()
    worker = batch_ray.ShardWorker(run)
    made = worker({"first": np.array([0, 3])})
    assert made["failed"].tolist() == [0, 1]
    assert len(rows_of(run.output)) == 6
    worker({"first": np.array([6, 9, 0])})
    check(rows_of(run.output), photos, clip)
    files = batch_ray.shard_files(run, batch_ray.items_of(run))
    assert sorted(files) == sorted(run.output.iterdir())
    with pytest.raises(DataError, match=r"^1 items failed"):
        batch_ray.main(replace(run, resume=True))
    (cut := sorted(files)[1]).write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"^{cut}: cannot be read .*; delete it to compute it again"):
        batch_ray.main(replace(run, resume=True))
    others = batch_ray.shard_files(settings(clip, photos, tmp_path, labels=("red", "green")), batch_ray.items_of(run))
    assert not files.keys() & others.keys()
    write_image(photos / "0.png", "blue")
    changed = batch_ray.shard_files(run, batch_ray.items_of(run))
    assert [old == new for old, new in zip(files, changed, strict=True)] == [False, True, True, True]
    shutil.copytree(clip, tmp_path / "clip")
    weights = tmp_path / "clip" / "model.safetensors"
    runs = [settings(model, photos, tmp_path) for model in (tmp_path / "clip", weights)]
    before = [batch_ray.shard_files(one, batch_ray.items_of(one)).keys() for one in runs]
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # as of a model that was trained again
    for one, known in zip(runs, before, strict=True):
        assert not known & batch_ray.shard_files(one, batch_ray.items_of(one)).keys()
    with pytest.raises(UsageError, match=r"out: has 1 results of other input or settings \(such as 000000000-"):
        batch_ray.main(settings(clip, photos, tmp_path, resume=True))


def test_captions_without_a_model_are_those_of_the_default_one(clip, photos, tmp_path):
    run = settings(clip, photos, tmp_path, task="caption", model=None, labels=())
    run.output.mkdir()
    assert batch_ray.ShardWorker(run)({"first": np.array([0])})["failed"].tolist() == [0]
    assert all(row["caption"] for row in rows_of(run.output))


def test_parquet_without_its_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MultimodalError, match="pyarrow is missing: pip install"):
        batch_ray.main(batch_ray.BatchRun("embed", tmp_path / "x.parquet", tmp_path / "out"))


def test_a_row_outside_the_folder_is_a_row_with_its_error(clip, photos, tmp_path):
    (photos / "list.jsonl").write_text("".join(f'{{"file_name": "{name}"}}\n' for name in ("0.png", "../none.png")))
    run = settings(clip, photos / "list.jsonl", tmp_path, task="embed", labels=())
    run.output.mkdir()
    assert batch_ray.ShardWorker(run)({"first": np.array([0])})["failed"].tolist() == [1]
    good, bad = rows_of(run.output)
    assert (good["path"], good["error"]) == (str(photos / "0.png"), "")
    assert (bad["path"], bad["vector"]) == ("", None)
    assert "outside" in bad["error"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": (), "model": None}, "--task classify needs labels"),
        ({"task": "embed"}, "labels needs --task classify"),
    ],
)
def test_settings_that_contradict_each_other(clip, photos, tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        settings(clip, photos, tmp_path, **changes)


@pytest.mark.filterwarnings("default")  # ray's own
def test_a_killed_worker_loses_nothing(clip, photos, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    run = settings(clip, photos, tmp_path, rows=1, actors=2, cpus=0.5)

    killed = []

    def kill():
        while len(list(run.output.glob("*.jsonl"))) < 2:
            time.sleep(0.05)
        lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
        killed.append(next(int(pid) for pid, line in lines.items() if b"ray::MapWorker" in line))
        os.kill(killed[0], signal.SIGKILL)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    threading.Thread(target=kill, daemon=True).start()
    try:
        with pytest.raises(Exception, match="1 items failed"):
            batch_ray.main(run)
        check(rows_of(run.output), photos, clip)
        assert killed
        kept = {path: path.stat().st_mtime_ns for path in run.output.iterdir()}
        lost = sorted(kept)[5]
        lost.unlink()
        with pytest.raises(UsageError, match="--resume keeps"):
            batch_ray.main(run)
        with pytest.raises(DataError, match="1 items failed"):
            batch_ray.main(settings(clip, photos, tmp_path, rows=1, resume=True))
        check(rows_of(run.output), photos, clip)
        changed = {path for path in run.output.iterdir() if path.stat().st_mtime_ns != kept[path]}
        assert changed == {lost}
    finally:
        ray.shutdown()
