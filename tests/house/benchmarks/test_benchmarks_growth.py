"""Curves of growing work: what they must cost, who is left out, and the figure."""

import pytest

from benchmarks.jobs import growth_costs as costs
from benchmarks.jobs.growth_cases import cases
from benchmarks.suite import growth_plot
from benchmarks.suite.cases import Candidate, Case, Options
from benchmarks.suite.driver import Measurement, Plan
from tests.helpers.paths import ROOT

CEILINGS = {"float32 GFLOP/s": 200.0, "bfloat16 GFLOP/s": 800.0, "int8 GFLOP/s": 1600.0, "read GB/s": 20.0}


@pytest.mark.slow
def test_operations_are_those_that_info_counts():
    from multimodal.models.presets import preset
    from multimodal.tasks.inspect.cost import counts

    flops = {name: {part: of["forward"] for part, of in counts(preset(name))["flops"].items()}
             for name in ("vit_b16", "whisper_tiny")}  # fmt: skip
    assert costs.vit(768, 12, 16, 1000).operations == flops["vit_b16"]["image"]
    assert costs.whisper_encoder(384, 4).operations == flops["whisper_tiny"]["audio"]


def test_points_of_a_curve_rise_and_cost_more():
    found = cases(Options())
    for name in {case.series for case in found}:
        curve = [case for case in found if case.series == name]
        for value in ("at", "operations"):
            values = [getattr(case, value) for case in curve]
            assert values == sorted(set(values)), (name, value)


@pytest.mark.ci
def test_where_the_reference_is_too_slow_the_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    own, peer = (Candidate(name, "tests.house.benchmarks.fakes:sleeper", {"seconds": 0.01, "answer": [1.0]}, library)
                 for name, library in (("ours", "multimodal"), ("peer", "peer")))  # fmt: skip
    case = Case("fake", "more work", "item", 1, (own, peer), "peer", {"float32": ("near", 1e-3)})
    (tmp_path / "input.txt").write_text("prepared")
    plan = Plan("cpu", rounds=1, seconds=60, longest=1, pythons={})
    row = Measurement(case, 1, plan, print).run(tmp_path, {"peer": "would take about 9 s"})
    assert row["candidates"]["ours"]["wall"]["median"] > 0
    assert not row["wrong"]


@pytest.fixture(scope="module")
def results():
    rows = []
    for case in cases(Options()):
        row = {"case": case.name, "threads": 2, "unit": case.unit, "units": case.units, "series": case.series,
               "at": case.at, "operations": case.operations, "bytes": case.bytes, "candidates": {}}  # fmt: skip
        for made in case.candidates:
            found = {"kind": made.kind, "library": made.library}
            if made.library == "open_clip_torch" and case.at == 10000:
                found |= {"left out": "would take about 400 s"}
            else:
                found |= {"wall": {"median": 0.01 * case.units}, "peak MB": 700.0}
            row["candidates"][made.name] = found
        rows.append(row)
    return {"machine": {"ceilings": {"2": CEILINGS}}, "rows": rows}


@pytest.mark.slow
def test_the_figure_has_every_curve_and_stays_small(results, tmp_path):
    growth_plot.draw(results, tmp_path / "growth.svg")
    text = (tmp_path / "growth.svg").read_text()
    assert len(text) < 150_000
    for word in ("ours float32", "open_clip float32", "roofline, bfloat16", "seconds of audio", "3 h", "8k"):
        assert f">{word}</text>" in text, word


def test_the_roofline_is_the_slower_of_computing_and_reading(results):
    rows = [row for row in results["rows"] if row["series"] == "prompt of GPT-2"]
    least = dict(growth_plot.roof(rows, results["machine"], "float32"))
    assert least[16] == pytest.approx(rows[0]["bytes"] / 20e9 / 16)  # a few tokens wait for the weights
    assert least[1024] == pytest.approx(rows[-1]["operations"] / 200e9 / 1024)
