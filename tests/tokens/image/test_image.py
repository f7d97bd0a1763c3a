"""Reading images as viewers show them; pixels and patches equal the references'."""

import functools
import io
import json
import os
import resource
import struct
import threading
import time
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from multimodal.errors import CheckpointError, ImageError, UsageError
from multimodal.system.records import from_record
from multimodal.tokens.image.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OPENAI_MEAN,
    OPENAI_STD,
    Preprocessing,
    native_size,
    preprocess,
)
from multimodal.tokens.image.reading import ImageLimits, find_images, read_image, to_rgb
from tests.helpers.spread import thin

CLIP = Preprocessing((224, 224), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
# EXIF orientation → the transposition a camera applied to the upright image before it stored it.
CAMERA = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}


def scene(height: int, width: int, seed: int = 0) -> Image.Image:
    """A colour gradient with noise: no two turns or crops of it look alike."""
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3))
    rows, columns = np.mgrid[0:height, 0:width]
    ramp = np.stack([rows * 190 // height, columns * 190 // width, (rows + columns) * 190 // (height + width)], -1)
    return Image.fromarray((ramp + noise).astype(np.uint8))


def encode(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(source) -> np.ndarray:
    image = read_image(source)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def chunk(tag: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))


def png(width: int, height: int, depth: int, colour: int, packed: bytes, extra: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def refusal(source, *parts: str, **options) -> None:
    with pytest.raises(ImageError) as caught:
        read_image(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [("PNG", {}, 0), ("TIFF", {}, 0), ("WEBP", {"lossless": True}, 0), ("JPEG", {"quality": 100, "subsampling": 0}, 4)],
)
def test_exif_turns_give_the_upright_image(kind, options, tolerance, orientation):
    upright = scene(32, 48)
    stored = upright.transpose(Image.Transpose(CAMERA[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(stored, kind, exif=exif, **options)
    assert np.abs(pixels(data) - np.asarray(upright)).max() <= tolerance
    again = to_rgb(read_image(data))  # a turned image is not turned a second time
    assert np.array_equal(np.asarray(again), pixels(data))


def test_damaged_exif_leaves_the_image_readable_and_silent():
    data = encode(scene(16, 24), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\0\1")
    assert pixels(data).shape == (16, 24, 3)


def test_cmyk_jpeg_shows_its_colours():
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.abs(pixels(encode(red, "JPEG", quality=95)) - [255, 0, 0]).max() <= 3
    assert np.abs(pixels(encode(red, "TIFF")) - [255, 0, 0]).max() == 0


def test_palette_and_its_transparency():
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    assert pixels(encode(image, "PNG")).tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]
    one_index = encode(image, "PNG", transparency=1)
    assert pixels(one_index).tolist() == [[[255, 0, 0], [255, 255, 255], [0, 0, 255]]]
    assert pixels(encode(image, "GIF", transparency=1)).tolist() == pixels(one_index).tolist()
    by_index = encode(image, "PNG", transparency=b"\xff\x00\x80")  # Pillow warns on this one when it is misread
    assert pixels(by_index).tolist() == [[[255, 0, 0], [255, 255, 255], [127, 127, 255]]]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_hidden_colour_under_alpha_is_not_seen(mode):
    grey = scene(8, 8).convert("L")
    image = Image.merge(mode, [*([grey] * (len(mode) - 1)), Image.new("L", (8, 8), 0)])
    assert (pixels(encode(image, "PNG")) == 255).all()
    image.putalpha(255)
    assert np.array_equal(pixels(encode(image, "PNG"))[..., 0], np.asarray(grey))
    image.putalpha(128)
    blend = np.asarray(grey, float) * 128 / 255 + 127
    assert np.abs(pixels(encode(image, "PNG"))[..., 0] - blend).max() <= 1


def test_grey_and_bilevel():
    grey = scene(8, 8).convert("L")
    assert np.array_equal(pixels(encode(grey, "PNG"))[..., 2], np.asarray(grey))
    assert pixels(encode(Image.new("1", (2, 2), 1), "PNG")).tolist() == [[[255] * 3] * 2] * 2


def test_sixteen_bit_grey_is_scaled_not_clipped():
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    want = np.rint(deep / 257)
    for kind in ("PNG", "TIFF", "PPM"):
        assert np.array_equal(pixels(encode(Image.fromarray(deep), kind))[..., 0], want)
    rows = zlib.compress(b"\0" + np.array([0, 300, 65535], ">u2").tobytes())
    keyed = png(3, 1, 16, 0, rows, chunk(b"tRNS", struct.pack(">H", 300)))
    assert pixels(keyed)[0, :, 0].tolist() == [0, 255, 255]


def test_integer_grey_without_a_file_may_have_the_range_of_eight_bits():
    grey = scene(8, 8).convert("L")
    assert to_rgb(grey.convert("I")).tobytes() == grey.convert("I").convert("RGB").tobytes()
    deep = Image.fromarray(np.array([[0, 255, 65535]], np.int32))
    assert np.asarray(to_rgb(deep))[0, :, 0].tolist() == [0, 1, 255]
    dark = encode(Image.fromarray(np.array([[0, 255]], np.uint16)), "PPM")
    assert np.asarray(to_rgb(Image.open(io.BytesIO(dark))))[0, :, 0].tolist() == [0, 1]  # mode I too


def test_sixteen_bit_colour_and_its_key():
    rows = zlib.compress(b"\0" + np.array([65535, 0, 32896, 1000, 2000, 3000], ">u2").tobytes())
    assert pixels(png(2, 1, 16, 2, rows))[0, 0].tolist() == [255, 0, 128]
    keyed = png(2, 1, 16, 2, rows, chunk(b"tRNS", struct.pack(">HHH", 1000, 2000, 3000)))
    assert pixels(keyed)[0].tolist() == [[255, 0, 128], [255, 255, 255]]


@pytest.mark.parametrize("white", [1, 255, 65535])
def test_float_tiff_is_scaled(white):
    samples = np.array([[0, 0.5, 1]], np.float32) * white
    assert np.abs(pixels(encode(Image.fromarray(samples), "TIFF"))[0, :, 0] - [0, 127.5, 255]).max() <= 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e6])
def test_float_samples_without_a_meaning_are_refused(value):
    samples = np.array([[0, 0.5, value]], np.float32)
    refusal(encode(Image.fromarray(samples), "TIFF"), "finite (1 of 3)" if not np.isfinite(value) else "outside")


def test_integer_samples_beyond_sixteen_bits_are_refused():
    refusal(encode(Image.fromarray(np.array([[0, 70000]], np.int32)), "TIFF"), "outside 0..65535 (0..70000)")


def test_a_tar_is_named(tmp_path):
    (tmp_path / "x.tar").write_bytes(bytes(10240))
    refusal(tmp_path / "x.tar", "x.tar: not a readable image (a tar: unpack it)")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation(kind):
    first, second = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    data = encode(first, kind, save_all=True, append_images=[second])
    assert np.abs(pixels(data) - [255, 0, 0]).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_truncated_file_is_never_half_a_image(kind, tmp_path):
    data = encode(scene(64, 64), kind)
    path = tmp_path / f"cut.{kind.lower()}"
    for part in range(1, 20):
        path.write_bytes(data[: len(data) * part // 20])
        refusal(path, str(path))


def test_the_global_that_hides_truncation_is_refused(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    refusal(encode(scene(64, 64), "JPEG")[:800], "LOAD_TRUNCATED_IMAGES")


def test_what_is_no_image_is_named(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("not an image at all, only words\n" * 9)
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    os.mkfifo(tmp_path / "pipe.png")
    refusal(tmp_path / "empty.png", "empty.png: empty file (0 bytes)")
    refusal(str(tmp_path / "text.jpg"), "text.jpg: not a readable image")
    refusal(tmp_path / "page.eps", "page.eps: not a readable image")
    refusal(tmp_path / "absent.png", "absent.png: no such file")
    refusal(tmp_path, f"{tmp_path}: a folder")
    refusal(tmp_path / "pipe.png", "pipe.png: not a regular file")
    refusal(b"", "0 bytes")
    with pytest.raises(ImageError, match="truncated"):
        preprocess(Image.open(io.BytesIO(encode(scene(64, 64), "JPEG")[:900])), CLIP)


@pytest.mark.ci
def test_a_pixel_bomb_is_refused_on_its_header():
    packer = zlib.compressobj(9)
    zeros = bytes(7501 * 1000)  # 60000 one-bit pixels and a filter byte a row, a thousand rows
    packed = b"".join(packer.compress(zeros) for _ in range(60)) + packer.flush()
    bomb = png(60000, 60000, 1, 0, packed)
    assert len(bomb) < 500_000
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refusal(bomb, "too many pixels (60000x60000, limit 200000000)")
    refusal(b"P6 60000 60000 255\n", "too many pixels (60000x60000")
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_limits_can_be_moved():
    data = encode(scene(20, 10), "PNG")
    refusal(data, "too many pixels (10x20, limit 199)", limits=ImageLimits(max_pixels=199))
    refusal(data, "too long and thin (10x20, aspect limit 1.9)", limits=ImageLimits(max_aspect=1.9))
    refusal(encode(Image.new("L", (10001, 10)), "PNG"), "too long and thin (10001x10, aspect limit 1000)")
    assert read_image(data, ImageLimits(max_pixels=200, max_aspect=2.0)).size == (10, 20)


def test_pillow_globals_and_filters_survive_threads(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # 64x64 would be a bomb error for Pillow itself
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0"  # 5 entries that are missing
    data, plain, errors, added = encode(scene(64, 64), "JPEG", exif=exif), encode(scene(64, 64), "PNG"), [], []
    warnings.simplefilter("error")

    def read():
        try:
            for _ in range(100):
                read_image(data)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        warnings.filterwarnings("ignore", message=f"{len(added)}", append=True)
        added.append(warnings.filters[-1])
        assert Image.MAX_IMAGE_PIXELS == 100
        with pytest.raises(Image.DecompressionBombError):
            Image.open(io.BytesIO(plain))
        with pytest.raises(UserWarning, match="Corrupt EXIF"):
            Image.Exif().load(exif)
        time.sleep(0.001)
    assert not errors
    assert added
    assert all(one in warnings.filters for one in added)
    kept = len(warnings.filters)
    for _ in range(3):  # ours goes in front again, once
        warnings.simplefilter("error")
        read_image(data)
    assert len(warnings.filters) == kept


def test_record_round_trip_is_json():
    record = CLIP.replace(size=(32, 64), resize="longest", crop=0.9)
    assert from_record(Preprocessing, json.loads(json.dumps(record.to_dict())), "p") == record


@pytest.mark.parametrize(("change", "named"), [
    ({"extra": 1}, "unknown key 'extra'"),
    ({"size": [224]}, "size: expected 2 values ([224])"),
    ({"size": [224, 0]}, "invalid size ((224, 0))"),
    ({"size": [224000, 224000]}, "invalid size ((224000, 224000))"),
    ({"size": 224}, "size: expected a list (224)"),
    ({"resize": "crop"}, "resize: expected 'shortest' or 'squash' or 'longest' or 'square' ('crop')"),
    ({"interpolation": "random"}, "interpolation: expected 'bicubic' or 'bilinear'"),
    ({"mean": [0.5, 0.5]}, "mean: expected 3 values"),
    ({"mean": [0.5, 0.5, 1e38]}, "invalid mean"),
    ({"std": [0.5, 0.5, 0.0]}, "invalid std"),
    ({"std": [0.5, 0.5, float("nan")]}, "std[2]: expected a number (nan)"),
    ({"fill": 256}, "invalid fill (256)"),
    ({"crop": 1.5}, "invalid crop (1.5)"),
    ({"crop": 1e-9}, "invalid crop (1e-09)"),
    ({"crop": True}, "crop: expected a number (True)"),
])  # fmt: skip
def test_record_is_strict(change, named):
    with pytest.raises(CheckpointError) as caught:
        from_record(Preprocessing, CLIP.to_dict() | change, "p")
    assert named in str(caught.value)


@pytest.mark.parametrize("key", ["size", "resize", "interpolation", "mean", "std", "fill", "crop"])
def test_record_misses_nothing(key):
    values = CLIP.to_dict()
    del values[key]
    with pytest.raises(CheckpointError, match=rf"^p: missing key '{key}'"):
        from_record(Preprocessing, values, "p")


SHAPES = [(224, 224), (225, 224), (333, 500), (500, 333), (100, 37), (31, 97), (1, 1), (640, 427), (7, 300), (20, 3000)]
scenes = functools.cache(lambda: [(*shape, scene(*shape)) for shape in SHAPES])


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("size", [(224, 224), (32, 32), (63, 63), (96, 160)])
def test_equals_open_clip(mode, size):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    cfg = PreprocessCfg(size=size, resize_mode=mode, fill_color=114, mean=OPENAI_MEAN, std=OPENAI_STD)
    reference = image_transform_v2(cfg, is_train=False)
    record = CLIP.replace(size=size, resize=mode, fill=114)
    for height, width, image in scenes():
        if mode == "longest" and max(height, width) / min(height, width) > 40:
            continue  # an edge rounds to 0 there, which the reference refuses
        assert torch.equal(preprocess(image, record), reference(image)), (height, width)


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("crop", [1.0, 0.95, 0.9, 0.875])
@pytest.mark.parametrize("size", [(224, 224), (33, 33), (96, 160)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_equals_timm(crop, size, interpolation):
    from timm.data import create_transform

    options = {"interpolation": interpolation, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "crop_pct": crop}
    reference = create_transform((3, *size), is_training=False, **options)
    record = Preprocessing(size, "shortest", interpolation, IMAGENET_MEAN, IMAGENET_STD, 0, crop)
    for height, width, image in scenes():
        assert torch.equal(preprocess(image, record), reference(image)), (height, width)


def test_preprocess_takes_any_mode_and_thin_images():
    shown = preprocess(Image.new("RGBA", (9, 9), (255, 0, 0, 0)), CLIP)
    white = (1 - torch.tensor(OPENAI_MEAN)) / torch.tensor(OPENAI_STD)
    assert torch.allclose(shown, white[:, None, None].expand(3, 224, 224), atol=1e-6)
    thin = preprocess(scene(1, 100), CLIP.replace(size=(16, 16), resize="longest", fill=0))
    assert thin.shape == (3, 16, 16)


def test_preprocess_leaves_the_callers_image_alone():
    image = scene(20, 30)
    image.info["comment"] = "kept"
    before = image.tobytes()
    preprocess(image, CLIP)
    assert image.info == {"comment": "kept"}
    assert image.tobytes() == before


def test_native_size_equals_timm_naflex():
    from timm.data.naflex_transforms import get_image_size_for_seq

    generator = np.random.default_rng(1)
    for _ in range(200):
        height, width = (int(v) for v in generator.integers(20, 1500, 2))
        patch, budget = int(generator.choice([8, 14, 16, 32])), int(generator.choice([49, 256, 576, 1024]))
        image = Image.new("1", (width, height))
        ours = native_size(image, patch, budget)
        assert ours == get_image_size_for_seq((height, width), patch, budget)[1], (height, width, patch)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5000), (5000, 1), (480, 640)])
@pytest.mark.parametrize("budget", [1, 2, 7, 256])
def test_native_size_keeps_the_budget(height, width, budget):
    tall, wide = native_size(Image.new("1", (width, height)), (16, 8), budget)
    rows, columns = tall // 16, wide // 8
    assert 1 <= rows * columns <= budget
    assert (rows * 16, columns * 8) == (tall, wide)
    record = CLIP.replace(size=(tall, wide), resize="squash")
    assert preprocess(scene(4, 4), record).shape == (3, tall, wide)


def test_find_images(tmp_path):
    for name in ("b.jpg", "a.PNG", "notes.txt", "sub/c.webp", "sub/._c.webp", ".cache/d.png", "x[1].jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    names = lambda *paths: [str(p.relative_to(tmp_path)) for p in find_images([str(tmp_path / q) for q in paths])]
    assert names(".") == ["a.PNG", "b.jpg", "sub/c.webp", "x[1].jpg"]
    assert names("*.jpg", "b.jpg") == ["b.jpg", "x[1].jpg"]
    assert names("**/*.webp") == ["sub/c.webp"]
    assert names("x[1].jpg") == ["x[1].jpg"]
    assert names("notes.txt", "b.jpg") == ["notes.txt", "b.jpg"]  # a file named by hand is tried, and refused later
    for absent in ("absent.jpg", "*.gif", ".cache/none"):
        with pytest.raises(UsageError, match="no image found"):
            names("b.jpg", absent)
    with pytest.raises(UsageError, match="no image given"):
        find_images([])
    with pytest.raises(UsageError, match="URLs are not read; download the file"):
        find_images(["https://example.org/a.jpg"])
