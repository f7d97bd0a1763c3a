"""A few steps of each recipe on a GPU: the losses of a CPU, a model that loads, and a run that goes on."""

import gzip
import json
import math
from pathlib import Path

import pytest
from torch import nn

from multimodal.blocks.layers import DropPath
from multimodal.train import step_graphs
from multimodal.train.recipe_cli import start
from multimodal.train.step_graphs import CapturedStep
from multimodal.weights.folder import save_folder
from multimodal.weights.load import load
from tests.helpers.byte_models import byte_model
from tests.recipes.test_recipes_any import data as questions  # noqa: F401
from tests.recipes.test_recipes_any import flags as asking
from tests.recipes.test_recipes_data import RECIPES as MEDIA
from tests.recipes.test_recipes_data import dataset
from tests.system.gpu.conftest import on_devices

SAID = {
    "en": ["a dog runs", "a cat sleeps here now", "two birds sing", "one fish swims"],
    "de": ["ein Hund rennt", "eine Katze schläft jetzt hier", "zwei Vögel singen", "ein Fisch schwimmt"],
}
SMALL = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "24"]
PAIRS = ["--train", "DATA/said", "--val", "DATA/held", "--languages", "en", "de", "--vocabulary", "300"]
BOTH = ["--width", "32", "--encoder_layers", "1", "--decoder_layers", "1", "--heads", "2", "--context", "24"]
TEXT = ["--data", "DATA/text.txt", "--val", "DATA/text.txt"]
TEXTS = {
    "train_lm": [*TEXT, *SMALL, "--batch", "2", "--samples", "1", "--sample_tokens", "5"],
    "train_mlm": [*TEXT, *SMALL, "--vocabulary", "90", "--budget", "400", "--dropout", "0"],
    "train_seq2seq": [*TEXT, *BOTH, "--vocabulary", "90", "--budget", "400"],
    "train_translation": [*PAIRS, *BOTH, "--hidden", "64", "--judged", "4", "--judge", "en-de", "--budget", "200"],
    "train_embedder": [*PAIRS, *SMALL, "--budget", "128"],
    "distil": ["--teacher", "DATA/teacher", *TEXT, "--batch", "2"],
    "finetune_text": ["--model", "bert-mini", "--data", "DATA/rows.tsv", "--val", "DATA/rows.tsv", "--dropout", "0",
                      "--task", "class", "--budget", "400"],
}  # fmt: skip
UNDRAWN = {"vit": ["--erase", "0"], "captioner": ["--dropout", "0"]}  # what the device draws
pytestmark = pytest.mark.usefixtures("blank_figures")
EVERY = [*TEXTS, *MEDIA, "train_any"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = [line for rows in SAID.values() for line in rows]
    (tmp_path / "text.txt").write_text("\n\n".join(" . ".join(lines[n:] + lines[:n]) for n in range(6)) * 3)
    (tmp_path / "rows.tsv").write_text("\n".join(f"{line}\t{n % 2}" for n, line in enumerate(lines * 4)))
    for language, rows in SAID.items():
        with gzip.open(tmp_path / f"said.{language}.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(rows * 4) + "\n")
        (tmp_path / f"held.{language}").write_text("\n".join(row.upper() + " again" for row in rows))
    return tmp_path


@pytest.fixture
def command(load_recipe, texts: Path, request: pytest.FixtureRequest):
    """The recipe of a name, and its flags."""

    def made(name: str) -> tuple:
        if name == "train_any":
            return load_recipe(name), asking(request.getfixturevalue("questions"), "run", 3, "--freeze", "image")
        if name in TEXTS:
            if name == "distil":
                save_folder(byte_model(), texts / "teacher")
            return load_recipe(name), [flag.replace("DATA", str(texts)) for flag in TEXTS[name]]
        recipe, kind, flags = MEDIA[name]
        path = str(dataset(texts, kind, "tar"))
        return load_recipe(recipe), [path if flag == "DATA" else flag for flag in flags]

    return made


@pytest.fixture
def undropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dropout, which each device draws in its own way."""
    for kind in (nn.Dropout, DropPath):
        monkeypatch.setattr(kind, "forward", lambda _, x: x)


def losses(folder: Path) -> list[float]:
    path = min(folder.rglob("metrics.jsonl"))  # a study has several
    rows = map(json.loads, path.read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def train(recipe, flags: list[str], folder: Path, *more: str) -> list[float]:
    own = ["--log_every", "1", "--warmup", "1", "--threads", "1", "--run", str(folder), "--out", f"{folder}-out"]
    start(recipe.main, [*flags, *own, *more])
    return losses(folder)


@pytest.mark.usefixtures("undropped")
@on_devices("name", EVERY, ["train_lm", "train_seq2seq", "whisper", "clip", "train_any"])
def test_steps_have_the_losses_of_a_cpu_and_go_on(name: str, device: str, command, texts: Path):
    recipe, flags = command(name)
    flags += UNDRAWN.get(name, [])
    if device != "cpu":
        exact = [*flags, "--steps", "3", "--precision", "float32", "--device"]
        expected, found = (train(recipe, [*exact, one], texts / one) for one in ("cpu", device))
        assert len(found) == 3
        assert found[0] == pytest.approx(expected[0], rel=2e-3)
        assert all(map(math.isfinite, found))
    usual = [*flags, "--save_every", "2", "--device", device]
    train(recipe, usual, texts / "usual", "--steps", "2")
    found = train(recipe, usual, texts / "usual", "--steps", "4", "--resume")
    assert len(found) == 4
    assert all(map(math.isfinite, found))
    made = load(texts / "usual-out").model
    assert {tensor.device.type for tensor in made.state_dict().values()} == {"cpu"}
    assert all(tensor.isfinite().all() for tensor in made.state_dict().values() if tensor.is_floating_point())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("name", ["clip", "train_lm", "asr"])
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own calls
def test_compiled_steps_have_nearly_the_same_losses(name: str, device: str, command, texts: Path):
    recipe, flags = command(name)
    steps = [*flags, "--steps", "3", "--device", device]
    plain, made = (train(recipe, [*steps, *more], texts / f"run{len(more)}") for more in ((), ("--compile",)))
    assert made[0] == pytest.approx(plain[0], rel=0.02)
    assert all(map(math.isfinite, made))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("name", ["clip", "vit", "train_lm", "train_mlm"])
def test_steps_as_cuda_graphs_have_the_usual_losses(name: str, device: str, command, texts: Path, monkeypatch):
    """With their dropout, erasing and a rate that changes."""
    captured = []
    monkeypatch.setattr(step_graphs, "CapturedStep", lambda *parts: captured.append(parts) or CapturedStep(*parts))
    recipe, flags = command(name)
    steps = [*flags, "--steps", "16", "--precision", "float32", "--device", device]
    plain, made = (train(recipe, [*steps, *more], texts / f"run{len(more)}") for more in ((), ("--graphs",)))
    assert captured
    assert made == pytest.approx(plain, rel=0.02)
