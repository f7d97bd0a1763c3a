"""Sources of training items: every layout read by number, remote ones once; damage keeps its number."""

import functools
import gzip
import http.server
import os
import pickle
import tarfile
import threading
from pathlib import Path

import fsspec
import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander

from multimodal.data.cleaning.compression import zstd
from multimodal.data.manifests import short_names
from multimodal.data.shards import OpenFiles
from multimodal.data.sources import ListColumns, joined, open_source
from multimodal.errors import DataError
from multimodal.tokens.image.reading import read_image
from tests.helpers.data import sets
from tests.helpers.data.servers import LocalServer, QuietRequest
from tests.helpers.spread import thin

VALUES = range(10, 22)
MAKERS = {
    "folder": lambda place: sets.folder(place / "images", VALUES),
    "tar": lambda place: sets.shard(place / "a.tar", VALUES),
    "csv": lambda place: sets.table(place / "list.csv", VALUES),
}


def red(media: Path | bytes) -> int:
    return read_image(media).getpixel((0, 0))[0]


@pytest.mark.parametrize("layout", MAKERS)
def test_each_item_has_its_own_label_and_name(layout, tmp_path):
    source = open_source(MAKERS[layout](tmp_path))
    samples = [source.read(key) for key in range(len(source))]
    assert sorted(red(sample.media) for sample in samples) == list(VALUES)
    for key, sample in enumerate(samples):
        value = red(sample.media)
        assert (sample.texts[0] if layout == "csv" else sample.label) == sets.label(value)
        assert source.name(key) == (f"{tmp_path}/list.csv line {key + 2}" if layout == "csv" else sample.name)
        assert sample.name.endswith(f"a.tar!{value:03}.png" if layout == "tar" else f"{value:03}.png")
    assert source.labels == (None if layout == "csv" else ("class0", "class1", "class2"))


def test_a_folder_without_folders_has_no_labels_and_splits_are_not_classes(tmp_path):
    sets.folder(tmp_path, VALUES)
    source = open_source(tmp_path / "class1")
    assert (len(source), source.labels) == (4, None)
    (tmp_path / "class0").rename(tmp_path / "train")
    (tmp_path / "class1").rename(tmp_path / "val")
    for path in (tmp_path / "class2").iterdir():
        path.unlink()
    (tmp_path / "class2").rmdir()
    with pytest.raises(DataError, match="holds the splits train, val: name one"):
        open_source(tmp_path)


def test_the_folder_that_a_mac_adds_to_a_zip_is_no_class(tmp_path):
    data = sets.folder(tmp_path, VALUES)
    (data / "__MACOSX" / "class0").mkdir(parents=True)
    (data / "__MACOSX" / "class0" / "a.png").write_bytes(b"no image")
    assert open_source(data).labels == ("class0", "class1", "class2")


@pytest.mark.parametrize(("label", "wanted"), [
    (1, "1"), (1.0, "1"), ("1.0", "1.0"), (True, None), (1.5, None), ([1], None), ({"a": 1}, None),
])  # fmt: skip
def test_labels_are_strings_or_whole_numbers(tmp_path, label, wanted):
    rows = [{"image": "a.png", "label": "x"}, {"image": "b.png", "label": label}]
    source = open_source(sets.lines(tmp_path / "train.jsonl", rows))
    assert source.row(1).label == wanted
    if wanted is None:
        with pytest.raises(DataError, match=r"line 2: a label is not a string or a whole number \("):
            source.read(1)


def test_lists_name_columns_and_resolve_paths(tmp_path):
    (tmp_path / "sound").mkdir()
    rows = [
        {"audio_filepath": "sound/a.wav", "duration": 1.5, "text": "one", "speaker": "x"},
        {"audio_filepath": str(tmp_path / "b.wav"), "duration": 2, "text": "two", "label": 3},
        {"audio_filepath": "s3://bucket/c.wav", "text": "three"},
    ]
    source = open_source(sets.lines(tmp_path / "train.jsonl", ["\ufeff", *rows, ""]))
    assert [source.row(key).fields.get("duration") for key in range(2)] == [1.5, 2]
    assert source.read(1).media == tmp_path / "b.wav"
    with pytest.raises(DataError, match=r"no label \(others of its source have one\)"):
        source.read(0)  # the second has one
    source = open_source(sets.lines(tmp_path / "train.jsonl", rows[:1]))
    assert source.read(0).media == tmp_path / "sound/a.wav"
    assert (source.read(0).texts, source.read(0).fields["speaker"]) == (("one",), "x")
    captions = sets.lines(tmp_path / "c.jsonl", [{"file_name": "x.jpg", "captions": ["a", "b"]}])
    assert open_source(captions).read(0).texts == ("a", "b")
    text = 'img\tsaid\nx.jpg\t"a, ""quoted""\nline"\n\ny.jpg\tb\n'
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "t.csv.zst").write_bytes(zstd.compress(text.encode()))
    for name in ("t.csv", "t.csv.gz", "t.csv.zst"):
        source = open_source(tmp_path / name, columns=ListColumns("img", "said"))
        assert [source.read(key).texts for key in range(2)] == [('a, "quoted"\nline',), ("b",)]


