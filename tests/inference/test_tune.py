"""Choice of the way to multiply: made once, kept, and harmless wherever the file is."""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from multimodal.inference import prepare, tune
from multimodal.inference.native import attention, encoder
from multimodal.inference.packed import PackedLinear, can_pack, row_linear
from multimodal.inference.row_table import TableLinear
from tests.helpers.spread import thin

Product = Callable[[Tensor], Tensor]
SHAPES = "8 inputs, about 4^5 weights"  # of 128 x 8
calls: list[str] = []


def quick(weight: Tensor) -> Product:
    calls.append("quick")
    return lambda x: x[:, :1].expand(-1, len(weight))


def slow(weight: Tensor) -> Product:
    def product(x: Tensor) -> Tensor:
        for _ in range(30):
            torch.ones(100_000).sum()
        return quick(weight)(x)

    return product


def inexact(weight: Tensor) -> Product:
    return lambda x: x[:, :1].expand(-1, len(weight)) * len(x)


def broken(weight: Tensor) -> Product:
    raise RuntimeError("no such instruction")


WAYS = {"slow": slow, "quick": quick, "inexact": inexact, "broken": broken}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a process that has chosen nothing yet."""
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path))
    monkeypatch.delenv("MULTIMODAL_TUNE")
    monkeypatch.setattr(tune, "WEIGHTS", 1 << 10)
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_known", {})
    monkeypatch.setattr(tune, "_spent", 0.0)
    calls.clear()


def quicker(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """Let what has this name be measured as the quickest; returns what was measured."""
    measured: list[object] = []

    def times(works: dict[str, Callable[[], object]]) -> dict[str, float]:
        measured.append({one: work() for one, work in works.items()})
        return {one: 1.0 + (one != name) for one in works}

    monkeypatch.setattr(tune, "least_times", times)
    return measured


def choose(usual: str = "slow") -> str:
    return tune.choose(128, 8, WAYS, usual)


def test_the_quickest_exact_way_is_chosen_once_and_read_back(home: Path, monkeypatch: pytest.MonkeyPatch):
    random = torch.get_rng_state()
    assert choose() == "quick"
    assert torch.equal(torch.get_rng_state(), random)
    assert json.loads((home / "tune.json").read_text()) == {tune.machine(): {SHAPES: "quick"}}
    calls.clear()
    assert choose() == "quick"
    forget(monkeypatch)
    assert choose() == "quick"
    assert not calls  # not measured again


def test_other_numbers_of_rows_are_another_question(home: Path):
    assert tune.choose(128, 8, WAYS, "slow", (64,)) == choose() == "quick"
    assert json.loads((home / "tune.json").read_text())[tune.machine()] == {
        f"{SHAPES}, rows 64, on one thread": "quick",
        SHAPES: "quick",
    }


def stalled(kind: type) -> type:
    """A map as exact as `kind`, which takes longer."""

    class Stalled(kind):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.002)
            torch.ones(1000, 1000).sin_().sum()
            return super().forward(x)

    return Stalled


@pytest.mark.usefixtures("compiled")
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("native", [False, True])
def test_towers_take_compiled_maps_where_they_are_the_quickest_exact_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native: bool
):
    monkeypatch.setenv("MULTIMODAL_CACHE", str(tmp_path))
    monkeypatch.delenv("MULTIMODAL_TUNE")
    forget(monkeypatch)
    exact = encoder.NativeLinear  # on both sides, since oneDNN's are exact on some processors alone
    monkeypatch.setattr(encoder, "PackedLinear", stalled(exact) if native else exact)
    monkeypatch.setattr(encoder, "NativeLinear", exact if native else stalled(exact))
    assert encoder.prefers_native() == native
    monkeypatch.setattr(encoder, "library", lambda: None)
    assert not encoder.prefers_native()


def test_without_measuring_the_usual_way_stays(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tune, "_spent", 1.0)
    assert choose() == "slow"  # after too long a time, for this process
    monkeypatch.setenv("MULTIMODAL_TUNE", "0")
    assert choose() == "slow"
    assert not calls
    assert not list(home.iterdir())


def test_ways_of_about_the_same_speed_do_not_replace_the_usual_one(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tune, "GAIN", 1e9)
    assert choose() == "slow"
    monkeypatch.setattr(tune, "_known", {})
    (home / "tune.json").unlink()
    assert choose("inexact") == "quick"  # but an inexact one is never chosen


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"MACHINE": 1}', b'{"MACHINE": {"SHAPES": 1}}',
     b'{"MACHINE": {"SHAPES": []}}', b'{"MACHINE": {"SHAPES": "no such way"}}', b'{"another": {"SHAPES": "slow"}}'],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_ignored(home: Path, content: bytes):
    file = home / "tune.json"
    file.write_bytes(content.replace(b"MACHINE", tune.machine().encode()).replace(b"SHAPES", SHAPES.encode()))
    assert choose() == "quick"
    stored = json.loads(file.read_text())
    assert stored[tune.machine()] == {SHAPES: "quick"}
    assert stored.get("another", {SHAPES: "slow"}) == {SHAPES: "slow"}  # another machine's choices stay


@pytest.mark.parametrize("blocked", ["file", "folder"])
def test_a_place_that_cannot_be_written_or_read_does_no_harm(home: Path, monkeypatch: pytest.MonkeyPatch, blocked: str):
    if blocked == "file":  # the cache folder is a file
        (home / "cache").write_text("")
        monkeypatch.setenv("MULTIMODAL_CACHE", str(home / "cache"))
    else:
        (home / "tune.json").mkdir()
    assert choose() == "quick"
    calls.clear()
    assert choose() == "quick"
    assert not calls  # in this process it is known


def test_what_another_process_has_chosen_meanwhile_counts(home: Path, monkeypatch: pytest.MonkeyPatch):
    measured = tune._measured

    def beside(*args: object) -> str:
        (home / "tune.json").write_text(json.dumps({tune.machine(): {SHAPES: "slow", "others": "quick"}}))
        return measured(*args)

    monkeypatch.setattr(tune, "_measured", beside)
    assert choose() == "slow"
    assert json.loads((home / "tune.json").read_text())[tune.machine()] == {SHAPES: "slow", "others": "quick"}


def test_two_processes_at_once_leave_a_whole_file(home: Path):
    fork = multiprocessing.get_context("fork")
    runs = [fork.Process(target=lambda: sys.exit(choose() != "quick")) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0]
    assert json.loads((home / "tune.json").read_text()) == {tune.machine(): {SHAPES: "quick"}}
    assert [file.name for file in home.iterdir()] == ["tune.json"]


@pytest.mark.parametrize(("way", "kind"), [("packed", PackedLinear), ("table", TableLinear)])
def test_maps_for_decoding_are_made_in_the_chosen_way(monkeypatch: pytest.MonkeyPatch, way: str, kind: type):
    monkeypatch.setattr("multimodal.inference.packed.choose", lambda *_: way)
    assert type(row_linear(torch.randn(9, 5))) is kind
    if can_pack(torch.bfloat16):
        assert type(row_linear(torch.randn(64, 32, dtype=torch.bfloat16))) is PackedLinear


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_an_encoder_computes_in_the_type_that_was_quicker(home: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    if not can_pack(torch.bfloat16):
        pytest.skip("no packed products in bfloat16 here")
    monkeypatch.setattr(prepare, "fast_bfloat16", lambda: True)
    measured = quicker(monkeypatch, name)
    for _ in range(2):
        assert prepare.quicker_type() == getattr(torch, name)
        forget(monkeypatch)
    assert len(measured) == 1


def test_of_many_rows_one_thread_is_measured_beside_whatever_runs(home: Path):
    counts = []
    work = lambda: lambda: counts.append(torch.get_num_threads())
    torch.set_num_threads(2)
    try:
        works = {"usual": work, "other": lambda: lambda: sum(range(100_000))}
        assert tune.quickest("a question", works, "usual") == "usual"
        assert torch.get_num_threads() == 2
        assert list(json.loads((home / "tune.json").read_text())) == [tune.machine()]
    finally:
        torch.set_num_threads(1)
    assert set(counts) == {1}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["torch", "native"])
def test_models_attend_in_the_quicker_way(home: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    quicker(monkeypatch, name)
    assert attention.prefers_native_attention() == (name == "native")
