"""Long transcriptions survive: what a kill, a full disk or a stop leaves, the same command continues."""

import errno
import json
import os
import shutil
import signal
import wave as wav
from types import SimpleNamespace

import pytest
import torch

from multimodal.cli.speech import transcribe as command
from multimodal.errors import UsageError
from multimodal.system import journal
from multimodal.system.journal import Journal
from tests.helpers.commands import one_line, run
from tests.helpers.processes.kill_commands import ended, fork
from tests.helpers.processes.programs import LIMIT, forked, wait_for
from tests.helpers.tiny_whisper import RATE, SUPPRESSED, THEIR_WARNINGS, sound, tiny_hybrid, whispers

pytestmark = THEIR_WARNINGS
slow = pytest.mark.slow


def clips(windows: int) -> str:
    """So many clips of a second, each a window."""
    return ",".join(map(str, range(12, 12 + 2 * windows)))


WHISPER = ["--sample_len", "5", "--suppress_tokens", ",".join(map(str, SUPPRESSED)), "--beam_size", "2"]
SEQUENTIAL = [*WHISPER, "--word_timestamps", "--initial_prompt", "a b c", "--best_of", "2", "--temperature_increment",
              "1", "--logprob_threshold", "-3", "--no_speech_threshold", "None"]  # fmt: skip
ONCE = ["--temperature_increment", "None"]
CASES = {
    "whisper": (SEQUENTIAL, lambda: whispers()[1]),
    "whisper batched": ([*WHISPER, *ONCE, "--batched", "--batch_size", "3"], lambda: whispers()[1]),
    "whisper of two channels": ([*WHISPER, *ONCE, "--split_channels", "--language", "en"], lambda: whispers()[1]),
    "conformer": (["--vad_filter", "False", "--logprob_threshold", "None", "--batch_size", "3"], tiny_hybrid),
}


def some(*quick: str, marks=()):
    """Run these cases with `marks`, and the others with `-m slow`."""
    cases = [pytest.param(name, marks=marks if name in quick else slow) for name in CASES]
    return pytest.mark.parametrize("call", cases, indirect=True)


