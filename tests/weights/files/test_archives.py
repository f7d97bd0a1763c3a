"""Pickled checkpoints read as data: equal to PyTorch's readers, and no code of a hostile file runs."""

import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multimodal.errors import CheckpointError
from multimodal.system.files import sha256
from multimodal.train.checkpoint.atomic import check, read_state, save_state
from multimodal.train.checkpoint.state import random_state, set_random_state
from multimodal.weights.convert import convert
from multimodal.weights.files import pickled, torchscript
from multimodal.weights.files.archives import read_archive
from multimodal.weights.files.pickled import Instance, Name
from multimodal.weights.files.tensor_files import read_shards
from tests.helpers.data import hostile

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, bias=False)
        self.small = torch.nn.Parameter(torch.randn(4, 6).half())
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.names = ["a", "b"]
        self.sizes = [1, 2]
        self.table = {"x": 1}
        self.plain = torch.ones(5)  # an attribute, no part of the state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.sizes[0] + self.plain[0]


class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Part(), Part()])
        self.tied = self.blocks[0].linear
        shared = torch.randn(4, 6, dtype=torch.bfloat16)
        self.register_buffer("turned", shared.T)
        self.register_buffer("cut", shared[1:3, ::2])
        self.register_buffer("scalar", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tied(x)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Whole()).save(folder / "scripted.pt")
        torch.jit.trace(Whole(), torch.randn(2, 3)).save(folder / "traced.pt")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_a_torchscript_archive_has_the_state_dict_that_running_it_gives(scripts, kind):
    expected, actual = torch.jit.load(scripts[kind]).state_dict(), read_archive(scripts[kind])
    assert actual.keys() == expected.keys()
    assert {"blocks.0.small", "blocks.1.count", "blocks.0.passing", "tied.weight", "turned"} <= actual.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].stride()) == (tensor.dtype, tensor.stride())
        assert actual[name].equal(tensor)
    assert actual["tied.weight"].data_ptr() == actual["blocks.0.linear.weight"].data_ptr()
    assert actual["turned"].untyped_storage().data_ptr() == actual["cut"].untyped_storage().data_ptr()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_both_layouts_of_torch_save_are_read_to_the_bit(tmp_path, zipped, protocol):
    base = torch.randn(5, 6)
    state = {
        "turned": base.T, "part": base[1:3, ::2], "half": torch.randn(3).half(), "brain": torch.randn(3).bfloat16(),
        "flags": torch.tensor([True, False]), "empty": torch.zeros(0, 3), "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.randn(2)), "double": torch.randn(2).double(),
        "model": torch.nn.Linear(2, 2).state_dict(), "rest": [1, (2.5, "x", None, True), {3: -(2**70)}],
    }  # fmt: skip
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    actual = read_archive(tmp_path / "x.pt")
    assert actual.keys() == state.keys()
    assert actual["rest"] == state["rest"]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert (actual[name].dtype, actual[name].stride()) == (value.dtype, value.stride())
            assert actual[name].equal(value)
    assert actual["model"]["weight"].equal(state["model"]["weight"])
    assert actual["turned"].untyped_storage().data_ptr() == actual["part"].untyped_storage().data_ptr()


