"""The classification recipe on coloured squares: it learns them, resumes to the bit whatever timm draws, and names what
it cannot use."""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.mixup import Mixup

from multimodal.cli.main import main
from multimodal.data.datasets.class_names import class_labels
from multimodal.data.loader import Loader, finished, generator, shuffled
from multimodal.data.sources import Sample, open_source
from multimodal.errors import CheckpointError, UsageError
from multimodal.tokens.image.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from multimodal.train.objectives.augment_images import ImageAugment, ImageAugmentSettings, seeded
from multimodal.train.objectives.classify import MixImages, SoftTargets, classifier
from multimodal.train.recipe_cli import start
from multimodal.weights.folder import Checkpoint, load_folder
from tests.helpers import tiny
from tests.helpers.data import sets
from tests.helpers.spread import thin

RECORD = Preprocessing((16, 16), "shortest", "bilinear", IMAGENET_MEAN, IMAGENET_STD, 0, 1.0)
LABELS = [f"{name}_square" for name in sets.COLOURS]
SMALL = [
    "--image",
    "16",
    "--width",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--precision",
    "float32",
    "--log_every",
    "1",
]
PLAIN = ["--randaugment", "", "--erase", "0", "--mix", "0", "--smoothing", "0"]


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("train_vit")


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    return sets.squares(tmp_path_factory.mktemp("data") / "squares")


def run(recipe, data: Path, folder: Path, *options: str) -> dict[str, float]:
    flags = ["--data", str(data), "--val", str(data), "--run", str(folder / "run"), "--out", str(folder / "out")]
    return start(
        recipe.main,
        [*flags, "--batch", "8", "--warmup", "3", "--precision", "float32", *SMALL, *options],
    )


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_learns_colours_and_ships_a_working_folder(recipe, squares, tmp_path, capsys):
    figures = run(recipe, squares, tmp_path, "--steps", "40", "--average", "0.9", *PLAIN)
    found = losses(tmp_path)
    assert found[0] == pytest.approx(math.log(4), abs=0.35)
    assert np.mean(found[-5:]) < 0.3
    assert figures == {"top1": 1.0}
    made = load_folder(tmp_path / "out")
    assert made.kind == "vit"
    assert made.preprocessing == RECORD
    assert made.card["labels"] == LABELS
    assert made.card["names"] == ["blue square", "green square", "red square", "yellow square"]
    assert made.card["figures"] == {str(squares): {"top1": 1.0, "images": 32}}
    assert "## Examples" in (tmp_path / "run" / "report" / "report.md").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["evaluate", "classification", str(squares), "--model", str(tmp_path / "out"), "--format", "json"])
    assert not end.value.code
    figures = json.loads(capsys.readouterr().out)
    assert figures["sets"][str(squares)]["acc1"] == 1.0


@pytest.mark.ci
def test_a_resumed_run_equals_an_unbroken_one_with_all_augmentation(recipe, squares, tmp_path):
    options = ["--steps", "6", "--save_every", "3", "--drop_path", "0.3", "--average", "0.5", "--accumulate", "2"]
    run(recipe, squares, tmp_path, *options)
    weights, first = (tmp_path / "out" / "model.safetensors").read_bytes(), losses(tmp_path)
    shutil.rmtree(sorted((tmp_path / "run" / "states").glob("*6"))[-1])
    random.seed(1)
    np.random.seed(1)
    run(recipe, squares, tmp_path, *options, "--resume", "--workers", "1")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    assert losses(tmp_path)[-3:] == first[-3:]
    run(recipe, squares, tmp_path / "further", "--steps", "1", "--init", str(tmp_path / "out"))
    assert load_folder(tmp_path / "further" / "out").model.config.stack.drop_path == 0.3


def batches(source, settings: ImageAugmentSettings, count: int = 3, batch: int = 7) -> list:
    prepare, collate = ImageAugment(LABELS, RECORD, settings), MixImages(4, RECORD, settings)
    steps = Loader(source, shuffled(len(source), batch, 0), prepare, collate).start(0)
    return [next(steps).batches[0] for _ in range(count)]


def test_batches_do_not_depend_on_global_generators(squares):
    source, settings = open_source(squares), ImageAugmentSettings(erase=1.0)
    for one, two in zip(batches(source, settings), batches(source, settings), strict=True):
        assert torch.equal(one.pixels, two.pixels)
        assert torch.equal(one.targets, two.targets)


