"""The contrastive recipe on coloured squares: it learns them by either loss, resumes to the bit, leaves classes out
when asked to, and names what it cannot read."""

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.data.datasets.class_names import CaptionSampler, Concept, class_names, held_out, unseen_words
from multimodal.data.datasets.images import DRAWS, LabelledImageSource, augment, softened
from multimodal.data.loader import Loader, generator, shuffled
from multimodal.errors import DataError, ImageError, UsageError
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing, preprocess
from multimodal.tokens.image.reading import read_image
from multimodal.train.objectives.contrastive_model import CollateContrastive, PrepareContrastive
from multimodal.train.optim import OptimSettings
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import load_folder
from tests.helpers.paths import ROOT
from tests.helpers.spread import spread

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "yellow": (230, 220, 30)}
RECORD = Preprocessing((96, 96), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)


@pytest.fixture
def recipe(load_recipe):
    return load_recipe("train_clip")


@pytest.fixture
def squares(tmp_path):
    """An image folder with eight noisy squares a colour."""
    random = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        folder = tmp_path / "squares" / f"{name}_square"
        folder.mkdir(parents=True)
        for index in range(8):
            noise = random.integers(-25, 25, (40, 48, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "squares"


def settings(recipe, data, folder, loop=(), model=(), **changes):
    """A run of seconds."""
    optim = OptimSettings(rate=3e-3, optimizer="muon", warmup=5, weight_decay=0.1, average=0.8)
    steps = {"run": folder / "run", "steps": 30, "optim": optim, "threads": torch.get_num_threads(), "log_every": 1,
             "save_every": 15, "evaluate_every": 15}  # fmt: skip
    shape = {"image": 32, "width": 64, "layers": 1, "text_width": 32, "text_layers": 1, "vocabulary": 300}
    return recipe.CLIPRun(
        (str(data),), folder / "model", batch=16, patches=0.5, loop=LoopSettings(**steps | dict(loop)),
        model=recipe.ContrastiveModelSettings(**shape | dict(model)), **changes,
    )  # fmt: skip


def metrics(folder, name="loss"):
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize("loss", spread(["softmax", "sigmoid"], 2, pytest.mark.slow, pytest.mark.ci))
def test_learns_colours_and_ships_a_working_folder(recipe, squares, tmp_path, loss):
    s = settings(recipe, squares, tmp_path, {"steps": 60}, {"loss": loss}, val=(str(squares),))
    recipe.main(s)
    losses = metrics(tmp_path)
    assert len(losses) == 60
    # an image's share of images of its colour is about a quarter, at first and at the end
    first, last = {"softmax": (2.8, 1.6), "sigmoid": (27.0, 5.0)}[loss]
    assert losses[0] > first
    assert np.mean(losses[-5:]) < last
    assert metrics(tmp_path, f"eval/{tmp_path.name}/squares/top1")[-1] == 1.0
    trained = load_folder(tmp_path / "model")
    assert trained.model.config.loss == loss
    classifier = ZeroShotClassifier(trained, [f"{name} square" for name in COLOURS])
    shown = [Image.new("RGB", (50, 40), colour) for colour in COLOURS.values()]
    best = [row["scores"][0]["label"] for row in classifier.results(shown)]
    assert best == [f"{name} square" for name in COLOURS]
    assert "## Examples" in (tmp_path / "run" / "report" / "report.md").read_text()
    # and it can be gone on from, by the same loss
    again = settings(recipe, squares, tmp_path / "again", {"steps": 2}, {"loss": loss}, init=str(tmp_path / "model"))
    recipe.main(again)
    assert metrics(tmp_path / "again")[0] < 1.3 * last
    other = {"softmax": "sigmoid", "sigmoid": "softmax"}[loss]
    wrong = settings(recipe, squares, tmp_path / "other", {}, {"loss": other}, init=str(tmp_path / "model"))
    with pytest.raises(UsageError, match=f"was trained with the {loss} loss, not {other}"):
        recipe.main(wrong)


@pytest.mark.ci
def test_images_in_use_may_be_larger_than_in_training(recipe, squares, tmp_path):
    s = settings(recipe, squares, tmp_path, {"steps": 2}, val=(str(squares),))
    recipe.main(dataclasses.replace(s, test_image=48))
    trained = load_folder(tmp_path / "model")
    assert trained.preprocessing.size == trained.model.config.image.image == (48, 48)
    assert trained.model.image.positions.shape == (9, 64)
    assert len(ZeroShotClassifier(trained, ["a", "b"]).results([Image.new("RGB", (50, 40))])[0]["scores"]) == 2
    with pytest.raises(UsageError, match=r"test_image must be a multiple of the patch of 16 pixels \(got 40\)"):
        recipe.main(dataclasses.replace(s, test_image=40))
    # the model then trains at their size
    init = str(tmp_path / "model")
    recipe.main(settings(recipe, squares, tmp_path / "again", {"steps": 1}, {"image": 48}, init=init))
    for sizes in ({"image": 32}, {"image": 48, "vocabulary": 301}):
        with pytest.raises(UsageError, match=r"(image 32: .* has 48|vocabulary 301: .* has 300), which it keeps"):
            recipe.main(settings(recipe, squares, tmp_path / "other", {"steps": 1}, sizes, init=init))
    assert load_folder(tmp_path / "again" / "model").preprocessing.size == (48, 48)


def test_a_resumed_run_equals_an_unbroken_one(recipe, squares, tmp_path):
    """Under WSD, where a run can be made longer; its last steps use all patches."""
    optim = OptimSettings(optimizer="muon", schedule="wsd", warmup=2, decay=0.1, average=0.8)

    def train(folder, steps, whole, resume=False):
        loop = {"optim": optim, "steps": steps, "resume": resume}
        recipe.main(settings(recipe, squares, tmp_path / folder, loop, whole=whole))
        return metrics(tmp_path / folder), load_folder(tmp_path / folder / "model").model.state_dict()

    losses, weights = train("one", 10, 0.2)
    train("two", 5, 0.0)
    again, others = train("two", 10, 0.2, resume=True)
    assert again[6:] == losses[6:]
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.ci
def test_micro_batches_see_what_the_whole_batch_sees(recipe, squares):
    """Images, captions and crops are those of the item, whatever micro-batch it is in."""
    images = LabelledImageSource([str(squares)], {}, 32, cache=10)
    captions = CaptionSampler(images.concepts, ["a photo of a {}."])
    tokenizer = recipe.BytePairTokenizer.train(captions.texts(), 300, lowercase=True)
    record = RECORD.replace(size=(32, 32))
    parts = {}
    for micro, workers in ((1, 0), (2, 0), (2, 2)):
        loader = Loader(images, shuffled(32, 16, 0), PrepareContrastive(captions, 4),
                        CollateContrastive(tokenizer, 32, record, 0.5, 1.0),
                        micro=micro, workers=workers)  # fmt: skip
        steps = loader.start(1)
        parts[micro, workers] = next(steps).batches
        steps.close()
    whole, halves = parts[1, 0][0], parts[2, 0]
    assert [len(half.images) for half in halves] == [8, 8]
    for field in ("images", "concepts", "terms", "order", "ids"):
        joined = torch.cat([getattr(half, field) for half in halves])
        assert sorted(x.tolist() for x in joined.flatten(1 if joined.ndim > 1 else 0)) == sorted(
            x.tolist() for x in getattr(whole, field).flatten(1 if joined.ndim > 1 else 0)
        ), field
        for half, other in zip(halves, parts[2, 2], strict=True):
            assert torch.equal(getattr(half, field), getattr(other, field)), field


def test_words_of_no_caption_are_found():
    captions = ["a photo of a poodle.", "A dog runs beside two cars", "a shrub"]
    texts = ["Deer and dogs, poodles, a Car.", "An ox runs, 3 miles", "shrubs: the deer"]
    # other forms of known words are none, nor words of fewer than three letters
    assert unseen_words(texts, captions) == ["and", "deer", "miles", "the"]
    assert unseen_words(["dances"], ["a dancing girl"]) == []


def test_names_of_held_out_classes_are_no_wrong_captions(recipe, tmp_path):
    (tmp_path / "words.txt").write_text("an airliner, a jetliner, a deer")
    s = recipe.CLIPRun(("data",), tmp_path / "out", unseen=(tmp_path / "words.txt",))
    captions = CaptionSampler([Concept(("dog",))], ["a {}"])
    assert recipe.words_of_no_image(s, captions, [Concept(("airliner", "jetliner"))]) == ["deer"]


@pytest.mark.ci
def test_words_without_an_image_win_no_image(recipe, squares, tmp_path):
    (tmp_path / "words.txt").write_text("violet orange\nviolet circle\n")
    labels = [*(f"{name} square" for name in COLOURS), "violet"]

    def violets(folder, **changes):
        recipe.main(settings(recipe, squares, tmp_path / folder, {"steps": 40}, **changes))
        rows = ZeroShotClassifier(load_folder(tmp_path / folder / "model"), labels).results(
            [Image.new("RGB", (50, 40), colour) for colour in COLOURS.values()])  # fmt: skip
        return max(one["score"] for row in rows for one in row["scores"] if one["label"] == "violet")

    without = violets("without")
    assert violets("with", unseen=(tmp_path / "words.txt",)) < min(0.1, without / 2)
    (tmp_path / "known.txt").write_text("Red squares")
    with pytest.raises(UsageError, match=r"--unseen .*known\.txt: captions have all its words"):
        violets("none", unseen=(tmp_path / "known.txt",))


@pytest.mark.ci
def test_a_frozen_tower_keeps_its_weights(recipe, squares, tmp_path):
    recipe.main(settings(recipe, squares, tmp_path, {"steps": 2}))
    more = settings(recipe, squares, tmp_path / "more", {"steps": 2}, init=str(tmp_path / "model"), freeze=("image",))
    recipe.main(more)
    first, second = (load_folder(folder / "model").model for folder in (tmp_path, tmp_path / "more"))
    same = lambda part: all(map(torch.equal, getattr(first, part).parameters(), getattr(second, part).parameters()))
    assert same("image")
    assert not same("text")


def test_caption_of_one_class_fits_the_classes_below_it():
    concepts = [
        Concept(("poodle",), ("dog", "animal")), Concept(("beagle",), ("dog", "animal", "entity")),
        Concept(("tabby",), ("cat", "animal")), Concept(("A dog runs", "Running"), whole=True),
    ]  # fmt: skip
    captions = CaptionSampler(concepts, ["a photo of a {}."])
    fits = captions.fits()
    assert fits[:, captions.index["dog"]].tolist() == [True, True, False, True]
    seen = {}
    for number in range(4):
        for seed in range(60):
            term, text = captions.draw(number, generator(seed))
            assert fits[number, term]
            seen.setdefault(text, set()).add(term)
    assert {"a photo of a dog.", "a photo of a poodle.", "A dog runs", "Running"} <= seen.keys()
    assert seen["A dog runs"] == seen["Running"]
    assert fits[:, next(iter(seen["Running"]))].tolist() == [False, False, False, True]
    assert not any("entity" in text for text in seen)
    assert CaptionSampler(concepts[3:], ["{}"]).fits() is None


def test_augmentation_without_change_is_the_preprocessing_of_inference():
    """Crops, colours and normalization agree with `preprocess` when nothing is changed."""
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    draws = torch.full((1, DRAWS), 0.5)
    # 0.5: no mirror, no shear, no colour change; the crop is whole and the aspect 1
    made = augment(pixels, draws, softened(draws, 0.15), RECORD, smallest=1.0, strength=1.0)[0]
    wanted = preprocess(image, RECORD)
    # Pillow rounds to whole grey levels, and the border is reflected on one side, repeated on the other
    assert (made - wanted)[:, 2:-2, 2:-2].abs().max() < 1.5 / 255 / min(OPENAI_STD)


def test_the_coarse_share_of_the_images_loses_detail_finer_than_two_pixels():
    board = (torch.arange(64)[:, None] + torch.arange(64)) % 2 * torch.full((3, 1, 1), 255)
    pixels, draws = board.to(torch.uint8)[None].repeat(4, 1, 1, 1), torch.full((4, DRAWS), 0.5)
    draws[:, 0] = torch.tensor([0.05, 0.25, 0.35, 0.95])
    assert softened(draws, 0.3).tolist() == [0, 1]
    made = augment(pixels, draws, softened(draws, 0.3), RECORD, smallest=1.0, strength=0.0)
    assert [bool(own[:, 8:-8, 8:-8].std() < 0.2) for own in made] == [True, True, False, False]


def test_a_broken_image_is_left_out_with_the_right_labels(recipe, squares, tmp_path, caplog):
    (squares / "red_square" / "3.png").write_bytes(b"no image")
    recipe.main(settings(recipe, squares, tmp_path, {"steps": 2}))
    assert "3.png" in caplog.text
    images = LabelledImageSource([str(squares)], {}, 32)
    loader = Loader(images, shuffled(32, 32, 0), lambda item, random: item, list)
    step = next(loader.start(0))
    assert (step.count, step.broken) == (31, 1)
    names = [concept.names[0] for concept in images.concepts]
    for pixels, concept in step.batches[0]:
        wanted = torch.tensor(COLOURS[names[concept].removesuffix(" square")])
        assert (pixels.float().mean((1, 2)) - wanted).abs().max() < 30


def write_tar(path, samples):
    with tarfile.open(path, "w") as file:
        for stem, colour, ending, text in samples:
            data = io.BytesIO()
            Image.new("RGB", (20, 20), colour).save(data, "PNG")
            for name, content in ((f"{stem}.png", data.getvalue()), (f"{stem}.{ending}", text.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def test_reads_tars_of_classes(tmp_path):
    write_tar(tmp_path / "train-0.tar", [("a", (250, 0, 0), "cls", "n1"), ("b", (0, 0, 250), "cls", "n2")])
    write_tar(tmp_path / "train-1.tar", [("c", (240, 0, 0), "cls", "n1")])
    rows = [{"wnid": "n1", "names": ["apple"], "hypernyms": ["fruit"]}, {"wnid": "n2", "names": ["sky"]}]
    (tmp_path / "classes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "more.jsonl").write_text('{"id": "n1", "names": [], "hypernyms": ["food"]}')
    data = [str(tmp_path / "train-*.tar")]
    images = LabelledImageSource(data, class_names([tmp_path / "more.jsonl"], data), 30, cache=1)
    assert images.groups == [0, 1, 0]
    assert images.concepts[0] == Concept(("apple",), ("food", "fruit"))
    for _ in range(2):  # decoded, and from memory
        assert [images.read(key)[0][:, 0, 0].tolist() for key in range(3)] == [[250, 0, 0], [0, 0, 250], [240, 0, 0]]


def test_reads_images_with_captions(recipe, tmp_path, caplog):
    for name in "abcd":
        Image.new("RGB", (30, 20)).save(tmp_path / f"{name}.png")
    (tmp_path / "one.jsonl").write_text(json.dumps({"file_name": "a.png", "captions": ["A dog .", "Night"]}))
    (tmp_path / "two.jsonl").write_text(json.dumps({"file_name": "b.png", "text": "A cat"}))
    (tmp_path / "three.csv").write_text("filepath,title\nc.png,A horse\nd.png,\n")
    write_tar(tmp_path / "four.tar", [("e", (9, 9, 9), "txt", "A cow")])
    data = [str(tmp_path / name) for name in ("one.jsonl", "two.jsonl", "three.csv", "four.tar")]
    images = LabelledImageSource(data, {}, 12)
    assert [c.names for c in images.concepts] == [("A dog", "Night"), ("A cat",), ("A horse",), ("A cow",)]
    assert all(c.whole for c in images.concepts)
    with pytest.raises(DataError, match=r"three\.csv line 3: its caption is empty"):
        images.read(3)
    s = settings(recipe, data[0], tmp_path, {"steps": 2}, {"context": 4})
    recipe.main(dataclasses.replace(s, data=data, batch=5))
    assert metrics(tmp_path)[0] > 0.5
    assert "5 of 5 captions have more than 2 tokens and are cut" in caplog.text
    (tmp_path / "same.csv").write_text("filepath,title\na.png,A shoe\nb.png,A hat\nc.png,A shoe .\n")
    assert LabelledImageSource([str(tmp_path / "same.csv")], {}, 12).groups == [0, 1, 0]  # each is right for the other


def test_a_source_is_seen_as_often_as_is_asked(recipe, tmp_path):
    for name, colour in {"a": "red", "b": "blue"}.items():
        Image.new("RGB", (12, 12), colour).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"file_name": f"{name}.png", "text": f"All {colour}"}))
    images = LabelledImageSource([str(tmp_path / f"{name}.jsonl") for name in "ab"], {}, 12, cache=1, times=(1, 3))
    assert [concept.names for concept in images.concepts] == [("All red",), ("All blue",)]
    assert images.groups == [0, 1, 1, 1]
    assert [images.read(key)[0][:, 0, 0].tolist() for key in range(4)] == [[255, 0, 0]] + 3 * [[0, 0, 255]]
    assert images.name(3).endswith("b.jsonl line 1")
    assert recipe.whole_repeats("b.jsonl=3") == ("b.jsonl", 3)
    for times in ("0", "1.5", "-1"):
        with pytest.raises(UsageError, match=f"={times}: expected"):
            recipe.whole_repeats(f"b.jsonl={times}")


@pytest.mark.ci
def test_held_out_classes_are_apart(recipe, squares, tmp_path):
    """Neither their images nor their names are trained on, and figures of unseen classes are reported."""
    (tmp_path / "classes.jsonl").write_text(
        "\n".join(json.dumps({"id": f"{name}_square", "names": [name]}) for name in COLOURS)
    )
    Image.new("RGB", (30, 20)).save(tmp_path / "one.png")
    (tmp_path / "one.jsonl").write_text(
        json.dumps({"file_name": "one.png", "captions": [f"A {n} car" for n in COLOURS]})
    )
    data = [str(squares), str(tmp_path / "one.jsonl")]
    images = LabelledImageSource(data, class_names([], data), 32, 0.25)
    [held] = [concept.names[0] for concept in images.held]
    assert len(images) == 25
    names = {name for concept in images.concepts for name in concept.names}
    assert names == set(COLOURS) - {held} | {f"A {n} car" for n in COLOURS if n != held}
    assert not any(held in images.name(key) for key in range(len(images)))
    assert LabelledImageSource(data, class_names([], data), 32, 0.25).held == images.held
    s = settings(recipe, squares, tmp_path, {"steps": 15}, val=(str(squares),), hold_out=0.25)
    recipe.main(s)
    assert load_folder(tmp_path / "model").card["held_out"] == [held]
    assert metrics(tmp_path, f"eval/{tmp_path.name}/squares/unseen_apart_top1") == [1.0]  # the only one


def test_only_classes_whose_names_stand_alone_are_held_out():
    dogs = {"n1": Concept(("poodle",), ("dog",)), "n2": Concept(("crane",)), "n3": Concept(("Crane", "wader"))}
    more = {"n4": Concept(("Dog",)), "n5": Concept(("tabby",), ("cat",)), "n6": Concept(("lynx",), ("cat",))}
    assert held_out([dogs, more], 1 / 3).keys() - {"n1", "n5", "n6"} == set()
    assert "n1" in held_out([dogs, more], 1 / 3)
    assert held_out([dogs], 0.0) == {}
    with pytest.raises(UsageError, match=r"hold_out 0\.9: 3 classes of a set, only 1 share no name"):
        held_out([dogs, more], 0.9)


def test_names_what_it_cannot_read(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.zip: "):
        LabelledImageSource([str(tmp_path / "nothing.zip")], {}, 32)
    with pytest.raises(UsageError, match=r"class names .*absent\.jsonl: cannot be read"):
        class_names([tmp_path / "absent.jsonl"])
    for line in ('{"names": ["x"]}', "[" * 100_000):
        (tmp_path / "wrong.jsonl").write_text('{"id": "a", "names": ["b"]}\n' + line)
        with pytest.raises(UsageError, match=r"wrong\.jsonl line 2: no object with `id` and `names`"):
            class_names([tmp_path / "wrong.jsonl"])
    write_tar(tmp_path / "train-0.tar", [("a", (0, 0, 0), "cls", "n7")])
    with pytest.raises(UsageError, match=r"a\.png: is of class 'n7', an id that classes do not name"):
        LabelledImageSource([str(tmp_path / "train-0.tar")], {}, 32)
    write_tar(tmp_path / "word-0.tar", [("a", (0, 0, 0), "cls", "狗")])
    assert LabelledImageSource([str(tmp_path / "word-0.tar")], {}, 32).concepts[0].names == ("狗",)
    (tmp_path / "c.jsonl").write_text('{"file_name": "absent.png", "captions": ["x"]}')
    with pytest.raises(ImageError, match=r"absent\.png"):
        LabelledImageSource([str(tmp_path / "c.jsonl")], {}, 32).read(0)


def test_help_and_errors_are_for_people(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("multimodal.train.recipe_cli.write_logs", lambda *names: None)

    def run(*flags):
        with pytest.raises(SystemExit) as end:
            recipe.start(recipe.main, flags)
        return end.value.code, *capsys.readouterr()

    code, shown, _ = run("--help")
    assert code == 0
    assert all(flag in shown for flag in ("--hold_out", "--loss", "--init", "--schedule", "--patches"))
    code, _, line = run("--run", str(tmp_path / "r"), "--out", str(tmp_path / "o"), "--data", str(tmp_path / "absent"))
    assert (code, line.count("\n")) == (1, 1)
    assert f"train_clip.py: error: {tmp_path / 'absent'}: " in line
    code, _, line = run("--out", str(tmp_path / "o"), "--data", str(tmp_path), "--coarse", "1.2")
    problem = "--coarse must be a number in [0, 1] (got 1.2)"
    assert (code, line) == (2, f"train_clip.py: error: {problem} (see train_clip.py --help)\n")
    assert "--anchor 1.0: without --init" in run("--out", str(tmp_path / "o"), "--data", "x", "--anchor", "1")[2]


def test_shipped_model_sees_a_uniform():
    """Grace Hopper's portrait, among labels that were trained."""
    import matplotlib

    checkpoint = load_folder(ROOT / "assets" / "clip-vit-16")
    image = read_image(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    names = ["goldfish", "school bus", "military uniform", "teapot", "lighthouse", "tabby cat", "banana"]
    assert ZeroShotClassifier(checkpoint, names).results([image], 1)[0]["scores"][0]["label"] == "military uniform"
    assert checkpoint.card["figures"]["tiny-imagenet/val-0000.tar"]["top1"] > 0.19