def test_tars_are_grouped_as_webdataset_groups_them(tmp_path):
    members = [
        ("./a/x.y/one.png", sets.png(1)), ("./a/x.y/one.CLS", b"k\n"), ("./a/x.y/one.seg.png", sets.png(2)),
        ("__meta__/none.png", b"?"), ("two.txt", " Ö ".encode()), ("two.json", b'{"w": 3}'), ("two.jpg", b"J"),
        ("two.cls", b"m"), ("nodot", b""), ("one.seg.png", sets.png(3)), ("one.png", sets.png(4)), ("one.cls", b"n"),
        ("one.txt", b"t"),
    ]  # fmt: skip
    path = sets.tar(tmp_path / "a.tar", members)
    with path.open("rb") as stream:
        theirs = list(group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])))
    source = open_source(path)
    assert len(source) == len(theirs) == 3
    rows = [source.row(key) for key in range(3)]
    assert [row.label for row in rows] == [sample["cls"].decode().strip() for sample in theirs] == ["k", "m", "n"]
    assert rows[0].fault == "no text (others of its source have one)"
    assert source.read(1).media == theirs[1]["jpg"] == b"J"
    assert (source.read(1).texts, source.read(1).fields) == (("Ö",), {"w": 3})
    assert source.read(2).media == theirs[2]["png"]
    assert [row.name.partition("!")[2] for row in rows] == ["./a/x.y/one.png", "two.jpg", "one.png"]


def test_a_sample_of_several_images_is_broken_and_byte_order_marks_are_no_text(tmp_path):
    members = [("a.v1.png", sets.png(1)), ("a.cls", b"k"), ("a.v2.png", sets.png(2)), ("b.png", sets.png(3)),
               ("b.cls", "\ufeffk".encode()), ("c.wav", b"W"), ("c.mic.wav", b"V"), ("c.cls", b"k"), ("d.png", b"P"),
               ("d.jpg", b"J"), ("d.cls", b"k")]  # fmt: skip
    source = open_source(sets.tar(tmp_path / "a.tar", members))
    assert [source.row(key).fault for key in range(4)] == [
        "several images in one sample (v1.png, v2.png)", "", "", "several images in one sample (png, jpg)",
    ]  # fmt: skip
    assert source.labels == ("k",)
    assert source.read(2).media == b"W"


