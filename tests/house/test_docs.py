"""The commands of README and docs, as written, on small files with the names that they use.

A block marked ```sh is run; ```sh download needs a checkpoint that is not here. Commands and recipes run in this
process, since starting one for each would take minutes; with `-m slow` the README's recipe runs as in a shell, too,
the exports write whole graphs, and the blocks of LONG run, whose work the README's and tests of recipes do, too.
"""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from multimodal.cli import main
from multimodal.export import onnx
from multimodal.train.recipe_cli import start
from tests.helpers.data.video_files import video
from tests.helpers.paths import ROOT
from tests.helpers.spread import thin

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
BLOCKS = {
    f"{page.name}-{number}": text
    for page in PAGES
    for number, text in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), 1)
    if "pip install" not in text  # CI runs the two install commands
}
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PYTHON = {
    f"{page.name}-{number}": text
    for page in PAGES
    for number, text in enumerate(PYTHON_BLOCK.findall(page.read_text(encoding="utf-8")), 1)
}
LONG = {"own_audio_and_text.md-2", "own_audio_and_text.md-3", "own_images.md-2", "own_images.md-4", "own_images.md-5",
        "speech.md-1", "speech.md-2", "text.md-2", "vision.md-2", "vision.md-3", "vision.md-4", "vision.md-5",
        "vision.md-7"}  # fmt: skip
COLOURS = {"dog": (150, 90, 40), "cat": (90, 90, 120)}


def speech() -> np.ndarray:
    """Two seconds [1 T] of the sample speech, 16 kHz."""
    with av.open(str(ROOT / "assets" / "sample" / "speech.flac")) as file:
        return np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)[:, : 2 * 16000]


def encoded(path: Path, samples: np.ndarray, codec: str, layout: str = "mono") -> None:
    path.parent.mkdir(exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=16000, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples, format="s16" if layout == "stereo" else "s16p", layout=layout)
        frame.sample_rate = 16000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)


def images(folder: Path, count: int) -> None:
    random = np.random.default_rng(count)
    for label, colour in COLOURS.items():
        (folder / label).mkdir(parents=True)
        for number in range(count):
            noise = random.integers(-30, 30, (48, 48, 3))
            Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(
                folder / label / f"{number}.png"
            )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Folder with every file that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("assets", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    images(folder / "labelled" / "train", 10)
    images(folder / "labelled" / "val", 2)
    (folder / "photos").mkdir()
    for number in range(12):
        Image.new("RGB", (64, 48), (200, 20 * number, 30)).save(folder / "photos" / f"{number}.jpg")
    Image.new("RGB", (96, 64), (30, 90, 160)).save(folder / "photo.jpg")
    Image.new("RGB", (240, 60), (30, 90, 160)).save(folder / "panorama.jpg")
    (folder / "names.txt").write_text("dog\ncat\n")
    (folder / "captions.txt").write_text("A dog runs on the beach.\nA man rides a bike.\n")
    pronoun = {"text": "A man throws a ball to a dog, and _ eats it.", "choices": ["the man", "the dog"], "answer": 1}
    (folder / "pronouns.jsonl").write_text(json.dumps(pronoun) + "\n")
    page = "A lemon is a small yellow fruit. It grows on a small tree. It is used for its juice."
    (folder / "pages.jsonl").write_text(json.dumps({"text": f"Menu\n{page}"}) + "\n")
    (folder / "lemon.txt").write_text(f"Menu\n{page}\n\nHome\n")
    (folder / "prompts.json").write_text(json.dumps({"dog": ["a dog"], "cat": ["a cat", "my cat"]}))
    sound = speech()
    stills = [np.roll(np.asarray(Image.open(folder / "photo.jpg")), 9 * number, 2) for number in range(20)]
    (folder / "clip.mp4").write_bytes(video(stills, sound=2.0))
    encoded(folder / "talk.mp3", sound, "libmp3lame")
    encoded(folder / "talk.webm", sound, "libopus")
    encoded(folder / "talks" / "first.flac", sound, "flac")
    encoded(folder / "call.wav", np.repeat(sound, 2, 0).T.reshape(1, -1), "pcm_s16le", "stereo")
    (folder / "german.flac").write_bytes((ROOT / "assets" / "sample" / "german.flac").read_bytes())
    line = {"audio_filepath": "talks/first.flac", "duration": sound.shape[1] / 16000, "text": "three seven"}
    for name in ("test.jsonl", "train.jsonl"):
        (folder / name).write_text(json.dumps(line) + "\n")
    (folder / "clips").mkdir()
    (folder / "clips" / "first.flac").write_bytes((folder / "talks" / "first.flac").read_bytes())
    for name in ("metadata.csv", "val.csv"):
        (folder / "clips" / name).write_text("file_name,transcription\nfirst.flac,three seven\n")
    captions = [
        {"file_name": f"photos/{number}.jpg", "captions": [f"a {word} wall"]}
        for number, word in enumerate(("red", "orange"))
    ]
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in captions))
    return folder


