"""`multimodal transcribe` as a person uses it: flags, stdin and stdout, what is kept when something fails."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from multimodal.errors import AudioError
from multimodal.tasks.transcribe import plot, writers
from multimodal.tasks.transcribe import transcribe as task
from tests.helpers.commands import one_line, run
from tests.helpers.data.sets import wav
from tests.helpers.processes.programs import LIMIT, forked, wait_for


def heard(text: str, **more) -> dict:
    segment = {"id": 0, "start": 0.0, "end": 1.0, "text": f" {text}"}
    return {"text": f" {text}", "segments": [segment] if text else [], "language": "en", "duration": 1.0,
            "transcribed": [[0.0, 1.0]], "skipped": [], "damaged": [], **more}  # fmt: skip


@pytest.fixture
def fake(monkeypatch):
    """`transcribe_many` gives `fake.results` by the file's stem, else the stem itself; an exception is raised, an
    AudioError takes the result's place. `fake.calls`: what was passed on."""
    found = SimpleNamespace(results={}, calls=[])

    def many(sources, model, *, on_progress=None, on_segments=None, **options):
        found.calls.append(options)
        for source in sources:
            result = found.results.get(source.stem, heard(source.stem))
            if isinstance(result, BaseException) and not isinstance(result, AudioError):
                raise result
            if isinstance(result, dict):
                on_progress(source, 0.5, 1.0)
                on_segments(source, result["segments"])
                on_progress(source, 1.0, 1.0)
            yield source, result

    monkeypatch.setattr(task, "transcribe_many", many)
    return found


@pytest.fixture
def clips(tmp_path):
    """a.wav, b.wav, c.wav"""
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.wav").write_bytes(wav(0.5))
    return folder


