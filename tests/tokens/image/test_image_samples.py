"""Samples of other depths than 8 bits, which Pillow misreads or leaves as they are."""

import io
import struct
import zlib

import av
import numpy as np
import pytest
from PIL import Image

from multimodal.errors import ImageError
from multimodal.tokens.image.reading import read_image, to_rgb


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(read_image(data)).astype(int)


def tiff(samples: np.ndarray, photometric: int, order: str = "<", bits: int | None = None, **tags: int) -> bytes:
    """An uncompressed TIFF of grey [H W], colours [H W C] or separate planes [C H W] (`planes=2`)."""
    planes = tags.get("planes", 1)
    count = 1 if samples.ndim == 2 else samples.shape[0 if planes == 2 else 2]
    height, width = samples.shape[1:] if planes == 2 else samples.shape[:2]
    data = samples.astype(samples.dtype.newbyteorder(order)).tobytes()
    parts = count if planes == 2 else 1
    strips = [8 + number * len(data) // parts for number in range(parts)]
    kind = {"u": 1, "i": 2, "f": 3}[samples.dtype.kind]
    values = {
        256: [width], 257: [height], 258: [bits or samples.itemsize * 8] * count, 259: [1], 262: [photometric],
        273: strips, 277: [count], 278: [height], 279: [len(data) // parts] * parts, 284: [planes],
        338: [2] * (count in (2, 4)), 339: [kind] * count,
    }  # fmt: skip
    entries, more, place = b"", b"", 8 + len(data) + 2 + 12 * sum(map(bool, values.values())) + 4
    for tag, numbers in values.items():
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if numbers:
            field = packed if len(numbers) == 1 else struct.pack(f"{order}I", place + len(more))
            entries += struct.pack(f"{order}HHI", tag, 4, len(numbers)) + field
            more += packed if len(numbers) > 1 else b""
    mark = b"II" if order == "<" else b"MM"
    head = mark + struct.pack(f"{order}HI", 42, 8 + len(data)) + data
    return head + struct.pack(f"{order}H", len(entries) // 12) + entries + bytes(4) + more


def jpeg2000(samples: np.ndarray, kind: str) -> bytes:
    codec = av.CodecContext.create("jpeg2000", "w")
    codec.height, codec.width, codec.pix_fmt, codec.time_base = *samples.shape[:2], kind, 1
    codec.options = {"pred": "dwt53"}  # lossless
    frame = av.VideoFrame.from_ndarray(samples, format=kind)
    return b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode(None)])


@pytest.mark.parametrize("kind", ["rgb48le", "rgba64le"])
def test_deep_colours_of_jpeg2000_keep_their_white(kind):
    deep = np.random.default_rng(0).integers(0, 65536, (32, 48, 3 if kind == "rgb48le" else 4)).astype(np.uint16)
    deep[:8, :, :3], deep[..., 3:] = np.linspace(65000, 65535, 48)[:, None], 65535
    data = jpeg2000(deep, kind)
    want = np.rint(deep[..., :3] / 257)
    assert np.abs(pixels(data) - want).max() <= 1
    assert np.array_equal(np.asarray(to_rgb(Image.open(io.BytesIO(data)))), pixels(data))
    shallow = jpeg2000(want.astype(np.uint8), "rgb24")
    assert np.array_equal(pixels(shallow), np.asarray(Image.open(io.BytesIO(shallow))))
    with pytest.raises(ImageError, match="cannot be decoded"):
        read_image(data[: len(data) // 2])


@pytest.mark.parametrize(("kind", "order"), [(np.uint16, "<"), (np.float32, "<"), (np.float32, ">")])
def test_grey_whose_least_value_is_white(kind, order):
    values = np.array([[0, 20000, 65535]]).astype(kind)
    assert pixels(tiff(values, 0, order))[0, :, 0].tolist() == [255, 177, 0]
    assert pixels(tiff(values, 1, order))[0, :, 0].tolist() == [0, 78, 255]


def test_twelve_bits_end_at_their_own_white():
    packed = np.frombuffer(bytes.fromhex("000fff8003e8"), np.uint8)  # 0, 4095, 2048, 1000
    data = tiff(packed[None], 1, bits=12).replace(
        struct.pack("<HHII", 256, 4, 1, 6), struct.pack("<HHII", 256, 4, 1, 4)
    )
    assert pixels(data)[0, :, 0].tolist() == [0, 255, 128, 62]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_colours_in_separate_planes(kind, channels, order):
    deep = np.random.default_rng(1).integers(0, np.iinfo(kind).max, (channels, 5, 7)).astype(kind)
    together, apart = tiff(np.moveaxis(deep, 0, 2), 2, order), tiff(deep, 2, order, planes=2)
    assert np.array_equal(pixels(apart), pixels(together))


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_the_transparent_grey_of_shallow_pngs(depth):
    def chunk(tag: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))

    most = 2**depth - 1
    levels = np.arange(8) * most // 7
    bits = "".join(f"{level:0{depth}b}" for level in levels)
    row = b"\0" + int(bits, 2).to_bytes(depth, "big")
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 1, depth, 0, 0, 0, 0))
    for key in range(min(most + 1, 16)):
        data = head + chunk(b"tRNS", struct.pack(">H", key)) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
        assert pixels(data)[0, :, 0].tolist() == [255 if level == key else level * 255 // most for level in levels]


@pytest.mark.parametrize(
    ("samples", "photometric", "named"),
    [
        (np.zeros((2, 2, 3), np.float32), 2, "TIFF of a kind that is not supported (3 x 32-bit float samples, phot"),
        (np.zeros((2, 2)), 1, "(1 x 64-bit float samples, photometric 1)"),
        (np.zeros((2, 2), np.float16), 1, "(1 x 16-bit float samples"),
        (np.zeros((2, 2, 2), np.uint16), 1, "(2 x 16-bit unsigned samples"),
        (np.array([[0, 2**31 + 1]], np.uint32), 1, "grey samples outside 0..65535 (0..2.14748e+09)"),
        (np.array([[0, -2]], np.int32), 1, "grey samples outside 0..65535 (-2..0)"),
    ],
)
def test_samples_that_are_not_read_are_named(samples, photometric, named):
    with pytest.raises(ImageError) as caught:
        read_image(tiff(samples, photometric))
    assert named in str(caught.value)


def test_a_damaged_tiff_is_not_called_unsupported():
    data = bytearray(tiff(np.zeros((2, 2), np.uint8), 1))
    data[4:8] = struct.pack("<I", len(data) - 1)
    with pytest.raises(ImageError, match="not a readable image"):
        read_image(bytes(data))


def test_a_data_url_is_named_in_short():
    with pytest.raises(
        ImageError, match=r"^data:image/png;base64,AAAA.*…A+: data URLs are not read \(pass the bytes\)$"
    ) as e:
        read_image("data:image/png;base64," + "A" * 9999)
    assert len(str(e.value)) < 400