@pytest.mark.parametrize("module", [hostile.Restores, hostile.Holds])
def test_no_code_of_a_torchscript_archive_runs(tmp_path, monkeypatch, module):
    victim = tmp_path / "home" / hostile.TARGET
    victim.parent.mkdir()
    hostile.hostile_script(tmp_path / "x.pt", module)
    monkeypatch.chdir(victim.parent)
    for before in (None, "precious, and 33 characters long.."):
        if before:
            victim.write_text(before)
        with pytest.raises(CheckpointError, match=r"x\.pt: .*restores its state with code") as error:
            convert(tmp_path / "x.pt", tmp_path / "out")
        assert "\n" not in str(error.value)
        assert (victim.read_text() if victim.exists() else None) == before
        assert sorted(os.listdir(tmp_path)) == ["home", "x.pt"]
    torch.jit.load(tmp_path / "x.pt")  # the archive is what it claims to be
    assert victim.read_text().startswith("A" * 33)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_no_reducer_of_a_pickle_runs(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    hostile.hostile_pickle("x.pt", zipped)
    with pytest.raises(CheckpointError, match=r"x\.pt: .*names \w+\.system"):
        convert(Path("x.pt"), Path("out"))
    os.mkdir("state-000000001")
    os.rename("x.pt", "state-000000001/state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt: .*names \w+\.system"):
        read_state(Path("state-000000001"))
    assert os.listdir() == ["state-000000001"]
    hostile.run("state-000000001/state.pt")  # the file is what it claims to be
    assert Path(hostile.TARGET).exists()


def refused(path: Path, cause: str) -> None:
    with pytest.raises(CheckpointError, match=cause) as error:
        read_archive(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("count", "offset", "size", "stride", "cause"),
    [
        (6, 0, (2, 4), (4, 1), "reaches outside"), (6, 1, (6,), (1,), "reaches outside"),
        (6, 0, (2, 3), (1 << 61, 1), "reaches outside"), (6, 0, (1 << 40, 3), (0, 1), "reaches outside"),
        (6, 0, (-1,), (1,), "not a count"), (6, 0, (2, 3), (-3, 1), "not a count"), (6, -1, (6,), (1,), "not a count"),
        (6, 0, (2, 3), (3,), "dimensions with"), (6, 0, (1,) * 65, (1,) * 65, "65 dimensions"),
        (6, 0, (2.0, 3), (3, 1), "not a count"), (6, 7, (0,), (1,), "reaches outside"),
        (7, 0, (2, 3), (3, 1), "has 24 bytes, not 7 x 4"), (1 << 60, 0, (2, 3), (3, 1), "has 24 bytes, not"),
        (-6, 0, (2, 3), (3, 1), "unknown kind"),
    ],
)  # fmt: skip
def test_a_tensor_stays_inside_of_its_storage(tmp_path, count, offset, size, stride, cause):
    data = hostile.tensor_opcodes(count, offset, size, stride)
    hostile.opcodes(tmp_path / "x.pt", lambda _: data)
    refused(tmp_path / "x.pt", cause)


def test_the_maker_of_lying_tensors_makes_good_ones_too(tmp_path):
    hostile.opcodes(tmp_path / "x.pt", lambda _: hostile.tensor_opcodes(6, 1, (2, 2), (3, 1)))
    assert read_archive(tmp_path / "x.pt")["weight"].tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    ("stream", "cause"),
    [
        (hostile.bare(b"cbuiltins\neval\n(X\x01\x00\x00\x00atR"), "names builtins.eval"),
        (hostile.bare(b"ccollections\nOrderedDict\n)R}X\x01\x00\x00\x00aNsb"), "unknown format"),
        (hostile.bare(b"]q\x00h\x00a"), "got a list"),  # a list in itself
        (hostile.bare(b"}q\x00X\x01\x00\x00\x00ah\x00s"), "'a' is a dict"),
        pytest.param(hostile.bare(b"}" + b")" + b"\x85" * 100_000 + b"Ns"), "neither a text nor a number",
                     marks=pytest.mark.ci),
        (hostile.bare(b"(" * 100_000), "damaged"), (hostile.bare(b"t"), "index out of range|damaged"),
        (hostile.bare(b"h\x05"), "damaged"), (hostile.bare(b""), "damaged|pop"),
        (hostile.bare(b"c__main__\nX\n)\x81"), "names __main__.X"), (hostile.bare(b"(i__main__\nX\n"), "holds inst"),
        (hostile.bare(b"\x82\x01"), "holds ext1"), (hostile.bare(b"Pabc\n"), "holds persid"),
        (hostile.bare(b"ctorch\nFloatStorage\n)\x81"), "got a Instance|not a TorchScript module"),
        (hostile.bare(b"ctorch\nFloatStorage\n)R"), "calls torch.FloatStorage"),
        (hostile.bare(b"c__torch__\nM\n)\x81"), "not a TorchScript module"),
        (hostile.bare(b"ctorch\nSize\n]\x85R"), r"expected a tuple \(got a list"),
        (hostile.bare(b"ccollections\nOrderedDict\n)\x85R"), r"expected a list \(got a tuple"),
        (hostile.bare(b"}\x8a\x08" + bytes(7) + b"\x10Ns"), "a dict key of 1152921504606846976 or more"),
        (b"\x80\x02}", "exhausted|damaged|STOP"), (b"\x80\x02\xfe.", "opcode"),
    ],
)  # fmt: skip
def test_a_strange_stream_is_refused(tmp_path, stream, cause):
    hostile.opcodes(tmp_path / "x.pt", lambda _: stream)
    with pytest.raises(CheckpointError, match=cause) as error:
        convert(tmp_path / "x.pt", tmp_path / "out")
    assert str(error.value).startswith(f"{tmp_path / 'x.pt'}: ")
    assert "\n" not in str(error.value)


def wrong_sum(path: Path) -> None:
    hostile.rezipped(path, lambda members: None)
    data = bytearray(path.read_bytes())
    place = data.index(torch.arange(6.0).numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)


def lying_size(path: Path) -> None:
    """The directory claims 2**31 bytes for a storage of 24."""
    hostile.rezipped(path, lambda members: None)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\1\2", 0, data.rindex(b"data/0"))
    data[entry + 20 : entry + 28] = (1 << 31).to_bytes(4, "little") * 2
    path.write_bytes(data)


def member(path: Path, name: str) -> None:
    hostile.rezipped(path, lambda members: [*members.items(), (name, b"x")])


