"""`multimodal inspect` over several images: means of distances, maps of files and frames, DINO's interpolation."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.commands import one_line, run
from tests.helpers.data.video_files import video


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    draw = np.random.default_rng(1)
    for number in range(3):
        Image.fromarray(draw.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def seen(capsys, *arguments: object) -> dict:
    code, out, err = run(capsys, "inspect", *arguments, "--format", "json", "--quiet")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.ci
def test_distances_over_a_folder_are_the_mean_of_its_images(capsys, files, photos, tmp_path):
    whole = seen(capsys, files["vit"], photos, "--what", "distance", "--plot", tmp_path / "d.png")
    each = [seen(capsys, files["vit"], photos / f"{n}.png", "--what", "distance")["distances"] for n in range(3)]
    assert whole["images"] == 3
    assert torch.allclose(torch.tensor(whole["distances"]), torch.tensor(each).mean(0), rtol=1e-4)
    assert torch.allclose(torch.tensor(whole["spread"]), torch.tensor(each).std(0, correction=0), atol=1e-3)
    assert (tmp_path / "d.png").stat().st_size > 1000


@pytest.mark.ci
def test_maps_of_files_and_frames_are_those_of_each_alone(capsys, files, photos, tmp_path):
    stills = [np.full((32, 32, 3), 10 * n, np.uint8) for n in range(20)]
    (tmp_path / "clip.mp4").write_bytes(video(stills))
    found = seen(capsys, files["vit"], photos, tmp_path / "clip.mp4", "--layer", 0, "--head", 1)
    names = [one["name"] for one in found["images"]]
    assert names[:3] == ["0.png", "1.png", "2.png"]
    assert (len(names), names[3][:9]) == (3 + 16, "clip.mp4 ")
    three = seen(capsys, files["vit"], photos, "--layer", 0, "--head", 1, "--plot", tmp_path / "a.png")
    assert [one["name"] for one in three["images"]] == names[:3]
    alone = seen(capsys, files["vit"], photos / "1.png", "--layer", 0, "--head", 1)["maps"][0][0]
    assert torch.allclose(torch.tensor(found["images"][1]["map"]), torch.tensor(alone), rtol=1e-4)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_larger_image_has_more_patches_by_either_interpolation(capsys, files, photos):
    own = np.array(seen(capsys, files["vit"], photos)["images"][0]["map"]).shape
    maps = {}
    for kind in ("antialias", "dino"):
        found = seen(capsys, files["vit"], photos, "--size", 32, "--interpolation", kind)
        maps[kind] = np.array(found["images"][0]["map"])
    assert maps["dino"].shape == maps["antialias"].shape
    assert maps["dino"].size > np.prod(own)
    assert not np.allclose(maps["dino"], maps["antialias"], rtol=1e-3)


def test_a_side_that_is_no_multiple_of_the_patch_and_many_texts_are_one_line(capsys, files, photos):
    code, _, err = run(capsys, "inspect", files["vit"], photos, "--size", 31)
    assert (code, "--size must be a multiple of the patch" in one_line(err)) == (1, True)
    code, _, err = run(capsys, "inspect", files["rotary"], "abc", "cd")
    assert (code, "a model of images takes several" in one_line(err)) == (1, True)
