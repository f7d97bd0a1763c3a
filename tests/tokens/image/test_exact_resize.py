"""Resizing in one compiled pass: to the bit as Pillow and NumPy, and only where it pays."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from multimodal.data.datasets.images import square
from multimodal.system.compiled import COMPILERS
from multimodal.tokens.image import exact_resize
from multimodal.tokens.image.exact_resize import Cut, level_table
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing, preprocess

CLIP = Preprocessing((32, 32), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 7, 1.0)
PIXELS = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)


def image(width: int, height: int) -> Image.Image:
    """Noise; for odd widths of the two extreme levels alone, whose sums leave 0 to 255."""
    pixels = PIXELS[:height, :width]
    return Image.fromarray(np.where(pixels < 128, 0, 255).astype(np.uint8) if width % 2 else pixels)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Path:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler")
    return request.config.cache.mkdir("compiled-resize")


@pytest.fixture
def fresh(built: Path, monkeypatch: pytest.MonkeyPatch) -> exact_resize._Compiled:
    """No image has been resized yet; the pass has been compiled."""
    monkeypatch.setenv("MULTIMODAL_CACHE", str(built))
    monkeypatch.delenv("MULTIMODAL_NATIVE", raising=False)
    exact_resize._loaded(build=True)
    made = exact_resize._Compiled()
    monkeypatch.setattr(exact_resize, "compiled", made)
    return made


def by_pillow(rgb: Image.Image, record: Preprocessing, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(exact_resize, "can_do", lambda *_: False)
        return preprocess(rgb, record)


@pytest.mark.ci
def test_pixels_have_pillows_bits(fresh: exact_resize._Compiled, monkeypatch: pytest.MonkeyPatch):
    draw, passes = random.Random(1), 0
    resize = fresh.get()
    assert resize is not None
    monkeypatch.setattr(fresh, "get", lambda: counted)

    def counted(*given: object) -> None:
        nonlocal passes
        passes += 1
        resize(*given)

    for _ in range(150):
        record = CLIP.replace(
            size=(draw.choice([1, 7, 32, 64, 96]), draw.choice([1, 32, 50, 64])),
            resize=draw.choice(["shortest", "squash", "longest", "square"]), crop=draw.choice([1.0, 0.875]),
            interpolation=draw.choice(["bicubic", "bilinear", "lanczos"]), offset=draw.choice(["round", "floor"]),
        )  # fmt: skip
        if draw.random() < 0.6:
            record = record.replace(size=record.size[:1] * 2)
        rgb = image(draw.randint(1, 400), draw.randint(1, 400))
        assert torch.equal(preprocess(rgb, record), by_pillow(rgb, record, monkeypatch)), (rgb.size, record)
    assert passes > 50


@pytest.mark.parametrize("size", [(90, 200), (90, 130), (64, 200), (200, 64), (20, 400), (32, 32)])
def test_pixels_in_both_orders_of_the_axes(fresh: exact_resize._Compiled, monkeypatch, size: tuple[int, int]):
    squash = CLIP.replace(size=(64, 64), resize="squash")
    out = np.empty((3, 64, 64), np.float32)
    made = preprocess(image(*size), squash, out)
    assert np.shares_memory(made.numpy(), out)
    scattered = np.empty((64, 64, 3), np.float32).transpose(2, 0, 1)
    assert torch.equal(preprocess(image(*size), squash, scattered), made)
    assert torch.equal(made, by_pillow(image(*size), squash, monkeypatch))


@pytest.mark.parametrize("size", [(90, 200), (91, 130), (64, 200), (200, 64), (31, 400), (400, 395), (33, 33)])
def test_squares_for_training_have_pillows_bits(fresh: exact_resize._Compiled, size: tuple[int, int]):
    for side in (16, 64, 75):
        right = ImageOps.fit(image(*size), (side, side), Image.Resampling.BICUBIC)
        assert (square(image(*size), side).numpy() == np.asarray(right).transpose(2, 0, 1)).all()
    assert fresh.resize is not None


def test_pillow_serves_the_first_images_of_a_machine(built: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(exact_resize, "load_compiled", lambda *given: asked.append(given[-1]))
    made = exact_resize._Compiled()
    assert all(made.get() is None for _ in range(3 * exact_resize.PATIENCE))
    assert asked == [False, True]  # looked for at once, compiled later, not tried again


def test_arrays_that_the_pass_would_overrun_are_refused(fresh: exact_resize._Compiled):
    rgb, cut, table = np.asarray(image(90, 90)), Cut((32, 32), (0, 0, 32, 32)), level_table(OPENAI_MEAN, OPENAI_STD)
    for out in (np.empty((3, 32, 31), np.float32), np.empty((3, 32, 64), np.float32)[..., ::2]):
        with pytest.raises(ValueError, match=r"expected contiguous float32 of shape \(3, 32, 32\)"):
            fresh.get()(rgb, cut, "bicubic", table, out)


def test_another_release_of_pillow_is_noticed(fresh: exact_resize._Compiled, monkeypatch: pytest.MonkeyPatch):
    assert exact_resize._loaded(build=False) is not None
    resize = Image.Image.resize
    other = lambda self, size, kind: resize(resize(self, (size[0], self.height), kind), size, kind)
    monkeypatch.setattr(Image.Image, "resize", other)  # always columns first
    assert exact_resize._loaded(build=False) is None


def test_without_the_library_pillow_resizes(fresh: exact_resize._Compiled, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MULTIMODAL_NATIVE", "0")
    assert preprocess(image(90, 50), CLIP).shape == (3, 32, 32)
    assert fresh.resize is None