def twice(path: Path) -> None:
    hostile.rezipped(path, lambda members: [*members.items(), *((n, d) for n, d in members.items() if "data/0" in n)])


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda path: hostile.cut(path, 0.3), "damaged"), (lambda path: hostile.cut(path, 0.9), "damaged"),
        (wrong_sum, "CRC"), (lying_size, "claim 2147483648 bytes"),
        (lambda path: member(path, "../outside"), "'../outside' lies outside"),
        (lambda path: member(path, "/tmp/x"), "'/tmp/x' lies outside"),
        (lambda path: member(path, "archive/../../x"), "lies outside"), (twice, "appears 2 times"),
        (lambda path: hostile.rezipped(path, lambda members: None, zipfile.ZIP_DEFLATED), "is compressed"),
        (lambda path: hostile.rezipped(path, lambda members: [("x.txt", b"1")]), "no data.pkl"),
        (lambda path: hostile.rezipped(path, lambda members: [*members.items(), ("b/data.pkl", b"1")]), "2 data.pkl"),
        (lambda path: hostile.rezipped(path, lambda members: [(n, b"big" if n.endswith("byteorder") else d)
                                                              for n, d in members.items()]), "not little-endian"),
        (hostile.hostile_tar, "a tar archive of NeMo"),
        (lambda path: hostile.hostile_tar(path, "w:gz"), "a gzip archive"),
        (lambda path: path.write_bytes(b""), "neither a zip"),
        (lambda path: path.write_bytes(b"\x80"), "not enough data"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "not one of torch.save"),
        (os.mkfifo, "not a regular file"), (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path), "_rebuild_sparse_tensor"),
        (lambda path: torch.save({"w": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}, path),
         "_rebuild_qtensor"),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), "names torch.nn.modules.linear.Linear"),
    ],
)  # fmt: skip
def test_a_strange_archive_is_refused(tmp_path, make, cause):
    make(tmp_path / "x.pt")
    refused(tmp_path / "x.pt", cause)


def test_a_hub_snapshot_of_links_is_read_and_a_name_that_leaves_it_is_not(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot" / "part").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "1")
    save_file({"b": torch.zeros(3), "unlisted": torch.ones(1)}, tmp_path / "blobs" / "2")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to("../blobs/1")
    (tmp_path / "snapshot" / "part" / "b.safetensors").symlink_to("../../blobs/2")
    index = tmp_path / "snapshot" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "part/b.safetensors"}}))
    assert {name: tensor.tolist() for name, tensor in read_shards(index).items()} == {"a": [1, 1], "b": [0, 0, 0]}
    for name in ("../blobs/1", str(tmp_path / "blobs" / "1"), "part/../../blobs/1", "..\\blobs\\1", "", ".", "a\0"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match=r"weight_map: .* names no file in"):
            read_shards(index)


def test_a_state_that_lists_a_file_elsewhere_is_refused(tmp_path):
    save_state(tmp_path / "states", 1, {"x": 1})
    (tmp_path / "other").write_bytes(b"1")
    marker = tmp_path / "states" / "state-000000001" / "complete.json"
    record = json.loads(marker.read_text())
    record["files"]["../../other"] = {"bytes": 1, "sha256": sha256(tmp_path / "other")}
    marker.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"complete\.json: '\.\./\.\./other' names no file"):
        check(marker.parent)


@pytest.mark.parametrize("position", [-1, 625, 10**9, None])
def test_a_random_state_beyond_its_words_is_refused(position):
    state = random_state()
    state["numpy"][2] = position
    with pytest.raises((ValueError, TypeError)):
        set_random_state(state)


def test_counts_are_limited_before_they_take_minutes(tmp_path):
    hostile.opcodes(tmp_path / "x.pt", lambda _: hostile.bare(b"N0" * 200), content={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled, "MOST_OPCODES", 100)
        refused(tmp_path / "x.pt", "more than 100 pickle opcodes")
        pairs = b"NN\x86q\x01]q\x00(" + b"h\x01" * 20 + b"eccollections\nOrderedDict\nq\x02"
        hostile.opcodes(tmp_path / "x.pt", lambda _: hostile.bare(pairs, b"h\x02h\x00\x85R" * 6), content={})
        refused(tmp_path / "x.pt", "copies more than 100 items")
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive:
        for number in range(130):
            archive.writestr(f"{number}" * 20_000, b"")
    refused(tmp_path / "y.pt", r"a zip directory of \d+ bytes, more than 4194304")


def test_a_torchscript_module_in_many_places_or_of_a_long_name_is_refused(monkeypatch):
    monkeypatch.setattr(torchscript, "MOST_ATTRIBUTES", 1000)
    module = Instance(kind := Name("__torch__", "M"))
    module.state = {"w": torch.ones(1)}
    for _ in range(20):
        inner, module = module, Instance(kind)
        module.state = {"a": inner, "b": inner}
    classes = {kind: torchscript.Declared(None, False)}
    with pytest.raises(ValueError, match="more than 1000 attributes"):
        torchscript.state_dict(module, classes)
    module.state = {"x" * 600: torch.ones(1)}
    with pytest.raises(ValueError, match="a name of 600 characters"):
        torchscript.state_dict(module, classes)


@pytest.mark.ci
def test_a_bomb_among_the_members_is_refused_before_it_is_unpacked(tmp_path):
    bomb = hostile.bare(b"(" + b"N" * (65 << 20))
    hostile.rezipped(tmp_path / "x.pt", lambda members: [("x/data.pkl", bomb)], zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.pt").stat().st_size < 1 << 20
    refused(tmp_path / "x.pt", "more than 67108864")
