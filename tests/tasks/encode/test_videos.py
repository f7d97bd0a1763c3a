"""Videos where images go in: a result for each frame, or one for the clip."""

import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from multimodal import Captioner, Classifier, Embedder
from multimodal.errors import ImageError, UsageError, VideoError
from multimodal.tasks.retrieve.build import build
from multimodal.tasks.retrieve.index import clip_vector, open_index, query_vectors
from multimodal.tasks.retrieve.record import IndexEntry
from multimodal.tasks.retrieve.store import IndexWriter
from multimodal.tokens.video.names import FrameName, is_video
from multimodal.tokens.video.options import VideoOptions
from multimodal.tokens.video.reading import frames
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load
from tests.helpers.data.captions import written
from tests.helpers.data.video_files import noise, video

LABELS = ["red", "a dog", "night"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("videos") / "clip.mp4"
    path.write_bytes(video(noise(20)))
    return path


@pytest.fixture
def photo(tmp_path):
    Image.effect_noise((40, 40), 50).convert("RGB").save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def stills(clip, **options):
    return [frame.image for frame in frames(clip, VideoOptions(**options))]


def scores_of(results):
    return np.array([[next(s["score"] for s in r["scores"] if s["label"] == name) for name in LABELS] for r in results])


def test_a_frame_is_scored_like_its_image(models, clip, photo):
    classify = Classifier(models / "clip", LABELS, max_frames=3, batch_size=2)
    results = classify([photo, clip])
    expected = Classifier(models / "clip", LABELS)([photo, *stills(clip, max_frames=3)])
    assert [r["file"] for r in results] == [str(photo), *(f"{clip} @ {time} s" for time in ("0.3", "0.9", "1.6"))]
    assert [r.get("time") for r in results] == [None, 0.3, 0.9, 1.6]
    np.testing.assert_allclose(scores_of(results), scores_of(expected), atol=1e-5)


def test_keys_and_errors_keep_their_order(models, clip, photo):
    classify = Classifier(models / "clip", LABELS, max_frames=2)
    data = clip.read_bytes()
    items = [str(clip), data, photo, io.BytesIO(data), "none.mp4", Image.new("RGB", (9, 9))]
    found = list(classify.many(items))
    assert [key for key, _ in found] == [
        f"{clip} @ 0.4 s", f"{clip} @ 1.4 s", (1, 0.4), (1, 1.4), photo, (3, 0.4), (3, 1.4), "none.mp4", 5
    ]  # fmt: skip
    assert [key for key, result in found if isinstance(result, ImageError)] == ["none.mp4"]
    assert [key for key, _ in classify.many([("a", clip)], keyed=True)] == ["a @ 0.4 s", "a @ 1.4 s"]
    with pytest.raises(VideoError, match=r"none.mp4: no such file"):
        classify("none.mp4")
    with pytest.raises(UsageError, match=r"every_s must be a number in \[0.001"):
        Classifier(models / "clip", LABELS, every_s=0)


def test_a_clip_has_the_mean_of_its_frames(models, clip):
    vectors = Embedder(models / "clip", every_s=0.5).images(clip)
    whole = Embedder(models / "clip", every_s=0.5, per_clip=True, batch_size=3).images([clip])
    assert vectors.shape[0] == 4
    mean = F.normalize(torch.from_numpy(vectors).mean(0), dim=0).numpy()
    np.testing.assert_allclose(whole[0], mean, atol=1e-5)
    classify = Classifier(models / "clip", LABELS, every_s=0.5, per_clip=True)
    logits = classify.scorer.vector_logits(torch.from_numpy(vectors)).mean(0, keepdim=True)
    results = classify([clip])
    assert results[0]["file"] == str(clip)
    np.testing.assert_allclose(scores_of(results), classify.scorer.scored(logits).numpy(), atol=1e-5)


def test_columns_have_a_row_for_each_video(models, clip, photo):
    batch = {"path": np.array([str(clip), str(photo), "none.mp4"], object)}
    made = Classifier(models / "clip", LABELS, max_frames=3)(batch)
    assert len(made["label"]) == 3
    assert [bool(error) for error in made["error"]] == [False, False, True]
    assert Embedder(models / "clip", max_frames=3)(batch)["vector"].shape[0] == 3


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*the caption is empty")
def test_captions_of_frames_or_of_the_best_one(clip, tmp_path):
    save_folder(written(end=2.0), tmp_path / "captioner")
    rows = Captioner(tmp_path / "captioner", max_frames=4)(clip)
    assert [row["time"] for row in rows] == [0.2, 0.7, 1.2, 1.6]
    (best,) = Captioner(tmp_path / "captioner", max_frames=4, per_clip=True, batch_size=3)(clip)
    expected = max(rows, key=lambda row: (row["finished"], row["score"]))
    assert best["score"] == pytest.approx(expected["score"], rel=1e-5)
    assert [best[name] for name in ("file", "time", "caption")] == [str(clip), expected["time"], expected["caption"]]


def test_a_damaged_video_is_one_error(models, tmp_path):
    data = bytearray(video(noise(2), form="mov", codec="png"))
    place = data.index(b"mdat") + 4
    data[place : place + 24_000] = bytes(24_000)
    (tmp_path / "clip.mov").write_bytes(data)
    for per_clip in (False, True):
        ((_, error),) = Embedder(models / "clip", per_clip=per_clip).many([tmp_path / "clip.mov"])
        assert isinstance(error, VideoError)
        assert "no frames (0 decoded, 2 failed" in str(error)


@pytest.mark.ci
def test_an_index_of_frames_is_updated_as_a_whole(models, clip, photo, tmp_path):
    checkpoint, folder = load(models / "clip"), tmp_path / "index"

    def built(**options):
        made = build([photo, clip], checkpoint, folder, dtype="float32", **options)
        return made.added, made.changed, made.dropped

    def names():
        index = open_index(folder)
        return [name.replace(str(clip), "clip") for name in index.files(range(len(index)))]

    assert built(every_s=1.0) == (3, 0, 0)
    assert names() == [str(photo), "clip @ 0 s", "clip @ 1 s"]
    index = open_index(folder)
    wanted = query_vectors(checkpoint, images=[photo, *stills(clip, every_s=1.0)])
    np.testing.assert_allclose(index.vectors, F.normalize(wanted, dim=1), atol=1e-5)
    assert built(every_s=1.0) == (0, 0, 0)
    assert built(every_s=0.5) == (2, 2, 0)
    assert names()[1:] == ["clip @ 0 s", "clip @ 0.5 s", "clip @ 1 s", "clip @ 1.5 s"]
    assert built(every_s=0.5, per_clip=True) == (1, 0, 4)
    assert names() == [str(photo), "clip"]
    index = open_index(folder)
    whole = clip_vector(checkpoint, clip, VideoOptions(every_s=0.5))
    assert index.search(whole, 1)[0].item() == pytest.approx(1, abs=1e-5)
    clip_bytes = clip.read_bytes()
    try:
        clip.write_bytes(clip_bytes[:900])
        assert built(every_s=0.5) == (0, 0, 1)
        assert names() == [str(photo)]
    finally:
        clip.write_bytes(clip_bytes)


def test_a_video_cut_off_by_a_kill_is_read_again(models, clip, tmp_path):
    checkpoint, folder = load(models / "clip"), tmp_path / "index"
    build([clip], checkpoint, tmp_path / "other", max_frames=3)
    other = open_index(tmp_path / "other")
    stat = clip.stat()
    entry = IndexEntry(str(clip), stat.st_size, stat.st_mtime_ns, 0.3, "max_frames=3", 3)
    empty = {"count": 0, "files": {}, "generation": 1}
    with IndexWriter(folder, type(other.record)(**{**vars(other.record), **empty})) as writer:
        writer.append([entry], np.asarray(other.vectors[:1], np.float32))
    made = build([clip], checkpoint, folder, max_frames=3)
    assert (made.added, made.changed) == (2, 1)
    index = open_index(folder)
    assert index.files(range(len(index))) == [f"{clip} @ {time} s" for time in ("0.3", "0.9", "1.6")]


def test_what_is_a_video(clip, photo, tmp_path):
    data = clip.read_bytes()
    (tmp_path / "unnamed").write_bytes(data)
    (tmp_path / "picture").write_bytes(photo.read_bytes())
    for source in (clip, str(clip), data, io.BytesIO(data), tmp_path / "unnamed", "https://a.org/clip.MP4?x=1.png"):
        assert is_video(source)
    avif = b"\0\0\0\x1cftypavif" + bytes(200)
    for source in (photo, photo.read_bytes(), avif, "none", "a.jpg", tmp_path, 3, None, Image.new("RGB", (1, 1)), b""):
        assert not is_video(source)
    name = FrameName("clip.mp4", 12.4)
    assert name == "clip.mp4 @ 12.4 s"
    assert pickle.loads(pickle.dumps(name)).time == 12.4