def test_global_generators_go_on_as_if_nothing_was_drawn():
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    with seeded(5):
        expected = draw(), draw()
    with seeded(5):
        first = draw()
        with seeded(6):
            assert draw() != first
        assert (first, draw()) == expected


def test_targets_say_what_was_mixed(squares):
    plain = ImageAugmentSettings("", 1.0, flip=0.0, erase=0.0, mix=0.0, smoothing=0.0)
    (whole,), (mixed,) = (batches(open_source(squares), s, 1) for s in (plain, replace(plain, mix=1.0, cutmix=0.0)))
    assert whole.targets.sort(1).values[:, -1].tolist() == [1.0] * 7
    torch.testing.assert_close(mixed.targets.sum(1), torch.ones(7))
    assert torch.equal(mixed.pixels[6], whole.pixels[6])  # the last of an odd batch has no partner
    for i in range(6):
        share = (mixed.pixels[i] - whole.pixels[5 - i]).flatten() @ (whole.pixels[i] - whole.pixels[5 - i]).flatten()
        share = share / (whole.pixels[i] - whole.pixels[5 - i]).square().sum()
        wanted = share * whole.targets[i] + (1 - share) * whole.targets[5 - i]
        torch.testing.assert_close(mixed.targets[i], wanted, atol=1e-4, rtol=0)


def test_soft_targets_are_the_mean_over_images(squares):
    (batch,) = batches(open_source(squares), ImageAugmentSettings(), 1)
    torch.manual_seed(0)
    objective = SoftTargets(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 4)))
    logits = objective.model(batch.pixels)
    by_hand = -(batch.targets * logits.log_softmax(1)).sum()
    torch.testing.assert_close(objective(batch)["loss"], by_hand)
    assert objective.counts(batch) == {"loss": 7}


