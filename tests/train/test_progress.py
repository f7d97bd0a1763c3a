"""Output of a run: the progress line, metrics.jsonl, TensorBoard files, and the report at the end."""

import io
import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from multimodal.train.flops import StepFlops
from multimodal.train.metrics.progress import TrainingLog, is_logged, progress
from multimodal.train.metrics.report import fingerprint, write_report
from tests.helpers.commands import Page


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def walk(run: Path, first: int, last: int, done: int = 0) -> None:
    watch = TrainingLog(run, total=6, every=2, first=done)
    for number in range(first, last + 1):
        watch.step(number, {"loss": float(number)}, rate=0.1, items=4, wait=0.0, padding=0.25, broken=3)
    watch.close()


def test_metrics_are_means_over_the_interval(tmp_path: Path, capsys: pytest.CaptureFixture):
    walk(tmp_path, 1, 6)
    assert [(row["step"], row["loss"], row["padding"]) for row in rows(tmp_path)] == [
        (2, 1.5, 0.25), (4, 3.5, 0.25), (6, 5.5, 0.25),
    ]  # fmt: skip
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 4
    assert shown[1].startswith("step 2/6 loss 1.5 lr 1.00e-01 ")
    assert "padding 25.0%" in shown[1]
    assert shown[1].endswith("broken 3")
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_resumed_run_replaces_the_lines_it_does_again(tmp_path: Path):
    walk(tmp_path, 1, 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "eval/x": 1}\n')
        file.write('{"step": "x"}\n{"step": 6, "lo')  # a kill in the middle of a line
    (tmp_path / "metrics.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes() + b"\xff\n")
    TrainingLog(tmp_path, total=6, every=2, first=2).close()
    assert ["eval/x" in row for row in rows(tmp_path)] == [False, True]
    TrainingLog(tmp_path, total=6, every=2, first=2, evaluated=False).close()  # a signal ended that evaluation
    walk(tmp_path, 3, 6, done=2)
    assert [(row["step"], "eval/x" in row) for row in rows(tmp_path)] == [(2, False), (4, False), (6, False)]


def test_a_full_disk_loses_rows_and_tensorboard_goes_on(tmp_path: Path, caplog, monkeypatch):
    watch = TrainingLog(tmp_path, total=3, every=1)
    watch.log({"step": 1, "loss": 1.0})
    watch.board.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = (tmp_path / "metrics.jsonl").stat().st_size + 9
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, hard))
        watch.log({"step": 2, "loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.setattr(watch.board, "add_scalar", lambda *_: os.write(-1, b""))  # as after an error in its thread
    for step in (3, 4, 5):
        watch.log({"step": step, "loss": float(step)})
    watch.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 3, 4, 5]
    assert [line.split(": ")[1] for line in caplog.messages] == ["step 2 is not logged", "step 3 is not logged"]
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2


def test_a_loss_that_is_not_finite_is_left_out_of_the_mean(tmp_path: Path):
    watch = TrainingLog(tmp_path, total=2, every=2)
    watch.step(1, {"loss": float("nan")}, rate=0.1, items=1, wait=0.0)
    watch.step(2, {"loss": 5.0}, rate=0.1, items=1, wait=0.0, skipped=1)
    watch.close()
    assert rows(tmp_path)[-1]["loss"] == 5.0
    assert rows(tmp_path)[-1]["skipped"] == 1


def test_the_share_of_the_peak_is_that_of_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("multimodal.train.metrics.progress.peak_flops", lambda: 1e9)
    watch = TrainingLog(tmp_path, total=1, every=1, world=2)
    watch.flops = StepFlops(1e6, 2e6)
    watch.step(1, {"loss": 1.0}, rate=0.1, items=3, elements=30, wait=0.0)
    watch.close()
    row = rows(tmp_path)[0]
    assert row["mfu"] == pytest.approx(row["samples_per_s"] * 10 * 1e6 / 2e9)
    assert row["hfu"] == pytest.approx(2 * row["mfu"])


def test_the_first_steps_of_a_run_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert [n for n in range(1, 121) if is_logged(n, 0, 50, 120)] == [1, 2, 5, 10, 50, 100, 120]
    assert [n for n in range(61, 121) if is_logged(n, 60, 50, 120)] == [61, 62, 65, 70, 100, 120]
    watch = TrainingLog(tmp_path, total=60, every=50)
    for number in range(1, 61):
        watch.step(number, {"loss": float(number)}, rate=0.1, items=4, wait=0.0)
    watch.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/60" for step in (1, 2, 5, 10, 50, 60)]
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(50, 25.5), (60, 55.5)]


