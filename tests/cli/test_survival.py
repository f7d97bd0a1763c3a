"""A full disk and a second process, for each command that writes while it works: one line, and nothing is lost.

`tests/system/test_journal.py` has those of `transcribe`."""

import fcntl
from pathlib import Path

import pytest

from multimodal.tasks.retrieve.index import open_index
from tests.helpers.commands import one_line, run
from tests.helpers.folders import every_kind, files_of_at_most, write_image
from tests.helpers.spread import spread, thin

COUNT = 24
COMMANDS = {
    "classify": ("classify", "clip", "o.csv", "--labels", "red", "blue", "--batch_size", "2"),
    "caption": ("caption", "captioner", "o.jsonl", "--min_tokens", "1", "--batch_size", "2"),
    "index": ("index", "clip", "index", "--batch_size", "2"),
    "embed": ("embed", "clip", "o.jsonl"),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*the caption is empty")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = every_kind(tmp_path_factory.mktemp("survival"))
    (folder / "photos").mkdir()
    for number in range(COUNT):
        write_image(folder / "photos" / f"{number:02}.png", ("red", "blue")[number % 2])
    return folder


def call(name: str, place: Path, output: Path) -> list[object]:
    command, model, file, *flags = COMMANDS[name]
    images = ["--images", place / "photos"] if command == "embed" else [place / "photos"]
    return [command, *images, "-m", place / model, "-o", output / file, *flags]


def content(output: Path) -> object:
    """Bytes of the file, or number of images in the index."""
    (path,) = (path for path in output.iterdir() if path.name in ("o.csv", "o.jsonl", "index"))
    return len(open_index(path)) if path.name == "index" else path.read_bytes()


@pytest.mark.parametrize("name", spread(COMMANDS, 2, pytest.mark.slow, pytest.mark.ci))
def test_a_full_disk_loses_nothing(name, place, tmp_path, capfd):
    whole, output = tmp_path / "whole", tmp_path / "output"
    for folder in (whole, output):
        folder.mkdir()
    assert run(capfd, *call(name, place, whole))[0] == 0
    with files_of_at_most(1500):
        code, _, err = run(capfd, *call(name, place, output))
    assert code == 1
    assert "File too large" in one_line(err)
    assert str(output) in err
    assert run(capfd, *call(name, place, output))[0] == 0
    assert content(output) == content(whole)


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", ["classify", "caption", "index"])
def test_a_second_process_is_refused_in_one_line(name, place, tmp_path, capfd):
    command = call(name, place, tmp_path)
    assert run(capfd, *command)[0] == 0
    before = content(tmp_path)
    held = tmp_path / "index" / "lock" if name == "index" else tmp_path / COMMANDS[name][2]
    with held.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = run(capfd, *command)
    assert code == 1
    assert "another process is writing" in one_line(err)
    assert content(tmp_path) == before
    assert run(capfd, *command)[0] == 0