@pytest.mark.ci
def test_stdin_to_files_and_stdout_and_nothing_stays_behind(say, piped, monkeypatch, tone, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    piped(tone.read_bytes())
    code, _, err = say("-", "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"stdin.{f}" for f in writers.FORMATS}
    for style in writers.FORMATS:
        piped(tone.read_bytes())
        code, out, err = say("-", "-o", "-", "-f", style)
        assert (code, err) == (0, "")
        assert out == (tmp_path / "out" / f"stdin.{style}").read_text() + ("\n" if style == "json" else "")
    piped(tone.read_bytes())
    assert say("-", "-o", "-")[1] == (tmp_path / "out" / "stdin.txt").read_text()
    for data, cause in ((b"", "-: stdin holds nothing"), (b"no sound " * 100, "stdin: not a readable recording")):
        piped(data)
        code, out, err = say("-", "-o", "-")
        assert (code, out) == (1, "")
        assert cause in one_line(err)
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin is closed" in one_line(say("-", tone, "-o", tmp_path / "out")[2])
    assert list((tmp_path / "temporary").iterdir()) == []


def test_several_recordings_on_stdout(say, fake, clips):
    code, out, err = say(clips, "-o", "-")
    assert (code, out, err) == (0, "a\nb\nc\n", "")
    out = say(clips, "-o", "-", "-f", "json")[1]
    assert [json.loads(line)["text"] for line in out.splitlines()] == [" a", " b", " c"]
    code, out, err = say(clips, "-o", "-", "-f", "srt")
    assert (code, out) == (1, "")
    assert "srt" in one_line(err)


def test_recordings_that_are_done_are_skipped_without_the_model(say, fake, clips, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert say(clips, "-o", out, "-f", "srt")[0] == 0
    (out / "b.srt").unlink()
    code, printed, err = say(clips, "-o", out, "-f", "srt", "--skip_existing", "True")
    assert code == 0
    assert err == "".join(f"multimodal: skipped {clips / name}.wav: {name}.srt is there\n" for name in "ac")
    assert printed.endswith("]  b\n")
    monkeypatch.setattr("multimodal.weights.load.load", None)
    code, printed, err = say(clips, "-o", out, "-f", "srt", "--skip_existing")
    assert (code, printed, err.count("\n")) == (0, "", 3)


def test_lines_of_several_files_stand_under_their_names(say, fake, clips, tmp_path):
    for flags in ([], ["--batch_size", "1"]):
        out = say(clips / "a.wav", clips / "b.wav", "-o", tmp_path / "out", *flags)[1]
        lines = [f"{clips / name}.wav:\n[00:00.000 --> 00:01.000]  {name}\n" for name in "ab"]
        assert out == "".join(lines)
    assert say(clips, "-o", tmp_path / "out", "--verbose", "None")[1] == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_of_seconds_on_a_terminal_only(say, fake, clips, tmp_path, monkeypatch):
    code, out, err = say(clips, "-o", tmp_path / "out", "--verbose", "False")
    assert (code, out, err) == (0, "", "")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    fake.results = {"b": AudioError("b.wav: broken")}
    assert say(clips, "-o", tmp_path / "out", "--verbose", "False")[:2] == (1, "")
    assert "of 0 s of audio" in terminal.getvalue()
    assert re.search(r"[\r\n]multimodal: error: b.wav: broken\n", terminal.getvalue())


def test_what_failed_is_named_and_the_others_are_kept(say, fake, clips, tmp_path, monkeypatch):
    whole = writers.write_output

    def full(path, data):
        if path.name == "b.txt":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        whole(path, data)

    monkeypatch.setattr(writers, "write_output", full)
    fake.results = {"a": AudioError("a.wav: cannot be read")}
    code, _, err = say(clips, "-o", tmp_path / "out", "-f", "txt")
    assert code == 1
    assert err.splitlines() == [
        "multimodal: error: a.wav: cannot be read",
        f"multimodal: error: {tmp_path / 'out' / 'b.txt'}: cannot be written (No space left on device)",
    ]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["c.txt"]


def test_two_recordings_of_one_output_are_refused_and_the_others_are_done(say, fake, clips, tmp_path):
    (clips / "a.flac").write_bytes(wav(0.5))
    code, _, err = say(clips, "-o", tmp_path / "out", "-f", "txt")
    assert code == 1
    lines = [line for line in err.splitlines() if "would be written as a.*" in line]
    assert [line.count("a.wav") and line.count("a.flac") for line in lines] == [1, 1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b.txt", "c.txt"]
    code, out, _ = say(clips, "-o", "-")  # of one name each on stdout
    assert code == 0
    assert out.count("a") >= 2


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as failed:
        writers.write_transcript(heard("x"), Path("x.wav"), tmp_path, "txt")
    assert failed.value.filename == str(tmp_path / "x.txt")
    assert list(tmp_path.iterdir()) == []


def test_what_was_done_before_ctrl_c_is_kept(models, clips, tmp_path):
    """It ends at once, though the main thread waits for a lock."""
    program = """
import threading
from multimodal.cli.main import main
from multimodal.tasks.transcribe import transcribe
real = transcribe.transcribe_many
def many(sources, model, **options):
    yield from real(sources[:1], model, **options)
    with threading.Lock() as held, threading.Lock():
        threading.Event().wait()
transcribe.transcribe_many = many
main()
"""
    made = {f"a.{f}" for f in writers.FORMATS}
    with forked(program, "transcribe", clips, "-m", models / "asr", "-o", tmp_path) as going:
        wait_for(lambda: made <= {p.name for p in tmp_path.iterdir()})
        going.send_signal(signal.SIGINT)
        err = going.communicate(timeout=LIMIT)[1]
    assert re.fullmatch(r"multimodal: stopped; .*\n", err)
    assert going.returncode == 130
    assert {p.name for p in tmp_path.iterdir()} == made | {"clips"}


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(say, fake, clips, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    code, _, err = say(clips, "-o", tmp_path / "out")
    assert code == 1
    assert "--output" in one_line(err)
    assert fake.calls == []


def test_damage_is_told_with_its_times(say, fake, clips, tmp_path):
    span = {"start": 61.5, "end": 62.0, "what": "packets that cannot be decoded"}
    fake.results = {"a": heard("a", damaged=[span])}
    code, _, err = say(clips, "-o", tmp_path / "out")
    assert code == 0
    assert err == f"multimodal: warning: {clips / 'a.wav'}: 01:01.500 to 01:02.000: packets that cannot be decoded\n"
    fake.results = {"a": heard("a", damaged=[span] * 50)}
    lines = say(clips, "-o", tmp_path / "out")[2].splitlines()
    assert len(lines) == 6
    assert "45 more" in lines[-1]


def test_a_channel_without_speech_is_told(say, fake, clips, tmp_path):
    dropped = [{"start": 0.0, "end": 1.0, "reason": "unlikely"}]
    channels = [{"speaker": "channel 1", "skipped": dropped}, {"speaker": "channel 2", "skipped": []}]
    fake.results = {"a": heard("a", channels=channels)}
    for segment in fake.results["a"]["segments"]:
        segment["speaker"] = "channel 2"
    err = say(clips, "-o", tmp_path / "out")[2]
    assert err == f"multimodal: warning: {clips / 'a.wav'}: channel 1: no speech recognized (unlikely)\n"


def test_a_recording_that_ends_early_is_transcribed_with_a_warning(say, models, tmp_path):
    (tmp_path / "cut.wav").write_bytes(wav(1.0, promised=5.0))
    with warnings.catch_warnings(action="default"):
        code, _, err = say(tmp_path / "cut.wav", "-o", tmp_path / "out", "-f", "json")
    assert code == 0
    name = re.escape(str(tmp_path / "cut.wav"))
    assert re.fullmatch(f"multimodal: warning: {name}: 00:01.000 to 00:05.000: .*ends early\n", err)
    assert json.loads((tmp_path / "out" / "cut.json").read_text())["duration"] == pytest.approx(1.0, abs=0.01)
    code, _, err = say(tmp_path / "cut.wav", "-o", tmp_path / "none", "--on_truncated", "error")
    assert code == 1
    assert "ends early" in one_line(err)


def test_the_decode_log_is_lines_of_json(say, fake, clips, tmp_path):
    fake.results = {"a": heard("a", log=[{"seek": 0, "temperature": 0.0}, {"seek": 0, "temperature": 0.2}])}
    assert say(clips, "-o", tmp_path / "out", "--decode_log", tmp_path / "log.jsonl")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"file": str(clips / "a.wav"), "seek": 0, "temperature": t} for t in (0.0, 0.2)]
    assert "log" not in json.loads((tmp_path / "out" / "a.json").read_text())
    (clips / "ab.wav").write_bytes((clips / "b.wav").read_bytes())  # another, and the log keeps what it has of a.wav
    fake.results = {"ab": heard("ab", log=[{"seek": 8}])}
    assert say(clips, "-o", tmp_path / "out", "--decode_log", tmp_path / "log.jsonl", "--skip_existing")[0] == 0
    again = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert again == [*lines, {"file": str(clips / "ab.wav"), "seek": 8}]


def test_a_image_is_an_output_like_the_others(say, fake, clips, tmp_path, monkeypatch):
    monkeypatch.setattr(
        plot, "plot_transcript", lambda result, audio, title, audio_track=None: f"{audio.name} {title}".encode()
    )
    flags = [clips / "a.wav", "-o", tmp_path, "-f", "txt", "--plot"]
    assert say(*flags)[0] == 0
    assert (tmp_path / "a.png").read_text() == f"a.wav {clips / 'a.wav'}"
    assert "skipped" in say(*flags, "--skip_existing")[2]
    (tmp_path / "a.png").unlink()
    assert say(*flags, "--skip_existing")[2] == ""
    assert (tmp_path / "a.png").exists()


def test_the_bar_names_the_file_whose_plot_is_being_drawn(say, fake, clips, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown = []
    monkeypatch.setattr(plot, "plot_transcript", lambda *_: shown.append(terminal.getvalue()) or b"image")
    assert say(clips / "a.wav", "-o", tmp_path, "-f", "txt", "--plot", "--verbose", "False")[0] == 0
    assert f"writing {clips / 'a.wav'} " in shown[0].rpartition("\r")[2]


def test_model_dir_is_where_a_model_is_looked_for_first(capsys, models, tone, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "")
    code, _, err = run(capsys, "transcribe", tone, "-m", "asr", "--model_dir", models, "-o", tmp_path / "out")
    assert (code, err) == (0, "")


@contextmanager
def broken_stdout(monkeypatch, kind: str) -> Iterator[None]:
    """stdout on a full device, or a pipe that nobody reads. Not a fixture: capsys resets sys.stdout after the setup."""
    if kind == "full":
        number = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, number = os.pipe()
        os.close(reader)
    with os.fdopen(number, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        yield


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_broken_stdout_is_one_line_or_none(say, tone, tmp_path, monkeypatch, kind):
    """With two files, the second is written even if nobody reads the lines of the first."""
    flags = ["--batch_size", "1", "--vad_filter", "False", "--confidence_threshold", "None", "-f", "txt"]
    with broken_stdout(monkeypatch, kind):
        code, _, err = say(tone, "-o", "-", *flags)
    full = "multimodal: error: output: cannot be written (No space left on device)\n"
    assert (code, err) == ((1, full) if kind == "full" else (0, ""))
    (tmp_path / "b.wav").write_bytes(tone.read_bytes())
    with broken_stdout(monkeypatch, kind):
        code, _, err = say(tone, tmp_path / "b.wav", "-o", tmp_path, *flags)
    assert (tmp_path / f"{tone.stem}.txt").exists()
    assert (tmp_path / "b.txt").read_text()
    assert code == err.count("\n") == (kind == "full")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_decode_log_that_cannot_be_written_is_named(say, fake, clips, tmp_path, monkeypatch):
    fake.results["a"] = heard("one", log=[{"seek": 0}])
    code, _, err = say(clips / "a.wav", "-o", tmp_path, "--decode_log", "/dev/full")
    assert (code, "not a regular file" in one_line(err), (tmp_path / "a.txt").exists()) == (1, True, False)

    @contextmanager
    def full(*_):
        with open("/dev/full", "wb") as file:
            yield file

    monkeypatch.setattr("multimodal.cli.speech.transcribe.opened_output", full)
    log = tmp_path / "log.jsonl"
    code, _, err = say(clips / "a.wav", "-o", tmp_path, "--decode_log", log)
    assert (code, err.splitlines()[0]) == (1, f"multimodal: error: {log}: cannot be written (No space left on device)")
    assert (tmp_path / "a.txt").exists()


def test_stdin_is_read_once_and_empty_names_are_refused(say, fake, piped, tmp_path):
    piped(wav(0.5))
    code, _, err = say("-", "-", "-o", tmp_path, "-f", "txt")
    assert (code, err) == (0, "")
    assert (tmp_path / "stdin.txt").read_text() == "stdin\n"
    assert "an empty name" in one_line(say("", "-o", tmp_path)[2])
    code, _, err = say(tmp_path / "x.wav", "-o", "")
    assert (code, err.count("\n"), "--output/-o/--output_dir: an empty name" in err) == (2, 1, True)


def test_sigterm_leaves_no_copy_of_stdin(models, tmp_path):
    program = "import tempfile; from multimodal.cli.main import main; tempfile.tempdir = None; main()"
    call = ["transcribe", "-", "-o", "-", "-m", models / "asr"]
    with forked(program, *call, env={"TMPDIR": str(tmp_path)}, stdin=subprocess.PIPE) as going:
        wait_for(lambda: list(tmp_path.glob("multimodal-*/stdin")))
        going.terminate()
        assert (going.stderr.read(), going.wait(LIMIT)) == ("multimodal: stopped\n", 143)
    assert not list(tmp_path.iterdir())
