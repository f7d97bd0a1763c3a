"""Image index: contents after updates and interruptions, and searches equal to the plain product."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.tasks.retrieve import record as index_record
from multimodal.tasks.retrieve.build import build, finish
from multimodal.tasks.retrieve.index import model_for, open_index, query_vectors
from multimodal.tasks.retrieve.nearest import QuerySample, blocks_of, exact, recall
from multimodal.tasks.retrieve.record import BLOCK, IndexEntry, IndexRecord, read_index_record
from multimodal.tasks.retrieve.store import IndexWriter
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load
from tests.helpers.data.index_files import cut, write_image
from tests.helpers.spread import thin


@pytest.fixture(scope="module")
def clip(models: Path) -> Checkpoint:
    return load(models / "clip")


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return [write_image(tmp_path / "photos" / f"{number:02}.png", number) for number in range(12)]


def vectors_of(clip: Checkpoint, files: list[Path]) -> Tensor:
    """Reference: one by one."""
    return torch.cat([query_vectors(clip, images=[file]) for file in files])


def holds(clip: Checkpoint, folder: Path, files: list[Path]) -> None:
    """Assert that the index has these images with their vectors."""
    index = open_index(folder)
    found = dict(zip(index.files(range(len(index))), np.asarray(index.vectors, np.float32), strict=True))
    assert sorted(found) == sorted(map(str, files))
    wanted = vectors_of(clip, files).numpy()
    np.testing.assert_allclose(np.stack([found[str(file)] for file in files]), wanted, atol=1e-3)


def test_search_ranks_like_the_plain_product(clip, photos, tmp_path):
    built = build(photos, clip, tmp_path / "index", dtype="float32", batch_size=5)
    assert (built.added, built.changed, built.dropped, built.refused) == (12, 0, 0, [])
    queries = query_vectors(clip, ["a photo of a red square", "a dog"], [photos[3]])
    index = open_index(tmp_path / "index")
    scores, rows = index.search(3 * queries, 5)  # any length
    wanted = (queries @ vectors_of(clip, photos).T).topk(5)
    torch.testing.assert_close(scores, wanted.values, atol=1e-5, rtol=0)
    assert torch.equal(rows, wanted.indices)
    assert index.files(rows[2])[0] == str(photos[3])
    assert abs(scores[2, 0] - 1) < 1e-5


def test_half_precision_finds_each_image_and_top_is_limited_to_the_index(clip, photos, tmp_path):
    build(photos, clip, tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert index.vectors.dtype == np.float16
    scores, rows = index.search(query_vectors(clip, images=photos), 100)
    assert rows.shape == (12, 12)
    assert rows[:, 0].tolist() == list(range(12))
    assert ((scores[:, 0] - 1).abs() < 1e-3).all()


def test_an_update_reads_only_new_and_changed_images(clip, photos, tmp_path, monkeypatch):
    folder = tmp_path / "index"
    build(photos, clip, folder)
    read = []
    monkeypatch.setattr(
        "multimodal.tokens.image.arrays.read_image", lambda path: read.append(str(path)) or opened(path)
    )
    record = read_index_record(folder)
    again = build(photos, clip, folder)
    assert (read, again.added, again.changed, again.record) == ([], 0, 0, record)
    write_image(photos[4], 99)
    os.utime(photos[4], ns=(1, 1))
    new = write_image(tmp_path / "photos" / "new.png", 50)
    again = build([*photos, new], clip, folder)
    assert (again.added, again.changed, again.dropped) == (1, 1, 0)
    assert sorted(read) == sorted(map(str, [photos[4], new]))
    holds(clip, folder, [*photos, new])


def opened(path: str | Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def test_missing_images_are_dropped_inside_the_given_folders(clip, photos, tmp_path):
    other = write_image(tmp_path / "other" / "a.png", 1)
    lost = write_image(tmp_path / "lost" / "b.png", 2)
    build([*photos, other, lost], clip, tmp_path / "index")
    photos[0].unlink()
    lost.unlink()
    built = build(photos[1:], clip, tmp_path / "index", within=[tmp_path / "photos"])
    assert built.dropped == 1
    index = open_index(tmp_path / "index")
    assert set(index.files(range(len(index)))) == {*map(str, photos[1:]), str(other), str(lost)}
    build([other], clip, tmp_path / "index", within=[tmp_path])
    holds(clip, tmp_path / "index", [*photos[1:], other])
    assert len(list((tmp_path / "index").glob("vectors-*"))) == 1


def test_a_broken_image_is_reported_and_its_vector_dropped(clip, photos, tmp_path):
    photos[2].write_bytes(b"no image")
    built = build([*photos, tmp_path / "none.png"], clip, tmp_path / "index")
    assert len(built.refused) == 2
    assert any("02.png" in str(error) for error in built.refused)
    assert built.added == 11
    photos[5].write_bytes(b"no image either")
    built = build(photos, clip, tmp_path / "index")
    assert (len(built.refused), built.dropped) == (2, 1)
    holds(clip, tmp_path / "index", [p for p in photos if p not in (photos[2], photos[5])])


class Stop(BaseException):
    """Like a kill: the package does not catch it."""


def stop_after(images: int):
    def watch(done: int, of: int, broken: int) -> None:
        if done >= images:
            raise Stop

    return watch


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize("damage", ["", "line", "row", "rows", "zeros"])
def test_an_interrupted_build_keeps_finished_vectors(clip, photos, tmp_path, damage):
    folder = tmp_path / "index"
    with pytest.raises(Stop):
        build(photos, clip, folder, batch_size=3, watch=stop_after(6))
    with pytest.raises(UsageError, match="not finished"):
        open_index(folder)
    vectors, names = folder / "vectors-1.npy", folder / "images-1.jsonl"
    if damage == "line":
        os.truncate(names, names.stat().st_size - 5)
    elif damage in ("row", "rows"):  # after a power cut a line may lack its row
        os.truncate(vectors, vectors.stat().st_size - (7 if damage == "row" else 96))
    elif damage == "zeros":
        with vectors.open("r+b") as file:
            file.seek(-32, os.SEEK_END)
            file.write(bytes(32))
    todo = []
    built = build(photos, clip, folder, watch=lambda done, of, broken: todo.append(of))
    kept = {"": 6, "line": 5, "row": 5, "rows": 3, "zeros": 5}[damage]
    assert todo == [12 - kept]
    assert built.record.count == 12
    holds(clip, folder, photos)


def test_an_interrupted_update_leaves_the_old_index(clip, photos, tmp_path, monkeypatch):
    folder = tmp_path / "index"
    build(photos[:6], clip, folder)
    old = open_index(folder)
    photos[0].unlink()
    monkeypatch.setattr(IndexWriter, "commit", lambda *_: (_ for _ in ()).throw(Stop()))
    with pytest.raises(Stop):  # after writing the rows of the next generation
        build(photos[1:], clip, folder, within=[tmp_path / "photos"])
    for index in (old, open_index(folder)):
        assert index.files(range(len(index))) == [str(tmp_path / "photos" / f"{n:02}.png") for n in range(6)]
    monkeypatch.undo()
    built = build(photos[1:], clip, folder, within=[tmp_path / "photos"])
    assert (built.added, built.record.count) == (0, 11)
    holds(clip, folder, photos[1:])


def test_odd_names_round_trip(clip, tmp_path):
    names = ["a\nb.png", 'q"u,o;te.png', "\u202eрус.png", os.fsdecode(b"latin-\xe9.png"), " space .png"]
    files = [write_image(tmp_path / "p" / name, n) for n, name in enumerate(names)]
    build(files, clip, tmp_path / "index")
    holds(clip, tmp_path / "index", files)
    assert build(files, clip, tmp_path / "index").added == 0


def test_an_index_of_another_model_is_refused(clip, models, photos, tmp_path):
    folder = tmp_path / "index"
    build(photos[:2], clip, folder)
    other = load(models / "clip")
    with torch.no_grad():
        other.model.logit_scale.add_(1e-3)
    with pytest.raises(UsageError, match="model_sha256"):
        build(photos, other, folder)
    with pytest.raises(UsageError, match="other weights"):
        model_for(open_index(folder), other)
    with pytest.raises(UsageError, match="float32"):
        build(photos, clip, folder, dtype="float32")
    with pytest.raises(UsageError, match="expected a CLIP or ViT"):
        build(photos, load(models / "asr"), tmp_path / "asr")
    assert len(open_index(folder)) == 2
    assert build(photos[:3], other, folder, overwrite=True, dtype="float32").added == 3
    holds(other, folder, photos[:3])


def test_a_folder_of_other_files_and_a_second_writer_are_refused(clip, photos, tmp_path):
    with pytest.raises(UsageError, match="has other files"):
        build(photos, clip, tmp_path / "photos")
    assert not (tmp_path / "photos" / "lock").exists()
    with pytest.raises(UsageError, match="cannot be written"):
        build(photos, clip, photos[0])
    with pytest.raises(UsageError, match="holds no index"):
        open_index(tmp_path / "photos")
    build(photos[:2], clip, tmp_path / "index")
    with IndexWriter(tmp_path / "index", read_index_record(tmp_path / "index")):
        with pytest.raises(UsageError, match="another process"):
            build(photos, clip, tmp_path / "index")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "index.json.a_1.part").touch()  # as a kill during the first write leaves it
    build(photos[:2], clip, tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("*.part"))


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", ["images-2.jsonl", "vectors-1.npy", "lines-1-2.npy.part", "lock"])
def test_links_and_pipes_of_a_foreign_index_are_not_written_through(clip, photos, tmp_path, name):
    folder, outside = tmp_path / "index", tmp_path / "mine.txt"
    build(photos[:2], clip, folder)
    outside.write_text("kept")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(UsageError, match=rf"{name}: expected a regular file"):
        build(photos, clip, folder)
    assert outside.read_text() == "kept"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UsageError, match=rf"{name}: expected a regular file"):
        build(photos, clip, folder)


def test_lines_beyond_the_file_are_damage(clip, photos, tmp_path):
    build(photos[:2], clip, tmp_path / "index")
    index = open_index(tmp_path / "index")
    index._lines = np.full(3, 1 << 62)
    with pytest.raises(CheckpointError, match=r"lines-1-2\.npy: damaged .row 1"):
        index.files([1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)


@thin(3, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["vectors-1.npy", "images-1.jsonl", "lines-1-12.npy"])
def test_damage_is_found(clip, photos, tmp_path, name, harm):
    folder = tmp_path / "index"
    build(photos, clip, folder)
    harm(folder / name)
    with pytest.raises(CheckpointError, match=name):
        open_index(folder)
    if name.startswith("lines"):  # made of the others
        assert name in build(photos, clip, folder).notes[0]
    else:
        with pytest.raises(CheckpointError, match=name):
            build(photos, clip, folder)
        build(photos, clip, folder, overwrite=True)
    holds(clip, folder, photos)


def test_a_copied_folder_is_hashed_once(clip, photos, tmp_path, monkeypatch):
    build(photos, clip, tmp_path / "index")
    folder = shutil.copytree(tmp_path / "index", tmp_path / "copy", copy_function=shutil.copyfile)
    read = []
    digest = index_record.digest
    monkeypatch.setattr(index_record, "digest", lambda path, *range_: read.append(path.name) or digest(path, *range_))
    assert len(open_index(folder)) == 12
    assert sorted(read) == ["images-1.jsonl", "lines-1-12.npy", "vectors-1.npy"]
    assert build(photos, clip, folder).added == 0  # checks the rows and leaves the files
    assert len(open_index(folder)) == 12
    assert len(read) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2}'])
def test_a_damaged_record_is_one_line(clip, photos, tmp_path, text):
    build(photos[:1], clip, tmp_path / "index")
    (tmp_path / "index" / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_index(tmp_path / "index")


def test_an_index_of_an_unknown_kind_is_one_line_and_replaced(clip, photos, tmp_path):
    folder = tmp_path / "index"
    build(photos[:1], clip, folder)
    record = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(record | {"kind": "hnsw"}))
    for use in (open_index, lambda folder: build(photos, clip, folder)):
        with pytest.raises(CheckpointError, match=r"kind: expected 'flat' or 'ivf' \('hnsw'\); run .* --overwrite"):
            use(folder)
    build(photos, clip, folder, overwrite=True)
    holds(clip, folder, photos)


def clustered(count: int, width: int = 32, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal((60, width))[random.integers(60, size=count)]
    values = values + 0.7 * random.standard_normal((count, width))
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def filled(
    folder: Path, vectors: np.ndarray, kind: str | None, notes: list[str], target: float | None = 0.95
) -> None:  # fmt: skip
    preprocessing = Preprocessing((8, 8), "squash", "bicubic", (0.5,) * 3, (0.5,) * 3, 0, 1.0)
    record = IndexRecord("none", None, "0" * 64, preprocessing, vectors.shape[1], "float32")
    samples = {"image": QuerySample(torch.from_numpy(clustered(50, seed=1)))}
    with IndexWriter(folder, record) as writer:
        rows = range(writer.rows, len(vectors))
        writer.append([IndexEntry(f"/p/{row}.png", 1, 1) for row in rows], vectors[rows.start :])
        finish(writer, kind, target, lambda _: samples, notes)


@pytest.mark.ci
def test_faiss_reaches_the_target_recall_with_exact_scores(tmp_path):
    vectors, notes = clustered(5000), []
    filled(tmp_path, vectors[:4000], "ivf", notes)
    filled(tmp_path, vectors, "ivf", notes)  # extends the index
    record, index = read_index_record(tmp_path), open_index(tmp_path)
    assert (record.kind, record.count, notes) == ("ivf", 5000, [])
    assert record.recall["image"] >= 0.95
    queries = torch.from_numpy(clustered(100, seed=2))
    scores, rows = index.search(queries, 10)
    wanted = index.search(queries, 10, exact_search=True)
    assert 0.9 < recall(rows, wanted[1]) <= 1
    torch.testing.assert_close(scores, (queries @ torch.from_numpy(vectors).T).gather(1, rows))
    assert len(list(tmp_path.glob("*.faiss"))) == 1
    filled(tmp_path, vectors, "ivf", notes, target=1.0)
    assert read_index_record(tmp_path).effort > record.effort
    filled(tmp_path, np.concatenate([vectors, clustered(100, seed=3)]), None, notes, target=None)
    record = read_index_record(tmp_path)
    assert (record.kind, record.count, record.recall["target"]) == ("ivf", 5100, 1.0)
    filled(tmp_path, vectors, "flat", notes)
    assert read_index_record(tmp_path).kind == "flat"


def test_an_update_leaves_the_kind_and_auto_outgrows_flat(tmp_path, monkeypatch):
    monkeypatch.setattr("multimodal.tasks.retrieve.nearest.FLAT_MOST", 300)
    kinds, vectors = [], clustered(600)
    for count, kind in [(200, None), (400, None), (400, "flat"), (600, None)]:
        filled(tmp_path, vectors[:count], kind, [], target=None)
        kinds.append(read_index_record(tmp_path).kind)
    assert kinds == ["flat", "ivf", "flat", "flat"]


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_a_damaged_faiss_index_is_ignored_then_rebuilt(tmp_path, harm):
    vectors, notes = clustered(600), []
    filled(tmp_path, vectors, "ivf", notes)
    harm(tmp_path / "ivf-1-600.faiss")
    queries = torch.from_numpy(clustered(5, seed=2))
    index = open_index(tmp_path)
    with pytest.warns(UserWarning, match="searching exactly"):
        _, rows = index.search(queries, 10)
    assert torch.equal(rows, (queries @ torch.from_numpy(vectors).T).topk(10).indices)
    filled(tmp_path, vectors, "ivf", notes)
    assert "ivf-1-600.faiss" in notes[0]
    open_index(tmp_path).search(queries, 10)


def test_exact_search_equals_topk_over_several_blocks():
    vectors = torch.from_numpy(clustered(2 * BLOCK + 7))
    vectors[BLOCK + 5] = vectors[3]  # of equal scores the earlier row
    queries = torch.cat([vectors[:1], vectors[3:4], torch.from_numpy(clustered(4, seed=3))])
    scores, rows = exact(blocks_of(vectors.numpy()), queries, 20)
    wanted = (queries @ vectors.T).sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(scores, wanted.values[:, :20])
    assert torch.equal(rows, wanted.indices[:, :20])
    assert rows[1, :2].tolist() == [3, BLOCK + 5]


def test_bad_queries_and_vectors_that_are_not_finite(clip, photos, tmp_path):
    build(photos[:2], clip, tmp_path / "index")
    index = open_index(tmp_path / "index")
    with pytest.raises(TextError, match="empty"):
        query_vectors(clip, ["  "])
    with pytest.raises(UsageError, match="of 16 numbers"):
        index.search(torch.ones(1, 15))
    assert index.search(torch.ones(0, 16))[0].shape == (0, 2)
    broken = load(clip.source)
    with torch.no_grad():
        broken.model.image_project.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="not finite"):
        build(photos, broken, tmp_path / "nan")
    assert json.loads((tmp_path / "nan" / "index.json").read_text())["count"] == 0
