"""Tiles of images: equal to transformers' processors with the Pillow backend, to the bit."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from multimodal.errors import CheckpointError, ImageError
from multimodal.system.records import from_record, to_record
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing, Tiling, placement, preprocess
from multimodal.tokens.image.tiles import kept_patches, markup, tiled

HALF = (0.5, 0.5, 0.5)
EDGE = {"height": 28, "width": 28}
SIZES = [(50, 37), (37, 50), (64, 64), (91, 33), (300, 20), (33, 34), (1, 1), (97, 41), (28, 28)]  # width, height
PINPOINTS = ((28, 28), (28, 56), (56, 28), (56, 56), (84, 28), (28, 84))
FIT = Preprocessing((28, 28), "squash", "bicubic", HALF, HALF, 0, 1.0, tiling=Tiling("fit", PINPOINTS))
SPLIT = Preprocessing((28, 28), "squash", "lanczos", HALF, HALF, 0, 1.0)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("pad", [False, True])
def test_llavas_crop_and_padding(pad):
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    theirs = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size=EDGE, do_pad=pad)
    resize = "square" if pad else "shortest"
    record = Preprocessing((28, 28), resize, "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0, "floor")
    for size in SIZES:
        image = noise(*size)
        expected = theirs(image, return_tensors="np")["pixel_values"][0]
        assert np.array_equal(expected, preprocess(image, record).numpy()), size
        assert np.array_equal(expected, tiled(image, record).pixels[0].numpy())
    assert placement(50, 25, record) == ((28, 14, 0, 7) if pad else (56, 28, -14, 0))


def test_llava_onevisions_tiles():
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    theirs = LlavaOnevisionImageProcessorPil(
        size=EDGE, image_grid_pinpoints=[list(size) for size in PINPOINTS], image_mean=HALF, image_std=HALF
    )
    for size in SIZES:
        image = noise(*size)
        expected, actual = theirs(image, return_tensors="np"), tiled(image, FIT)
        assert np.array_equal(expected["pixel_values"][0], actual.pixels.numpy()), size
        assert tuple(expected["image_sizes"][0]) == actual.size
    several = [noise(*size) for size in SIZES[:3]]
    expected = theirs([several], return_tensors="np")["pixel_values"]
    for image, pixels in zip(several, expected, strict=True):
        assert np.array_equal(pixels, tiled(image, FIT, several=True).pixels.numpy())


@pytest.mark.parametrize("most", [1, 9])
def test_llava_onevisions_kept_patches(most):
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    theirs = SimpleNamespace(vision_aspect_ratio=f"anyres_max_{most}")
    for width, height in SIZES:
        for grid in ((1, 1), (2, 1), (2, 3)):
            _, (rows, columns) = kept_patches((height, width), grid, 4, most)
            expected = LlavaOnevisionProcessor._get_unpadded_features(theirs, height, width, 4, 4, *grid)
            assert (rows * columns, rows) == expected


@pytest.mark.parametrize("division", ["split", "whole"])
@pytest.mark.parametrize("longest", [112, 100, 28, 50])
def test_idefics_tiles(longest, division):
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    theirs = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": 28}, image_mean=HALF, image_std=HALF,
        do_image_splitting=division == "split",
    )  # fmt: skip
    for size in SIZES:
        image = noise(*size)
        expected = theirs(image, return_tensors="np", return_row_col_info=True)
        actual = tiled(image, SPLIT.replace(tiling=Tiling(division, longest=longest)))
        assert np.array_equal(expected["pixel_values"][0], actual.pixels.numpy()), size
        assert (expected["rows"][0][0], expected["cols"][0][0]) == actual.grid
        assert expected["pixel_attention_mask"].all()  # tiles are whole, so the model needs no mask


def test_tilings_are_strict_records():
    assert from_record(Preprocessing, FIT.to_dict(), "t") == FIT
    assert from_record(Preprocessing, SPLIT.to_dict(), "t") == SPLIT
    for change, named in [
        ({"sizes": []}, "invalid sizes"), ({"sizes": [[0, 28]]}, "invalid sizes"), ({"most": 0}, "invalid most"),
        ({"sizes": [[9000, 9000]]}, "invalid sizes"), ({"longest": 28}, "invalid longest"),
        ({"division": "halve"}, "division: expected"), ({"division": "split"}, "invalid sizes"),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=named):
            from_record(Tiling, to_record(FIT.tiling) | change, "t")


def test_tiles_divide_the_sizes():
    with pytest.raises(CheckpointError, match="invalid tiling"):
        FIT.replace(size=(30, 28))
    with pytest.raises(CheckpointError, match="invalid tiling"):
        SPLIT.replace(size=(30, 28), tiling=Tiling("split", longest=56))


def test_a_square_or_strip_that_would_not_fit_in_memory_is_refused():
    record = Preprocessing((28, 28), "square", "bicubic", HALF, HALF, 0, 1.0)
    with pytest.raises(ImageError, match="20000x1 is too large to pad to a square"):
        preprocess(Image.new("RGB", (20000, 1)), record)
    with pytest.raises(ImageError, match=r"^image: 1000x1 is too long and thin \(512000x512 when resized, limit"):
        preprocess(Image.new("RGB", (1000, 1)), record.replace(resize="shortest", size=(512, 512)))


def test_marks_of_idefics_tiles():
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    for rows, columns in ((0, 0), (1, 2), (3, 2)):
        expected = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
        count = 4 * (rows * columns + 1)
        assert markup("<image>", count, (rows, columns), Tiling("split", longest=28)) == expected
    assert markup("<image>", 3, (1, 1), FIT.tiling) == markup("<image>", 3, (0, 0), None) == "<image>" * 3