def test_a_broken_pipe_loses_the_line_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `train_lm.py 2>&1 | head` leaves it."""
    broken = io.StringIO()
    monkeypatch.setattr(broken, "write", lambda text: os.write(-1, b""))
    monkeypatch.setattr("sys.stderr", broken)
    log = TrainingLog(tmp_path, 1, 1)
    log.step(1, {"loss": 1.0}, rate=0.1, items=1, wait=0.0)
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1.0


def test_other_work_is_announced_and_does_not_count_as_training(tmp_path: Path, capsys: pytest.CaptureFixture):
    watch = TrainingLog(tmp_path, total=2, every=1)
    watch.since -= 10
    with watch.paused("step 1/2: evaluating"):
        assert capsys.readouterr().err == "step 1/2: evaluating\n"
        time.sleep(0.05)
    assert 10 <= time.monotonic() - watch.since < 10.04
    watch.evaluated(1, {"accuracy": 0.5, "wer": None}, 0.05)
    assert capsys.readouterr().err == "step 1 evaluated in 0.1 s: accuracy 0.5\n"
    watch.close()


def test_the_progress_line_names_what_is_asked():
    row = {"step": 50, "loss": 2.3456, "lr": 3e-4, "samples_per_s": 311.4, "wait_share": 0.021, "memory_bytes": 34e8}
    line = progress(row | {"mfu": 0.351, "broken": 0, "skipped": 2}, 4200, 2470.0)
    assert line == ("step 50/4200 loss 2.346 lr 3.00e-04 311 samples/s wait 2% 3.4 GB mfu 35.1% eta 0:41:10 skipped 2")


@dataclass
class Inner:
    rate: float = 0.5


@dataclass
class Settings:
    data: Path
    inner: Inner


def test_the_report_has_what_makes_the_run_again(tmp_path: Path):
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    walk(tmp_path / "run", 1, 6)
    settings = Settings(data, Inner())
    path = write_report(tmp_path / "run", settings, [data, "absent.tar"], ["a cat | a cat"], ["python", "r.py", "a b"])
    text = path.read_text()
    assert "python r.py 'a b'" in text
    assert "| loss | 5.5 |" in text
    assert "\na cat | a cat\n" in text
    facts = json.loads((path.parent / "run.json").read_text())
    assert facts["settings"] == {"data": str(data), "inner": {"rate": 0.5}}
    assert facts["data"] == {str(data): fingerprint(data), "absent.tar": "not local"}
    assert "torch" in facts["versions"]
    assert (path.parent / "curves.png").stat().st_size > 1000
    page = Page.of(path.parent / "report.html")
    assert [values["alt"] for tag, values in page.attributes if tag == "img"] == ["loss", "lr"]
    assert "python r.py 'a b'" in page.text
    assert "a cat | a cat" in page.text


def test_a_report_shows_images_and_names_a_place_that_cannot_be_written(tmp_path: Path):
    walk(tmp_path / "run", 1, 6)
    (tmp_path / "run" / "report").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "run" / "report" / "drawn.png")
    write_report(tmp_path / "run", {"text": "<script>"}, images=["drawn.png"])
    page = Page.of(tmp_path / "run" / "report" / "report.html")
    assert "Drawn" in page.text
    assert '  "text": "<script>"' in page.text
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report").write_text("")
    with pytest.raises(OSError, match="File exists") as refused:
        write_report(tmp_path / "other", {})
    assert refused.value.filename == str(tmp_path / "other" / "report")


def test_a_fingerprint_changes_with_the_data(tmp_path: Path):
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "x"
    file.write_text("one")
    before = fingerprint(file), fingerprint(tmp_path / "a")
    file.write_text("other")
    assert fingerprint(file) != before[0]
    assert fingerprint(tmp_path / "a") != before[1]
