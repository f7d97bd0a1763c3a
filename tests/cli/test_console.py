"""Messages of a command: at once on a terminal, with --verbose, not with --quiet; and after Ctrl-C."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from multimodal.cli.console import Console, Progress, clock, console
from multimodal.cli.main import _one_line
from multimodal.cli.output import fail
from tests.helpers.commands import run


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *command: str):
        self.leader, follower = pty.openpty()
        words = [sys.executable, "-X", "importtime", "-m", "multimodal", *command]
        self.process = subprocess.Popen(words, stdout=follower, stderr=follower)
        os.close(follower)

    def read(self, until: str) -> str:
        """Read the output up to these words."""
        seen = b""
        while until.encode() not in seen:
            seen += os.read(self.leader, 4096)  # OSError once it has ended
        return seen.decode()


def test_a_reader_of_stderr_that_has_exited_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = io.StringIO()
    monkeypatch.setattr(broken, "write", lambda text: os.write(-1, b""))
    monkeypatch.setattr("sys.stderr", broken)
    _one_line("lost", UserWarning)
    console.note("lost")
    assert fail("lost") == 1


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    return tmp_path / "red.png"


def test_loading_is_shown_before_torch_is_imported_and_ctrl_c_says_what_was_kept(photo):
    output = photo.with_name("out.csv")
    words = ("classify", str(photo), "--labels", "a,b", "-o", str(output))
    terminal = Terminal(*words)
    seen = terminal.read(until="Loading clip-vit-16 …")
    assert "demonstration model" in seen
    assert "| torch" not in seen
    terminal.process.send_signal(signal.SIGINT)
    terminal.read(until=f"multimodal: stopped; nothing new in {output}")
    assert terminal.process.wait(60) == 130


def test_nothing_is_said_off_a_terminal_or_when_quiet(photo, models, capsys):
    words = ("classify", photo, "--labels", "a,b", "-m", models / "clip")
    assert run(capsys, *words)[::2] == (0, "")
    assert run(capsys, *words, "--quiet")[::2] == (0, "")


def test_verbose_names_each_step_with_its_time_and_prints_tracebacks(photo, models, capsys):
    words = ("classify", photo, "--labels", "a,b", "--verbose", "-m")
    code, _, err = run(capsys, *words, models / "clip")
    assert code == 0
    assert [line.split(" s: ")[1] for line in err.splitlines()] == [
        f"Loading {models / 'clip'} …",
        "Encoding 2 labels …",
    ]
    code, _, err = run(capsys, *words, "absent.safetensors")
    assert (code, "Traceback" in err) == (1, True)
    assert err.splitlines()[-1] == "multimodal: error: 'absent.safetensors': no such file"


def test_quiet_contradicts_verbose(capsys):
    code, _, err = run(capsys, "env", "--quiet", "--verbose")
    assert (code, "--quiet: contradicts --verbose" in err) == (2, True)


def test_progress_has_rate_and_time_left(monkeypatch, capsys):
    monkeypatch.setattr(Console, "terminal", lambda self: not self.quiet)
    with console.shown(False, False):
        progress = Progress("images")
        progress.began -= 10
        progress(100, 300)
        progress(101, 300)  # within half a second
        print("a note", file=sys.stderr)
    err = capsys.readouterr().err
    assert err.startswith("\rimages: 100 of 300, ")
    assert "/s, 0:20 left\x1b[K" in err
    assert err.endswith("left\x1b[K\r\x1b[Ka note\n")
    assert "101" not in err
    monkeypatch.setattr(console, "quiet", True)
    Progress("images")(100, 300)
    assert capsys.readouterr().err == ""
    assert (clock(59.6), clock(3725)) == ("1:00", "1:02:05")


@pytest.mark.ci
def test_results_go_to_a_file_in_its_format(models, tmp_path, capsys):
    file = tmp_path / "facts.json"
    code, out, err = run(capsys, "info", models / "clip", "--output", file)
    assert (code, out, err) == (0, "", f"multimodal: {file}: written\n")
    assert json.loads(file.read_text())["kind"] == "clip"
    before = file.read_bytes()
    file.write_text("mine")
    code, out, err = run(capsys, "info", models / "clip", "-o", file, "--format", "json")
    assert (code, file.read_text()) == (1, "mine")  # not written by multimodal
    code, out, err = run(capsys, "info", models / "clip", "-o", file, "--overwrite", "--quiet")
    assert (code, out, err, file.read_bytes()) == (0, "", "", before)


@pytest.mark.parametrize("kind", ["json", "table"])
def test_a_format_in_the_place_of_a_file_is_named(kind, capsys):
    code, _, err = run(capsys, "evaluate", "zeroshot", "x", "--output", kind)
    assert (code, f"--output {kind}: names the file to write" in err) == (2, True)


@pytest.mark.parametrize(
    "words",
    ["info clip -o a.csv --format table", "search dogs --index x -o a.json --format csv", "translate hi -o a.json",
     "classify a.png --labels a,b -o a.json --format csv", "caption a.png -o a.jsonl --format csv",
     "embed hi -o a.npy --format csv"],
)  # fmt: skip
def test_a_format_other_than_the_ending_of_its_file_is_refused(words, capsys):
    code, _, err = run(capsys, *words.split())
    assert (code, "ends in ." in err and ", and the format is " in err) == (2, True)


def test_json_lines_may_be_in_a_json_file(capsys):
    code, _, err = run(capsys, "classify", "absent.png", "--labels", "a,b", "-o", "a.json", "--format", "jsonl")
    assert (code, "absent.png" in err) == (1, True)


@pytest.mark.ci
@pytest.mark.usefixtures("blank_figures")
def test_figures_and_reports_are_named_when_written(models, tmp_path, capsys):
    figure = tmp_path / "a.png"
    words = ("inspect", models / "clip", "--what", "filters", "--plot", figure)
    assert run(capsys, *words) == (0, "", f"multimodal: {figure}: written\n")
    assert run(capsys, *words, "--quiet") == (0, "", "")
    assert "written" not in run(capsys, "inspect", tmp_path / "none", *words[2:])[2]
