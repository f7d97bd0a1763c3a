"""Damaged image files."""

import re
from pathlib import Path

from PIL import Image

from tests.helpers.folders import write_image

from .rows import Row, prints

CLASSIFY = "--labels a,b -m {clip} --format csv"


def tiff(compression: str) -> None:
    """A TIFF whose compressed data is noise in the middle; libtiff prints lines of its own on that."""
    Image.effect_noise((60, 60), 90).convert("RGB").save("bad.tif", compression=compression)
    data = bytearray(Path("bad.tif").read_bytes())
    data[300:400] = b"\xff\xd8" * 50
    Path("bad.tif").write_bytes(data)


ROWS = [
    *(
        Row(f"TIFF of damaged {compression}", f"classify bad.tif red.png {CLASSIFY}", lambda c=compression: tiff(c),
            [re.compile(r"error: bad\.tif: cannot be decoded")], prints("red.png,"))
        for compression in ("tiff_adobe_deflate", "tiff_lzw")
    ),
    Row("no image", f"classify bad.png red.png {CLASSIFY}", lambda: write_image(Path("bad.png")).write_bytes(b"no"),
        [re.compile(r"error: bad\.png: not a readable image")], prints("red.png,")),
]  # fmt: skip
