"""The contrastive recipe on coloured squares: it learns them, resumes to the bit, and names what it cannot read."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.errors import CheckpointError, ImageError, UsageError
from multimodal.tokens.image import OPENAI_MEAN, OPENAI_STD, Preprocessing, preprocess, read_image
from multimodal.train.captions import Captions, Concept
from multimodal.train.contrast import Run, Settings
from multimodal.train.pictures import augment, entries, read_pictures
from multimodal.weights.folder import load_folder

RECIPES = Path(__file__).parent.parent / "recipes"
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "yellow": (230, 220, 30)}


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import evaluate_clip
    import train_clip

    return train_clip, evaluate_clip


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


def settings(data, folder, **changes):
    small = {
        "data": [data], "classes": RECIPES / "classes.jsonl", "out": folder / "model", "state": folder / "state",
        "steps": 30, "batch": 16, "warmup": 5,
        "rate": 3e-3, "average": 0.8, "image": 32, "width": 64, "layers": 1, "text_width": 32, "text_layers": 1,
        "vocabulary": 300, "every": 15, "keep": 0.5,
    }  # fmt: skip
    return Settings(**small | changes)


def test_learns_colours_and_ships_a_working_folder(recipes, squares, tmp_path, capsys):
    train_clip, evaluate_clip = recipes
    threads = torch.get_num_threads()
    train_clip.main(settings(squares, tmp_path, val=squares, steps=60))
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 15 zero-shot") for line in lines)
    checkpoint = load_folder(tmp_path / "model")
    pictures = evaluate_clip.read_labelled(squares, RECIPES / "classes.jsonl", checkpoint.preprocessing)
    names = [f"{name} square" for name in sorted(COLOURS)]
    assert pictures.names == names
    vectors = evaluate_clip.class_vectors(checkpoint, pictures.names)
    assert evaluate_clip.accuracy(checkpoint, vectors, pictures) == {"top1": 1.0, "top5": 1.0}
    evaluate_clip.main(tmp_path / "model", [squares], write=True)
    figures = load_folder(tmp_path / "model").card["figures"]
    assert figures == {f"{tmp_path.name}/squares": {"pictures": 32, "classes": 4, "top1": 1.0, "top5": 1.0}}


def test_loss_falls_and_a_resumed_run_equals_an_unbroken_one(squares, tmp_path):
    whole = Run(settings(squares, tmp_path))
    losses = [whole.step() for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    first = Run(settings(squares, tmp_path))
    for _ in range(15):
        first.step()
    first.save()
    second = Run(settings(squares, tmp_path))
    second.resume()
    assert [second.step() for _ in range(15)] == losses[15:]
    for name, tensor in whole.average.weights.items():
        assert torch.equal(tensor, second.average.weights[name]), name


def test_caption_of_one_class_fits_the_classes_below_it():
    concepts = [
        Concept(("poodle",), ("dog", "animal")), Concept(("beagle",), ("dog", "animal", "entity")),
        Concept(("tabby",), ("cat", "animal")), Concept(("A dog runs",), whole=True),
    ]  # fmt: skip
    captions = Captions(concepts, ["a photo of a {}."])
    assert captions.fits[:, captions.index["dog"]].tolist() == [True, True, False, True]
    seen = set()
    for seed in range(60):
        texts, fits = captions.draw(torch.tensor([0, 1, 2, 3, 0]), np.random.default_rng(seed))
        assert fits.shape == (5, len(texts))
        assert fits.any(0).all()
        assert fits.any(1).all()
        assert torch.equal(fits[0], fits[4])
        seen.update(texts)
    assert {"a photo of a dog.", "a photo of a poodle.", "A dog runs"} <= seen
    assert not any("entity" in text for text in seen)


def test_augmentation_without_change_is_the_preprocessing_of_inference(monkeypatch):
    """Crops, colours and normalisation agree with `preprocess` when nothing is drawn at random."""
    record = Preprocessing((96, 96), "shortest", "bilinear", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    # 0.5: no mirror, no shear, no colour change; the crop is whole and the aspect 1
    monkeypatch.setattr(torch, "rand", lambda *shape: torch.full(shape, 0.5))
    made = augment(pixels, record, smallest=1.0, strength=1.0)[0]
    wanted = preprocess(picture, record)
    # Pillow rounds to whole grey levels, and the border is reflected on one side, repeated on the other
    assert (made - wanted)[:, 2:-2, 2:-2].abs().max() < 1.5 / 255 / min(OPENAI_STD)


def write_tar(path, samples):
    with tarfile.open(path, "w") as file:
        for stem, colour, identity in samples:
            data = io.BytesIO()
            Image.new("RGB", (20, 20), colour).save(data, "PNG")
            for name, content in ((f"{stem}.png", data.getvalue()), (f"{stem}.cls", identity.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def test_reads_tars_and_captions(tmp_path):
    write_tar(tmp_path / "train-0.tar", [("a", (250, 0, 0), "n1"), ("b", (0, 0, 250), "n2")])
    write_tar(tmp_path / "train-1.tar", [("c", (240, 0, 0), "n1")])
    write_tar(tmp_path / "val-0.tar", [("v", (0, 250, 0), "n2")])
    rows = [
        {"wnid": "n1", "names": ["apple"], "hypernyms": ["fruit"]},
        {"wnid": "n2", "names": ["sky"], "hypernyms": []},
    ]
    (tmp_path / "classes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pictures = read_pictures(tmp_path, 20, {"n1": Concept((), ("food",))})
    assert pictures.groups.tolist() == [0, 1, 0]
    assert pictures.concepts[0] == Concept(("apple",), ("food", "fruit"))
    assert pictures.pixels[:, :, 0, 0].tolist() == [[250, 0, 0], [0, 0, 250], [240, 0, 0]]
    Image.new("RGB", (30, 20)).save(tmp_path / "one.png")
    row = {"file_name": "one.png", "captions": ["A dog .", "Night"]}
    (tmp_path / "captions.jsonl").write_text(json.dumps(row))
    assert read_pictures(tmp_path / "captions.jsonl", 8, {}).concepts == [Concept(("A dog", "Night"), whole=True)]


def test_names_what_it_cannot_read(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.zip: no \.tar, \.jsonl or folder"):
        list(entries(tmp_path / "nothing.zip", {}))
    write_tar(tmp_path / "train-0.tar", [("a", (0, 0, 0), "n7")])
    with pytest.raises(UsageError, match=r"classes\.jsonl: missing"):
        list(entries(tmp_path, {}))
    (tmp_path / "classes.jsonl").write_text('{"id": "n1", "names": ["x"], "hypernyms": []}')
    with pytest.raises(UsageError, match=r"a\.cls is of class 'n7'"):
        list(entries(tmp_path, {}))
    (tmp_path / "c.jsonl").write_text('{"file_name": "absent.png", "captions": ["x"]}')
    with pytest.raises(ImageError, match=r"absent\.png"):
        read_pictures(tmp_path / "c.jsonl", 8, {})


def test_every_saved_state_damaged_is_an_error(squares, tmp_path):
    run = Run(settings(squares, tmp_path))
    run.save()
    for path in (tmp_path / "state").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="none of 1 saved states"):
        run.resume()


def test_shipped_model_sees_a_uniform(recipes):
    """Grace Hopper's portrait, among labels that were trained."""
    import matplotlib

    checkpoint = load_folder(RECIPES.parent / "assets" / "clip-vit-16")
    picture = read_image(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    names = ["goldfish", "school bus", "military uniform", "teapot", "lighthouse", "tabby cat", "banana"]
    vectors = recipes[1].class_vectors(checkpoint, names)
    with torch.inference_mode():
        image = checkpoint.model.encode_image(preprocess(picture, checkpoint.preprocessing)[None])
    assert names[int((image @ vectors.T).argmax())] == "military uniform"
    assert checkpoint.card["figures"]["tiny-imagenet/val-0000.tar"]["top1"] > 0.19
