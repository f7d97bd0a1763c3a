"""Fuzz kinds: each writes a mutated file beside good ones into the working folder and names the command."""

import csv
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.cli.badinput.checkpoints import vouched
from tests.helpers.folders import write_image, write_tone

from .child import Case, Place, run
from .mutators import Random, mutate
from .seeds import Seeds

LABELS = ["--labels", "red,blue"]
KINDS: dict[str, Callable[[Random, Seeds, Place], Case]] = {}
CLOSE = 2e-4  # of a score, which sums in another order may change


def kind(make: Callable[[Random, Seeds, Place], Case]) -> Callable[[Random, Seeds, Place], Case]:
    KINDS[make.__name__] = make
    return make


def chosen(r: Random, files: list[Path]) -> Path:
    return r.choice(sorted(path for path in files if path.is_file()))


def damaged(r: Random, seeds: list[Path], name: str = "bad") -> Path:
    """Write a mutated copy of one of them to the working folder."""
    source = chosen(r, seeds)
    path = Path(name + source.suffix)
    shutil.copy(source, path)
    return mutate(r, path, chosen(r, seeds).read_bytes())


@cache
def alone(command: tuple[str, ...], place: Place, file: str = "") -> str:
    """Output of a command on good files: stdout, or a file's text."""
    place.clear()
    write_image(Path("red.png"))
    write_tone(Path("tone.wav"))
    ended = run(list(command), place)
    assert ended.status == 0, ended.err
    return Path(file).read_text() if file else ended.out


def scores(text: str, file: str) -> dict[str, float]:
    rows = csv.DictReader(text.splitlines())
    return {row["label"]: float(row["score"]) for row in rows if row["file"] == file and row["label"] is not None}


@kind
def audio(r: Random, seeds: Seeds, place: Place) -> Case:
    files = [*(seeds / "audio").rglob("*")]
    model = seeds.model("asr") if r.random() < 0.9 else "whisper-mini"
    extra = r.choice(([], [], ["--vad_filter", "False"], ["--split_channels"], ["--on_truncated", "error"]))
    command = ["transcribe", "tone.wav", "-m", model, "-o", "out", "-f", "txt", *extra]
    expected = alone(tuple(command), place, "out/tone.txt")
    place.clear()
    write_tone(Path("tone.wav"))
    bad = damaged(r, files)

    def good(_: str) -> str:
        made = Path("out/tone.txt")
        return "no text of it" if not made.exists() else "another text" if made.read_text() != expected else ""

    first = [str(bad), "tone.wav"] if r.random() < 0.5 else ["tone.wav", str(bad)]
    return Case([command[0], *first, *command[2:]], bad, good=good)


@kind
def image(r: Random, seeds: Seeds, place: Place) -> Case:
    command = ("classify", "red.png", *LABELS, "-m", seeds.model("clip"), "--format", "csv")
    expected = scores(alone(command, place), "red.png")
    place.clear()
    write_image(Path("red.png"))
    bad = damaged(r, [*(seeds / "images").rglob("*")])

    def good(out: str) -> str:
        got = scores(out, "red.png")
        near = got.keys() == expected.keys() and all(abs(got[k] - expected[k]) < CLOSE for k in got)
        return "" if near else f"scores {got}, not {expected}"

    return Case([command[0], str(bad), *command[1:]], bad, good=good)


@kind
def clip(r: Random, seeds: Seeds, place: Place) -> Case:
    """The commands that read videos."""
    place.clear()
    write_image(Path("red.png"))
    bad = damaged(r, [*(seeds / "videos").iterdir()])
    sampling = r.choice((["--every_s", "0.2"], ["--max_frames", "3"], ["--scenes", "0.2", "--max_frames", "2"]))
    model = seeds.model("clip")
    command = r.choice((
        ["classify", str(bad), "red.png", *LABELS, "-m", model, "--format", "csv"],
        ["classify", ".", *LABELS, "-m", model, "--per_clip", "-o", "out/scores.csv"],
        ["index", str(bad), "red.png", "-m", model, "-o", "out/index"],
        ["embed", "--images", str(bad), "red.png", "-m", model, "-o", "out/vectors.npy"],
    ))  # fmt: skip
    wanted = "csv" in command
    return Case(
        [*command, *sampling], bad, good=lambda out: "" if not wanted or "red.png," in out else "no score of it"
    )