def test_a_sample_with_a_sparse_member_is_broken(tmp_path):
    path = sets.tar(tmp_path / "a.tar", [("a.png", sets.png(1)), ("b.png", sets.png(2))])
    with tarfile.open(path, "a", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("b.txt")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        tar.addfile(member)
    assert open_source(path).row(1).fault == "b.txt is a sparse file, which is not read"


def test_many_tars_by_folder_pattern_braces_and_list(tmp_path):
    for number in range(3):
        sets.shard(tmp_path / f"train-{number:04}.tar", range(4 * number, 4 * number + 4))
    forms = ["", "/train-{0000..0002}.tar", "/train-*.tar", "/train-0000.tar::{}/train-{{0001,0002}}.tar"]
    for form in forms:
        source = open_source(str(tmp_path) + form.replace("{}", str(tmp_path)).replace("{{", "{").replace("}}", "}"))
        assert [red(source.read(key).media) for key in range(len(source))] == list(range(12)), form
    sets.shard(tmp_path / "val-0000.tar", range(4))
    with pytest.raises(DataError, match=r"several sets \(train-, val-\): name one"):
        open_source(tmp_path)
    with pytest.raises(DataError, match=r"train-0003\.tar: no such file"):
        open_source(f"{tmp_path}/train-{{0000..0003}}.tar")


def test_joined_sources_count_on(tmp_path):
    parts = [open_source(MAKERS[layout](tmp_path)) for layout in MAKERS]
    source = joined(parts)
    assert len(source) == 36
    assert source.labels == ("class0", "class1", "class2")
    names = [part.name(key) for part in parts for key in range(len(part))]
    assert [source.name(key) for key in range(36)] == names
    assert [source.read(key).name for key in (0, 12)] == [names[0], names[12]]
    assert names[35] == f"{tmp_path}/list.csv line 13"
    assert len(open_source([tmp_path / "a.tar", tmp_path / "list.csv"])) == 24
    for key in (36, -1):
        with pytest.raises(IndexError):
            source.read(key)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("scheme", ["memory", "http"])
def test_remote_shards_are_copied_once(scheme, tmp_path):
    path, cache = sets.shard(tmp_path / "a b.tar", VALUES), tmp_path / "cache"
    if scheme == "memory":
        fsspec.filesystem("memory").pipe_file("/sets/a b.tar", path.read_bytes())
        url = "memory://sets/a b.tar"
    else:
        handler = functools.partial(Quiet, directory=tmp_path)
        server = LocalServer(handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"{server.url}/a%20b.tar?x=1"
    source = open_source(url, cache=cache)
    path.unlink()
    if scheme == "http":
        with pytest.raises(DataError, match=r"other.tar\?x=1: cannot be copied"):
            open_source(url.replace("a%20b", "other"), cache=cache)
        server.shutdown()
        server.server_close()
    again = open_source(url, cache=cache)
    for key, value in enumerate(VALUES):
        assert red(source.read(key).media) == red(again.read(key).media) == value
    assert source.name(0) == f"{url}!010.png"
    assert len([file for file in cache.iterdir() if file.suffix != ".lock"]) == 1


class Quiet(QuietRequest, http.server.SimpleHTTPRequestHandler):
    pass


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("pipe:cat {} - > made", r"^pipe:cat .*: URL scheme must be one of .* \(got 'pipe'\)"), ("PIPE:x", "'pipe'"),
        ("nonsense://x/a.tar", "nonsense"), ("memory://no/such.tar", "cannot be copied"),
        ("memory://empty.tar", "empty"), ("memory://cut.tar", "not a readable tar"),
    ],
)  # fmt: skip
def test_a_remote_shard_that_fails_leaves_no_copy(url, cause, tmp_path):
    path, files = sets.shard(tmp_path / "a.tar", VALUES), fsspec.filesystem("memory")
    files.pipe({"/empty.tar": b"", "/cut.tar": path.read_bytes()[:100]})
    for _ in range(2):
        with pytest.raises(DataError, match=cause):
            open_source(url.format(path), cache=tmp_path / "cache")
    copies = [p for p in (tmp_path / "cache").glob("*") if p.suffix != ".lock"]
    assert len(copies) == (cause == "not a readable tar")


def test_a_list_behind_a_url_names_its_media_there(tmp_path):
    files = fsspec.filesystem("memory")
    files.pipe_file(
        "/lists/train.jsonl", b'{"file_name": "in/7.png", "text": "x"}\n{"file_name": "no.png", "text": "y"}'
    )
    files.pipe_file("/lists/in/7.png", sets.png(7))
    source = open_source("memory://lists/train.jsonl", cache=tmp_path)
    assert red(source.read(0).media) == 7
    with pytest.raises(DataError, match=r"memory://lists/no\.png: cannot be copied"):
        source.read(1)


def test_compressed_tars_are_unpacked_once(tmp_path):
    plain = sets.shard(tmp_path / "a.tar", VALUES)
    packed = tmp_path / "b.tar.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    source = open_source(packed, cache=tmp_path / "cache")
    assert [red(source.read(key).media) for key in range(12)] == list(VALUES)
    assert source.name(3) == f"{packed}!013.png"
    packed.write_bytes(gzip.compress(b"no tar" * 200))
    with pytest.raises(DataError, match=rf"^{packed}: not a readable tar"):
        open_source(packed, cache=tmp_path / "cache")
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b.tar.gz: cannot be copied"):
        open_source(packed, cache=tmp_path / "cache")