@pytest.fixture
def place(files, tmp_path, monkeypatch) -> Path:
    """Copy of the files as the working directory, so that no block finds another's outputs."""
    folder = shutil.copytree(files, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(folder)
    return folder


def commands(block: str) -> list[list[str]]:
    """Words of each command; `a && b` are two commands."""
    lines = [line.partition(" #")[0].strip() for line in block.splitlines()]
    return [shlex.split(part) for line in lines if line for part in line.split("&&")]


@pytest.fixture
def graphs(request, monkeypatch) -> None:
    """Write empty graphs: torch's exporter takes a minute, and tests/weights/export run it."""
    if request.param == "blank":
        monkeypatch.setattr(onnx, "export_graph", lambda _, path: path.touch())
        monkeypatch.setattr(onnx, "quantize", lambda _: None)


@pytest.mark.usefixtures("blank_figures", "graphs")  # drawing has tests of its own
@pytest.mark.parametrize(("name", "graphs"), [
    *(pytest.param(name, "blank", marks=pytest.mark.slow if name in LONG else pytest.mark.ci) for name in BLOCKS),
    *(pytest.param(name, "whole", marks=pytest.mark.slow) for name, text in BLOCKS.items() if "--to onnx" in text),
], indirect=["graphs"])  # fmt: skip
def test_the_commands_of_the_pages_run(name, place, monkeypatch, capsysbinary, load_recipe):
    for words in commands(BLOCKS[name]):
        print(*words)
        if words[0] == "cat":  # cat FILE | multimodal … > FILE
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(words[1]).read_bytes())))
            words = words[3:-2]
        if words[0] == "python":
            start(load_recipe(Path(words[1]).stem).main, [*words[2:], "--steps", "2"])  # the last one counts
            continue
        assert words[0] == "multimodal", words
        with pytest.raises(SystemExit) as end:
            main.main(words[1:])
        assert end.value.code == 0, (words, capsysbinary.readouterr().err.decode())


@pytest.mark.ci
def test_the_long_blocks_are_there_and_their_flags_are_known():
    command, run = main.parser(), []
    for words in [words for name in LONG for words in commands(BLOCKS[name])]:
        words = words[3:-2] if words[0] == "cat" else words
        if words[0] == "multimodal":
            run.append(command.parse_args(words[1:]))
    assert len(run) > len(LONG)


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_the_recipe_of_the_readme_runs_in_a_shell():
    (words,) = [words for name in BLOCKS if name.startswith("README") for words in commands(BLOCKS[name])
                if words[0] == "python"]  # fmt: skip
    run = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.filterwarnings("ignore:<samples>. silent")
@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", PYTHON)
def test_the_python_of_the_pages_runs(name, place):
    exec(compile(PYTHON[name], name, "exec"), {})