@kind
def image_other(r: Random, seeds: Seeds, place: Place) -> Case:
    """The other commands that read images."""
    place.clear()
    write_image(Path("red.png"))
    bad = damaged(r, [*(seeds / "images").rglob("*")])
    clip, captioner = seeds.model("clip"), seeds.model("captioner")
    command = r.choice((
        ["caption", str(bad), "red.png", "-m", captioner, "--format", "csv"],
        ["index", ".", "-m", clip, "-o", "out/index"], ["inspect", str(bad), "-m", clip],
        ["classify", str(bad), "red.png", *LABELS, "-m", clip, "--heatmap", "out/maps", "-o", "out/scores.jsonl"],
        ["validate", "."], ["search", str(bad), "--index", str(seeds / "made" / "flat"), "-m", clip],
    ))  # fmt: skip
    wanted = command[0] == "caption"
    return Case(command, bad, good=lambda out: "" if not wanted or "red.png," in out else "no caption of it")


def _command_of(r: Random, name: str, folder: str) -> list[str]:
    own = {
        "clip": ["classify", "red.png", *LABELS], "asr": ["transcribe", "tone.wav", "-o", "out"],
        "captioner": ["caption", "red.png"], "lm": ["generate", "once", "--max_new_tokens", "5"],
        "encoder": ["fill-mask", "the [MASK]"], "translator": ["translate", "the cat", "--from", "en", "--to", "de"],
        "roberta": ["fill-mask", "the <mask>"], "gpt2": ["generate", "once", "--max_new_tokens", "5"],
        "t5": ["generate", "once", "--max_new_tokens", "5"], "clip_hf": ["classify", "red.png", *LABELS],
    }  # fmt: skip
    own |= dict.fromkeys(("bert", "distilbert", "electra"), own["encoder"])
    own |= dict.fromkeys(("llama", "mistral"), own["lm"]) | dict.fromkeys(("marian", "m2m100"), own["translator"])
    how = r.random()
    words = own.get(name, ["info"])
    if how < 0.2 or words == ["info"]:
        return r.choice((["info", folder], ["info", folder], ["convert", folder, "out/made"]))
    if how < 0.3 and words[0] in ("generate", "fill-mask"):
        words = ["embed", "a text", "b"]
    return [*words, "-m", folder]


def _folder(r: Random, seeds: Seeds, place: Place, source: Path) -> Case:
    place.clear()
    write_image(Path("red.png"))
    write_tone(Path("tone.wav"))
    shutil.copytree(source, "model")
    own = (source / "manifest.json").exists()
    rehash = own and r.random() < 0.75
    finish = (lambda: vouched(Path("model"))) if rehash else None
    files = sorted(Path("model").iterdir())
    small = [path for path in files if path.suffix != ".safetensors"]
    bad = r.choice(small if r.random() < 0.7 and small else files)
    mutate(r, bad, r.choice(files).read_bytes())
    if r.random() < 0.05:
        bad.unlink()
    if finish and bad.exists():
        finish()
    return Case(_command_of(r, source.name, "model"), bad if bad.exists() else None, finish=finish)


@kind
def checkpoint(r: Random, seeds: Seeds, place: Place) -> Case:
    return _folder(r, seeds, place, r.choice(sorted((seeds / "models").iterdir())))


@kind
def foreign(r: Random, seeds: Seeds, place: Place) -> Case:
    group = seeds / r.choice(("faces", "translators", "vision"))
    return _folder(r, seeds, place, r.choice(sorted(group.iterdir())))


@kind
def pickled(r: Random, seeds: Seeds, place: Place) -> Case:
    place.clear()
    source = seeds / "whisper" / "whisper" if r.random() < 0.1 else r.choice(sorted((seeds / "pickled").iterdir()))
    shutil.copytree(source, "model")
    bad = r.choice(sorted(Path("model").glob("*.pt")))
    mutate(r, bad)
    return Case(["convert", str(bad), "out/made"], bad)