def test_a_shard_that_ends_early_gives_what_is_whole_and_one_broken_item(tmp_path):
    data = sets.shard(tmp_path / "a.tar", VALUES).read_bytes()
    end = len(data.rstrip(b"\0"))
    for cut in (*range(1600, end, 700), end // 512 * 512 + 512):
        (tmp_path / "cut.tar").write_bytes(data[:cut])
        source = open_source(tmp_path / "cut.tar")
        whole = [key for key in range(len(source)) if not source.row(key).fault]
        assert whole
        assert [red(source.read(key).media) for key in whole] == [10 + key for key in whole]
        assert "ends early" in source.row(len(source) - 1).fault
        assert len(source) - len(whole) <= 2  # an image before its lost label, and the end


def test_damage_inside_a_shard_is_said(tmp_path):
    data = bytearray(sets.shard(tmp_path / "a.tar", VALUES).read_bytes())
    at = data.index(b"015.png")
    data[at : at + 300] = b"\x7f" * 300
    (tmp_path / "b.tar").write_bytes(data)
    source = open_source(tmp_path / "b.tar")
    assert [red(source.read(key).media) for key in range(5)] == [10, 11, 12, 13, 14]
    assert source.row(5).fault.startswith("the shard is damaged, the rest is lost")
    assert len(source) == 6


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("{", r"line 2: not JSON \(Expecting"), ("[1]", r"line 2: not a JSON object \(\[1\]\)"),
        (b'{"a": "\xff"}', "not JSON"),
        ({"text": "x"}, "no audio_filepath or file_name"), ({"file_name": 5, "text": "x"}, r"\(5\)"),
        ({"file_name": "x.png"}, r"no text \(others"), ({"file_name": "x.png", "text": None}, r"no text \(others"),
        ({"file_name": "pipe:touch x", "text": "x"}, "pipe: URLs in a list are not read"),
        ({"file_name": "PIPE:touch x", "text": "x"}, "pipe: URLs in a list are not read"),
        ({"audio_filepath": "x.wav", "text": "x", "offset": 3.2}, r"not read: offset must be 0 \(got 3.2\)"),
        ({"file_name": "x.png", "captions": ["a", 3]}, r"line 2: a text is not a string \(3\)"),
    ],
)  # fmt: skip
def test_a_broken_line_keeps_its_number(row, cause, tmp_path):
    good = [{"file_name": f"{value}.png", "text": str(value)} for value in range(3)]
    source = open_source(sets.lines(tmp_path / "a.jsonl", [good[0], row, *good[1:]]))
    assert len(source) == 4
    assert [source.read(key).texts for key in (0, 2, 3)] == [("0",), ("1",), ("2",)]
    with pytest.raises(DataError, match=cause) as caught:
        source.read(1)
    assert str(caught.value).startswith(source.name(1))
    assert "\n" not in str(caught.value)


def test_broken_rows_of_a_csv(tmp_path):
    (tmp_path / "b.csv").write_bytes(b"path,text,offset\na.wav,one,0.00\na.wav,two,10\na.wav,three,\n")
    rows = map(open_source(tmp_path / "b.csv").row, range(3))
    assert ["excerpts" in row.fault for row in rows] == [False, True, False]
    (tmp_path / "c.csv").write_bytes(b"path,text,caption\na.png,,one\nb.png,two,\nc.png,,\n")
    assert [row.texts for row in map(open_source(tmp_path / "c.csv").row, range(3))] == [["one"], ["two"], [""]]
    (tmp_path / "a.csv").write_bytes(b"filepath,title\na.png,one\nb.png\nc.png,t,u\nd.png,\xff\n,x\ne.png,five\n")
    source = open_source(tmp_path / "a.csv")
    faults = [source.row(key).fault for key in range(6)]
    assert [bool(fault) for fault in faults] == [False, True, True, True, True, False]
    assert "columns do not fit the header (1 instead of 2)" in faults[1]
    assert "not UTF-8" in faults[3]
    assert [source.name(key) for key in (1, 5)] == [f"{tmp_path}/a.csv line {number}" for number in (3, 7)]


