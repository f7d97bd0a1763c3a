"""Benchmark driver: a wrong answer is not timed, a missing candidate is reported, ratios are right."""

import ast
import functools
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from benchmarks.suite import command, process, report
from benchmarks.suite.cases import Candidate, Case, Options
from benchmarks.suite.driver import Plan
from tests.helpers.paths import ROOT
from tests.helpers.spread import thin

PLAN = Plan("cpu", rounds=3, seconds=60, longest=100, pythons={})


@pytest.fixture(autouse=True)
def _fakes_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


def sleeper(name, seconds, answer, library="peer", kind="float32"):
    return Candidate(
        name, "tests.house.benchmarks.fakes:sleeper", {"seconds": seconds, "answer": answer}, library, kind
    )


def measure(tmp_path, *candidates, reference="ours", threads=1, plan=PLAN, **more):
    case = Case("fake", "work", "item", 4, candidates, reference, {"float32": ("near", 1e-3)},
                "tests.house.benchmarks.fakes:prepare", **more)  # fmt: skip
    rows = command.Rows(tmp_path / "fake.json", {"versions": {}, "ceilings": {}}, {"work", "more work"})
    wrong = command.measure(case, rows, plan, [threads])
    return json.loads((tmp_path / "fake.json").read_text())["rows"][-1], wrong


@pytest.mark.ci
def test_ratios_are_peer_over_ours_and_all_times_are_kept(tmp_path):
    own, peer = sleeper("ours", 0.1, [1.0, 2.0], "multimodal"), sleeper("peer", 0.3, [1.0, 2.0])
    row, wrong = measure(tmp_path, own, peer)
    (ratio,) = row["ratios"]
    assert not wrong
    assert 2 < ratio["median"] < 4
    assert len(ratio["rounds"]) == len(row["candidates"]["peer"]["wall"]["all"]) == row["rounds"] == 3
    assert row["candidates"]["ours"]["units a second"] == pytest.approx(40, rel=0.3)
    assert row["candidates"]["ours"]["cpu"]["median"] < 0.05  # it slept
    assert row["candidates"]["ours"]["peak MB"] > 5


@pytest.mark.slow
def test_a_wrong_answer_is_not_timed(tmp_path):
    own, peer = sleeper("ours", 0.01, [1.0, 2.0], "multimodal"), sleeper("peer", 0.01, [1.0, 2.1])
    row, wrong = measure(tmp_path, own, peer)
    assert "wall" not in row["candidates"]["peer"]
    assert row["ratios"] == []
    assert wrong == ["peer: near: 5.00e-02 from the reference, at most 0.001 allowed"]
    other = Candidate("shape", "tests.house.benchmarks.fakes:sleeper", {"seconds": 0, "answer": [1.0]}, "peer")
    assert "shape (1,), the reference (2,)" in measure(tmp_path, own, other)[1][0]


@pytest.mark.slow
def test_a_missing_peer_is_said_and_ours_may_not_fail(tmp_path):
    own = sleeper("ours", 0.01, [1.0], "multimodal")
    row, wrong = measure(tmp_path, own, Candidate("absent", "tests.house.benchmarks.fakes:absent", library="peer"),
                         Candidate("dead", "tests.house.benchmarks.fakes:dies", library="peer"))  # fmt: skip
    assert row["candidates"]["absent"]["left out"] == "missing: No module named 'no_such_library'"
    assert "exit code 3" in row["candidates"]["dead"]["left out"]
    assert not wrong
    failing = Candidate("ours too", "tests.house.benchmarks.fakes:broken", library="multimodal")
    assert measure(tmp_path, own, failing)[1] == ["ours too: failed: ValueError: no weights here"]


@pytest.mark.ci
def test_without_its_reference_nothing_is_measured(tmp_path):
    own = sleeper("ours", 0.01, [1.0], "multimodal")
    row, wrong = measure(
        tmp_path, own, Candidate("peer", "tests.house.benchmarks.fakes:broken", library="x"), reference="peer"
    )
    assert "wall" not in row["candidates"]["ours"]
    assert wrong == ["the reference, peer, gave no output: nothing was measured"]


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="processors are pinned on Linux only")
def test_workers_have_as_many_processors_as_threads(tmp_path):
    ours = Candidate("ours", "tests.house.benchmarks.fakes:threads", library="multimodal")
    row, wrong = measure(tmp_path, ours, sleeper("peer", 0, [1, 1]))
    assert not wrong
    assert row["candidates"]["peer"]["distance"] == {"near": 0.0}