@pytest.mark.parametrize("magnitude", ["rand-m10-n6-inc1", "rand-m0-n6"])
def test_the_strongest_augmentation_breaks_no_image(magnitude, tmp_path):
    Image.effect_noise((20, 30), 60).convert("RGB").save(tmp_path / "one.png")
    settings = ImageAugmentSettings(magnitude)
    prepare, collate = ImageAugment(["x"], RECORD, settings), MixImages(1, RECORD, settings)
    sample = Sample("one", tmp_path / "one.png", "x", (), {})
    drawn = [prepare(sample, torch.Generator().manual_seed(seed)) for seed in range(60)]
    assert finished(collate(drawn)).pixels.isfinite().all()


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("text", ["", "rand-m9-mstd0.5-inc1", "rand-m10-n6", "original-mstd0.5"])
def test_a_batch_is_what_timm_makes_of_each_image(text, tmp_path):
    """By the same draws, of which whole crops leave out one: 99.8 % of the values within one level of 0..255. Others
    lie where a later operation has a threshold."""
    record, smallest = replace(RECORD, size=(24, 20), interpolation="bicubic"), 1.0 if text else 0.3
    settings = ImageAugmentSettings(text, smallest, erase=0.0, mixup=0.2, cutmix=1.0, mix=0.8)
    prepare, collate = ImageAugment(["x", "y"], record, settings), MixImages(2, record, settings)
    theirs = create_transform(
        (3, 24, 20), is_training=True, scale=(smallest, 1.0), hflip=0.5, color_jitter=None, auto_augment=text or None,
        interpolation="bicubic", mean=record.mean, std=record.std,
    )  # fmt: skip
    noise = np.random.default_rng(0)
    drawn, wanted = [], []
    for i, size in enumerate([(60, 60)] * 24):
        rough = Image.fromarray(noise.integers(0, 256, (5, 6, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
        rough.save(tmp_path / "one.png")
        drawn.append(
            prepare(Sample("one", tmp_path / "one.png", "xy"[i % 2], (), {}), torch.Generator().manual_seed(i))
        )
        with seeded(torch.randint(2**31, (2,), generator=torch.Generator().manual_seed(i)).tolist()[0]):
            wanted.append(theirs(rough))
    made = finished(collate(drawn))
    mixup = Mixup(0.2, 1.0, None, 0.8, 0.5, "elem", True, 0.1, 2)
    with seeded(generator(*(one.seed for one in drawn)).initial_seed()):
        pixels, targets = mixup(torch.stack(wanted), torch.tensor([one.label for one in drawn]))
    torch.testing.assert_close(made.targets, targets)
    levels = ((made.pixels - pixels) * torch.tensor(record.std)[:, None, None] * 255).abs()
    assert (levels > 1.01).float().mean() < 0.002


def test_operations_without_a_batched_form_are_refused():
    with pytest.raises(UsageError, match="GaussianBlurRand is not available"):
        ImageAugment(["x"], RECORD, ImageAugmentSettings("3a"))
    with pytest.raises(UsageError, match="augmix-m5: is not available, RandAugment"):
        ImageAugment(["x"], RECORD, ImageAugmentSettings("augmix-m5"))


def test_a_head_is_kept_for_the_same_classes_and_replaced_for_others():
    model, images = tiny.made("vit-registers-mean"), torch.randn(2, 3, 8, 12)
    begun = Checkpoint(model, preprocessing=RECORD, card={"labels": list("abcde")})
    assert torch.equal(classifier(begun, "abcde").eval()(images), model(images))
    other = classifier(begun, "edcba", drop_path=0.1).eval()
    assert not other(images).any()
    assert other.config.stack.drop_path == 0.1
    assert classifier(Checkpoint(other, preprocessing=RECORD), "abc").config.stack.drop_path == 0.1
    assert torch.equal(other.pooled(other.tokens(images)), model.pooled(model.tokens(images)))
    clip = tiny.made("clip-sigmoid")
    tower = classifier(Checkpoint(clip, preprocessing=RECORD), "abc").eval()
    assert torch.equal(tower.pooled(tower.tokens(images)), clip.image(images))
    with pytest.raises(CheckpointError, match="expected a ViT or a CLIP with one, got joint_conformer"):
        classifier(Checkpoint(tiny.made("joint"), preprocessing=RECORD), "abc")
    with pytest.raises(CheckpointError, match="has no preprocessing"):
        classifier(Checkpoint(model), "abc")


def test_broken_validation_images_are_left_out(recipe, squares, tmp_path, caplog):
    data = shutil.copytree(squares, tmp_path / "data")
    (data / "red_square" / "0.png").write_bytes(b"no image")
    figures = run(recipe, data, tmp_path, "--steps", "1", *PLAIN)
    assert 0 <= figures["top1"] <= 1
    assert "red_square/0.png" in caplog.text


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("change", "message"), [
    ({"--data": "{flat}"}, "flat: its items have no classes"),
    ({"--data": "{one}"}, "one: has the class 'red_square' alone"),
    ({"--val": "{other}"}, "other: class 'odd' is not among the model's 4 classes"),
    ({"--randaugment": "rand-q9"}, "--randaugment rand-q9: timm does not know it"),
    ({"--init": "asr-conformer-en"}, "asr-conformer-en: expected a ViT or a CLIP with one, got joint_conformer"),
    ({"--init": "clip-vit-16", "--image": "32"}, "--image 32: clip-vit-16 has 96, which it keeps"),
    ({"--classes": "{flat}/none.jsonl"}, "none.jsonl: cannot be read (No such file or directory)"),
])  # fmt: skip
def test_what_cannot_be_used_is_named_in_one_line(recipe, squares, tmp_path, last_line, change, message):
    places = {name: tmp_path / name for name in ("flat", "one", "other")}
    shutil.copytree(squares / "red_square", places["flat"])
    shutil.copytree(squares / "red_square", places["one"] / "red_square")
    shutil.copytree(squares / "red_square", places["other"] / "odd")
    assert message in last_line(
        lambda: run(recipe, squares, tmp_path, *(text.format(**places) for pair in change.items() for text in pair))
    )


def test_help_names_the_flags(recipe, help_text):
    shown = help_text(recipe)
    for flag in ("--data", "--init", "--mixup", "--drop_path", "--average", "--resume"):
        assert flag in shown


def test_labels_are_sorted_class_ids(squares):
    assert list(class_labels(open_source(squares), squares)) == LABELS


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(("options", "message"), [
    (["--patch", "5"], "--image must be a multiple of patch (5) (got 16)"),
    (["--patch", "0"], "--patch must be an integer of at least 1 (got 0)"),
    (["--heads", "3"], "--width must be a multiple of heads (3) (got 32)"),
    (["--smallest_crop", "0"], "--smallest_crop must be a number in (0, 1] (got 0.0)"),
    (["--cutmix", "-1"], "--cutmix must be a number of at least 0 (got -1.0)"),
    (["--batch", "0"], "--batch must be an integer of at least 1 (got 0)"),
])  # fmt: skip
def test_values_out_of_range_are_wrong_flags(recipe, squares, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as end:
        run(recipe, squares, tmp_path, *options)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