@pytest.fixture
def talk(tmp_path):
    waves = [sound(36, seed) for seed in (0, 1)]
    samples = (torch.stack(waves, 1) * 20000).to(torch.int16).numpy()
    with wav.open(str(tmp_path / "talk.wav"), "wb") as file:
        file.setparams((2, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return tmp_path / "talk.wav"


@pytest.fixture
def call(request, monkeypatch, talk):
    """Arguments of a `transcribe` of `talk`, without the output folder."""
    flags, checkpoint = CASES[request.param]
    monkeypatch.setattr(command, "_checkpoint", lambda given: checkpoint())
    return ["transcribe", str(talk), "--verbose", "None", "--clip_timestamps", clips(6), *flags]


def kill_after(monkeypatch, lines: int, torn: bool) -> None:
    """Have the process kill itself after its `lines`th new line, or with `torn` in the middle of the next one."""
    append, written = journal.append_whole, []

    def add(path, data, at):
        if torn and len(written) == lines:
            append(path, data[: len(data) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        append(path, data, at)
        written.append(data)
        if not torn and len(written) == lines:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(journal, "append_whole", add)


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_files(own, whole, call) -> None:
    """Equal to the byte; where the continued run fills its batches differently, the JSON's numbers may be rounded
    differently."""
    own, whole = files(own), files(whole)
    if {"--batched", "--split_channels"} & set(call):
        made, expected = own.pop("talk.json"), whole.pop("talk.json")
        assert json.loads(made) == json.loads(expected, parse_float=lambda s: pytest.approx(float(s), abs=1e-4))
    assert own == whole


@pytest.mark.parametrize(
    ("call", "kills"),
    [pytest.param(name, kills, marks=pytest.mark.ci if (name, kills) == ("conformer", 3) else slow)
     for name in CASES for kills in (3, 10)],
    indirect=["call"],
)  # fmt: skip
def test_kills_change_no_byte_of_any_format(call, kills, monkeypatch, tmp_path, capfd):
    call = [*call, "--clip_timestamps", clips(kills + 2)]
    whole, out, log = tmp_path / "whole", tmp_path / "out", tmp_path / "log"
    assert run(capfd, *call, "-o", whole)[0] == 0
    kept = 0
    for kill in range(kills):
        with monkeypatch.context() as patch:
            kill_after(patch, 1, torn=kill % 3 == 1)
            assert ended(fork([*call, "-o", str(out)], log)) == -signal.SIGKILL, capfd.readouterr()
        assert files(out).keys() <= {"talk.transcript.part", "talk.transcript.part.lock"}
        lines = (out / "talk.transcript.part").read_bytes().count(b"\n")
        assert lines == (kept or 1) + 1  # the first line holds the settings
        kept = lines
    assert ended(fork([*call, "-o", str(out)], log)) == 0, capfd.readouterr()
    assert f"continuing after {kills} finished windows" in capfd.readouterr().err
    assert_same_files(out, whole, call)
    assert len(files(out)) == 5


@pytest.mark.ci
def test_what_is_kept_belongs_to_the_settings_and_the_recording(monkeypatch, talk, tmp_path, capfd):
    flags, checkpoint = CASES["conformer"]
    monkeypatch.setattr(command, "_checkpoint", lambda given: checkpoint())
    call = ["transcribe", talk, "--verbose", "None", "--clip_timestamps", clips(6), "-f", "txt", *flags]
    part, out = tmp_path / "out" / "talk.transcript.part", ["-o", tmp_path / "out"]

    def kept() -> bytes:
        with monkeypatch.context() as patch:
            kill_after(patch, 3, torn=False)
            assert ended(fork([*map(str, call), "-o", str(tmp_path / "out")], tmp_path / "log")) == -signal.SIGKILL
        return part.read_bytes()

    data = kept()
    for more, continued in ([], True), (["--batch_size", "5", "-f", "srt"], True), (["--word_timestamps"], False):
        part.write_bytes(data)
        code, _, err = run(capfd, *call, *out, *more)
        assert (code, "continuing after 3" in err) == (0, continued)
        assert not part.exists()
    part.write_bytes(data)
    talk.write_bytes(talk.read_bytes()[:-2000])
    assert "continuing" not in run(capfd, *call, *out)[2]
    part.write_text("a note")
    code, _, err = run(capfd, *call, *out)
    assert code == 1
    assert one_line(err) == f"multimodal: error: {part}: exists and is no journal of multimodal; move it away\n"
    assert part.read_text() == "a note"


@some("conformer")
def test_a_second_process_is_refused_in_one_line(call, tmp_path, capfd):
    (out := tmp_path / "out").mkdir()
    held = Journal(out / "talk.transcript.part", {})
    code, _, err = run(capfd, *call, "-o", out)
    assert code == 1
    assert one_line(err).endswith(f"error: {held.path}: in use by another process, which writes the same output\n")
    held.close(finished=False)
    assert run(capfd, *call, "-o", out)[0] == 0
    assert len(files(out)) == 5


@some("whisper batched", "conformer", marks=pytest.mark.ci)
def test_a_full_disk_loses_nothing(call, monkeypatch, tmp_path, capfd):
    out, write, calls = tmp_path / "out", os.write, []

    def full(file, data):
        calls.append(data)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:100] if len(calls) == 6 else data)

    with monkeypatch.context() as patch:
        patch.setattr("multimodal.system.files.os", SimpleNamespace(**{**vars(os), "write": full}))
        code, _, err = run(capfd, *call, "-o", out)
    part = out / "talk.transcript.part"
    assert code == 1
    assert one_line(err).endswith(f"error: {part}: cannot be written (No space left on device; 5 records are kept)\n")
    assert part.read_bytes().count(b"\n") == 6
    assert part.read_bytes().endswith(b"\n")
    assert files(out).keys() == {part.name}
    assert "continuing after 5 finished windows" in run(capfd, *call, "-o", out)[2]
    assert run(capfd, *call, "-o", tmp_path / "whole")[0] == 0
    assert_same_files(out, tmp_path / "whole", call)


def test_a_name_as_long_as_a_file_system_takes_has_a_journal(models, talk, tmp_path, capfd):
    long = tmp_path / f"{'語' * 79}.wav"  # 237 bytes and 4
    shutil.copyfile(talk, long)
    call = ["transcribe", long, "-m", models / "asr", "-o", tmp_path / "out", "-f", "txt", "--overwrite"]
    assert run(capfd, *call)[0] == 0
    assert files(tmp_path / "out").keys() == {f"{long.stem}.txt"}


@pytest.mark.ci
def test_ctrl_c_says_what_was_kept(models, talk, tmp_path):
    program = """
import threading
from multimodal.cli.main import main
from multimodal.system import journal
append, lines = journal.append_whole, []
def add(path, data, at):
    append(path, data, at)
    lines.append(data)
    if len(lines) == 2:
        threading.Event().wait()
journal.append_whole = add
main()
"""
    call = ["transcribe", talk, "-m", models / "asr", "--vad_filter", "False"]
    part = tmp_path / "out" / "talk.transcript.part"
    with forked(program, *call, "-o", part.parent) as going:
        wait_for(lambda: part.exists() and part.read_bytes().count(b"\n") == 3)
        going.send_signal(signal.SIGINT)
        err = going.communicate(timeout=LIMIT)[1]
    assert going.returncode == 130
    kept = f"{talk}: 1 finished windows kept in {part}"
    assert err == f"multimodal: {kept}; the same command continues after them\n"
    assert [path.name for path in part.parent.iterdir()] == [part.name]


@pytest.mark.parametrize("line", ["5", "[[1], 2]", "[" * 100_000, '["a", 1, 2]'])
def test_what_follows_a_line_that_is_no_record_is_dropped(tmp_path, line):
    kept = Journal(tmp_path / "x", {"a": 1})
    kept.add("n", 7)
    kept.close(finished=False)
    with (tmp_path / "x").open("a") as file:
        file.write(f'{line}\n["n", 8]\n')
    assert Journal(tmp_path / "x", {"a": 1}).records == {"n": [7]}


def test_a_link_or_pipe_is_no_journal(tmp_path):
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "y")
    for name in "xy":
        with pytest.raises(UsageError, match="exists and is not a regular file"):
            Journal(tmp_path / name, {})
    assert not (tmp_path / "elsewhere").exists()