@pytest.mark.ci
def test_a_peer_runs_in_an_environment_of_its_own(tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nWHICH=7 exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    plan = replace(PLAN, pythons={"peer": str(other)})
    both = [
        Candidate(name, "tests.house.benchmarks.fakes:interpreter", library=name) for name in ("multimodal", "peer")
    ]
    _, wrong = measure(tmp_path, *both, reference="multimodal", plan=plan)
    assert wrong == ["peer: near: 6.00e+00 from the reference, at most 0.001 allowed"]  # 7 beside 1


@pytest.mark.ci
def test_the_memory_of_a_cold_start_is_its_own(tmp_path):
    ballast = bytearray(b"x" * 300_000_000)
    command = ("{python}", "-c", "import sys; print('here', sys.flags.no_site)")
    figures, printed = process.cold(Candidate("ours", command=command), tmp_path, 1)
    assert len(ballast) > 1e6 * figures["peak MB"] > 5e6
    assert printed == "here 0\n"
    assert 0 < figures["cpu"] < 2 * figures["wall"]
    with pytest.raises(process.LostError, match="ended with exit code 1: ZeroDivisionError"):
        process.cold(Candidate("ours", command=("{python}", "-c", "1 / 0")), tmp_path, 1)
    with pytest.raises(process.LostError, match="No such file"):
        process.cold(Candidate("ours", command=("/no/program",)), tmp_path, 1)


@pytest.mark.slow
def test_what_would_take_too_long_on_a_curve_is_left_out(tmp_path):
    own, peer = sleeper("ours", 0.01, [1.0], "multimodal"), sleeper("peer", 0.2, [1.0])
    measure(tmp_path, own, peer, series="length", at=1)
    case = Case("fake", "more work", "item", 4000, (own, peer), series="length", at=1000)
    rows = command.Rows(tmp_path / "fake.json", {"ceilings": {}}, {"work", "more work"})
    (why,) = rows.too_long(case, 1, longest=100).items()
    assert why[0] == "peer"
    assert 190 < float(why[1].removeprefix("would take about ").removesuffix(" s")) < 400


@pytest.mark.slow
def test_the_report_names_the_rows_that_are_behind(tmp_path):
    own, peer = sleeper("ours", 0.2, [1.0], "multimodal"), sleeper("quick peer", 0.1, [1.0])
    row, _ = measure(tmp_path, own, peer, sleeper("other kind", 0.1, [1.0], kind="int8"))
    assert [same["peer"] for _, same, _ in report.pairs(row) if same] == ["quick peer"]
    text = report.behind({"fake": {"rows": [row]}})
    assert text.startswith("**Behind** in 1 of 1 comparisons")
    assert "quick peer" in text
    assert "| work | 1 | quick peer |" in report.table([row])


@pytest.mark.ci
def test_a_report_of_rows_without_any_comparison_has_no_figure(tmp_path):
    machine = {"date": "", "commit": "", "processor": "", "processors": 2, "memory GB": 1, "system": "", "Python": "",
               "versions": {}, "ceilings": {}}  # fmt: skip
    row = {"case": "work", "threads": 1, "candidates": {"ours": {"kind": "float32", "left out": "missing"}}}
    (tmp_path / "text.json").write_text(json.dumps({"machine": machine, "rows": [row]}))
    report.write(tmp_path)
    assert "missing" in (tmp_path / "README.md").read_text()
    assert not (tmp_path / "ahead.svg").exists()


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(
    "words",
    [["--jobs", "nonsense"], ["--python", "timm"], ["--python", "timm=/no/python"], ["--threads", "0"],
     ["--only", "zzz", "--jobs", "import"]],
)  # fmt: skip
def test_bad_flags_are_one_line(words):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert words[0] in done.stderr


@functools.cache
def functions_of(module: str) -> set[str]:
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("job", [job for jobs in command.JOBS.values() for job in jobs])
def test_cases_have_names_of_their_own_and_name_functions_that_exist(job, tiny):
    found = command.cases(job, Options("cuda" if job.startswith("cuda") else "cpu", tiny=tiny))
    assert len({case.name for case in found}) == len(found) > 0
    for case in found:
        names = [made.name for made in case.candidates]
        assert len(set(names)) == len(names)
        assert any(made.ours for made in case.candidates)
        assert not case.checks or case.reference in names
        for load in filter(None, [case.prepare, *(made.load for made in case.candidates)]):
            module, _, function = load.partition(":")
            assert function in functions_of(module), load


@pytest.mark.parametrize(
    "file", sorted(command.RESULTS.glob("cpu*/*.json")), ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_saved_rows_name_current_cases_and_candidates(file):
    """The next run of a job drops rows of cases that are gone."""
    candidates = {case.name: {made.name for made in case.candidates}
                  for case in command.cases(file.stem, Options(nanogpt=ROOT))}  # fmt: skip
    for row in json.loads(file.read_text())["rows"]:
        assert set(row["candidates"]) <= candidates[row["case"]], row["case"]


def test_peers_need_none_of_ours():
    """So that each can live in an environment of its own."""
    for path in (ROOT / "benchmarks" / "peers").rglob("*.py"):
        named = {
            node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        }
        ours = {name for name in named if name.split(".")[0] == "multimodal"}
        assert not ours or "ours" in path.stem or "random" in path.stem, f"{path.name} imports {ours}"


def test_peers_that_need_no_torch_hold_none():
    """It would count in their memory, and they could not live in an environment without it."""
    peers = ("speech.ctranslate2_whisper", "text.ctranslate2", "speech.faster_whisper", "growth.audio",
             "text.tokenizers", "vision.clip_captions", "vision.graph_vit")  # fmt: skip
    imports = "; ".join(f"import benchmarks.peers.{peer}" for peer in peers)
    program = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ctranslate2") is None, reason="needs the packages of the extra `bench`")
@pytest.mark.parametrize("job", command.JOBS["cpu"])
def test_every_job_runs_at_its_smallest_sizes(job, tmp_path):
    options = ["--tiny", "--jobs", job, "--threads", "2", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,  # others may hold the machine
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{job}.json").exists()
    assert "speed-up" in (tmp_path / "README.md").read_text() or job in ("growth", "ray")