@pytest.mark.parametrize(
    ("name", "data", "cause"),
    [
        ("a.jsonl", b"", "0 found"), ("a.jsonl", b"hello\nyou", "no usable item .line 1: not JSON"),
        ("a.csv", b"x,y\n1,2\n", "line 2: no audio_filepath or"), ("a.csv", b"filepath,title\n", "0 found"),
        ("a.csv", b'filepath,title\na,b\nc,"d\n', "line 3: not CSV"),
        ("a.csv", b"filepath,title,,,title\na,b,,,c\n", "duplicate column title .filepath, title"),
        ("a.csv", b",".join(b"%d" % i for i in range(100_000)) + b",0\n", r"duplicate column 0 \(0, 1.{1,396}\)$"),
        ("a.csv", b"filepath;title\na;b\n", r"separated by a comma or a tab \(got filepath;title\)"),
        ("a.csv", "filepath,title\na,b\n".encode("utf-16"), r"expected UTF-8 \(got UTF-16\)"),
        ("a.csv.gz", b"filepath", "cannot be read .Not a gzipped file"), ("a.csv.zst", b"filepath", "cannot be read"),
        ("a.jsonl.zst", zstd.compress(bytes(65 << 20)), "unpacks to more than 100 times its size"),
        ("a.tar", b"no tar" * 200, "a.tar: not a readable tar"),
        ("a.tar", b"", "a.tar: not a readable tar"), ("a.xyz", b"x", r"must be a folder, a list or a tar.*\.xyz"),
        ("a.json", b'{"file_name": 3}', "line 1: no"), ("a.tar", bytes(10240), "0 found"),
        ("a.jsonl", b'{"file_name": "\\ud800.png"}', r"line 1: a lone surrogate in a path .'\\ud800\.png'"),
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused_in_one_line(name, data, cause, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=cause) as caught:
        open_source(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_missing_empty_and_irregular_sources_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "empty").mkdir()
    for name, cause in (("none.tar", "no such file"), ("pipe.jsonl", "not a regular"), ("empty", "0 found"),
                        ("x{1", "none|no such|pattern"), ("*.tar", "0 found")):  # fmt: skip
        with pytest.raises(DataError, match=cause):
            open_source(tmp_path / name)


def test_samples_that_lack_a_member_keep_their_number(tmp_path):
    members = [("a.png", b"A"), ("a.cls", b"x"), ("b.png", b"B"), ("c.cls", b"z"), ("d.png", b"D"), ("d.cls", b"\xff"),
               ("e.png", b"E"), ("e.cls", b"y")]  # fmt: skip
    source = open_source(sets.tar(tmp_path / "a.tar", members))
    assert [source.row(key).fault.partition(" (")[0] for key in range(5)] == [
        "", "no label", "no image or audio file among its members", "a member cannot be read", "",
    ]  # fmt: skip
    assert (source.read(4).media, source.read(4).label) == (b"E", "y")


def test_a_source_can_be_sent_to_another_process(tmp_path):
    source = open_source(MAKERS["tar"](tmp_path))
    before = source.read(3)
    assert pickle.loads(pickle.dumps(source)).read(3) == before
    if (child := os.fork()) == 0:  # its own handle: the position in the parent's file is not moved
        os._exit(0 if source.read(3) == before and source._handles._process == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert source.read(3) == before


def test_handles_are_few_and_a_shrunk_shard_is_said(tmp_path):
    paths = [sets.shard(tmp_path / f"{number:03}.tar", [number]) for number in range(OpenFiles.most + 6)]
    source = open_source(tmp_path)
    open_files = len(os.listdir("/proc/self/fd"))
    assert [red(source.read(key).media) for key in range(len(source))] == list(range(len(paths)))
    assert len(os.listdir("/proc/self/fd")) - open_files <= OpenFiles.most
    os.truncate(paths[0], 540)
    with pytest.raises(DataError, match=r"000.tar: ends early \(got \d+ of"):
        source.read(0)


def test_names_that_are_no_utf8_are_kept(tmp_path):
    folder = sets.folder(tmp_path, [1])
    os.rename(folder / "class1" / "001.png", os.fsencode(folder / "class1") + b"/\xff.png")
    source = open_source(folder)
    assert red(source.read(0).media) == 1


@pytest.mark.parametrize(("paths", "parts", "names"), [
    (("a/q", "b/r"), 1, ["q", "r"]),
    (("a/q", "b/q", "b/q"), 1, ["a/q", "b/q", "b/q"]),
    (("/x/a/q", "/y/a/q", "/y/b"), 2, ["x/a/q", "y/a/q", "/y/b"]),
    (("q", "/q"), 2, ["q", "/q"]),
])  # fmt: skip
def test_short_names_tell_paths_apart(paths, parts, names):
    assert short_names(paths, parts) == names
