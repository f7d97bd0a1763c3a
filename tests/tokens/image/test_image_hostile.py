"""Hostile images: programs, lines on stderr, decompression bombs."""

import io
import struct
import zlib
from contextlib import suppress

import pytest
from PIL import Image

from multimodal.errors import ImageError
from multimodal.tokens.image.reading import read_image
from tests.helpers.spread import thin


def test_damaged_tiffs_print_nothing_themselves(capfd):
    """libtiff and Pillow's log would write lines of their own."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "TIFF", compression="tiff_lzw")
    data = file.getvalue()
    lies = data.replace(struct.pack("<HHI", 277, 3, 1), struct.pack("<HHI", 277, 3, 1) + b"\x60\xea", 1)[: len(data)]
    for damaged in (data[:12] + b"\xff" * 40 + data[52:], data[:20] + data[30:], lies):
        with suppress(ImageError):
            read_image(damaged)
    assert capfd.readouterr() == ("", "")


def test_no_image_runs_a_program_or_opens_an_address(tmp_path):
    """EPS would start ghostscript, WMF and others Windows' drawing, SVG names addresses."""
    for name, data in {
        "a.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch pwned) (w) file\n",
        "b.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch pwned) (w) file\n",
        "c.wmf": b"\xd7\xcd\xc6\x9a" + bytes(100),
        "d.jpg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1:9/x"/></svg>',
        "e.png": b"P6\n9 9\n255\n"[:2] + b"%!",
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ImageError, match=name):
            read_image(tmp_path / name)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == list("abcde")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("kind", [b"iCCP", b"zTXt", b"iTXt", b"many"])
def test_a_bomb_in_a_chunk_of_text_or_colour_is_refused_in_little_memory(kind):
    bomb = zlib.compress(bytes(64 << 20), 9)
    data = {b"iCCP": b"x\0\0" + bomb, b"zTXt": b"x\0\0" + bomb, b"iTXt": b"x\0\1\0\0\0" + bomb}
    extra = chunk(kind, data[kind]) if kind in data else b""
    if kind == b"many":
        one = zlib.compress(bytes(1000000), 9)
        extra = b"".join(chunk(b"zTXt", b"%d\0\0" % n + one) for n in range(100))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    rest = chunk(b"IDAT", zlib.compress(bytes(4))) + chunk(b"IEND", b"")
    with pytest.raises(ImageError, match=r"too large|Too much memory"):
        read_image(b"\x89PNG\r\n\x1a\n" + head + extra + rest)


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "PNG", "WEBP"])
def test_of_many_pages_or_frames_only_the_first_is_decoded(kind, monkeypatch):
    frames, file = [Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(0, 250, 5)], io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    monkeypatch.setattr(Image.Image, "seek", lambda *_: pytest.fail("a later frame"))
    assert read_image(file.getvalue()).size == (8, 8)


def test_a_jpeg_of_many_scans_is_refused():
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last, scans = data[data.rindex(b"\xff\xda") : -2], data.count(b"\xff\xda")
    assert read_image(data[:-2] + last * (500 - scans) + data[-2:]).size == (64, 64)
    with pytest.raises(ImageError, match=r"JPEG of 501 scans \(limit 500\)"):
        read_image(data[:-2] + last * (501 - scans) + data[-2:])
