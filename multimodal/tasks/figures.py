"""Shared drawing: figures with fonts for any script, PNG files, and heat maps over images."""

import io
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, UInt8
from PIL import Image
from torch import Tensor

from multimodal.system.outputs import write_output
from multimodal.tokens.image.preprocessing import Preprocessing, placement
from multimodal.tokens.image.reading import to_rgb

MISSING = "□"
STRONGEST = 0.65  # opacity of the hottest pixel
REDDEST = 0.9  # end of the colour map: beyond, it is nearly black
SMALLEST, LARGEST = 320, 1600  # pixels of the longer edge
LETTER = 7  # width of a caption's character in pixels, about
LINES = 3  # of a caption


@lru_cache(maxsize=64)
def _letters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@lru_cache(maxsize=1024)
def _font_of(sign: str) -> str | None:
    """Name of an installed font with this character."""
    from matplotlib import font_manager

    first = font_manager.findfont("DejaVu Sans")
    if ord(sign) in _letters(first):
        return "DejaVu Sans"
    others = {
        entry.name: entry.fname
        for entry in font_manager.fontManager.ttflist
        if entry.style == "normal" and "Last Resort" not in entry.name  # it draws placeholders
    }
    return next((name for name, path in sorted(others.items()) if ord(sign) in _letters(path)), None)


def shown(text: str) -> str:
    """One line, with a box for each character that no installed font has."""
    return "".join(sign if _font_of(sign) else MISSING for sign in " ".join(text.split()))


def fonts(text: str) -> list[str]:
    """Fonts that cover a text."""
    return list(dict.fromkeys(["DejaVu Sans", *filter(None, map(_font_of, text))]))


def written(text: str, most: int | None = None) -> dict[str, Any]:
    """Arguments of a matplotlib text of one line: at most `most` characters, in fonts that have them, without maths."""
    text = shown(text)
    text = text if most is None or len(text) <= most else text[: most - 1] + "…"
    return {"s": text, "parse_math": False, "fontfamily": fonts(text)}


def new_figure(size: tuple[int | float, int | float], title: str = "", dpi: int = 110) -> Any:
    """A matplotlib figure of a size in inches, with a title as wide as fits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    if title:
        options = written(title, int(size[0] * 12))
        figure.suptitle(options.pop("s"), x=0.01, ha="left", fontsize=10, **options)
    return figure


def png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def save_figure(figure: Any, path: Path, caption: str) -> None:
    """Write `path`.png and `path`.svg with a caption below that tells what to see."""
    from matplotlib import rc_context

    size = figure.get_size_inches()[0]
    figure.supxlabel("\n".join(textwrap.wrap(caption, int(size * 14))), x=0.01, ha="left", fontsize=9)
    small = io.BytesIO()
    Image.open(io.BytesIO(png(figure))).convert("RGB").quantize(128).save(small, "PNG", optimize=True)
    write_output(path.with_suffix(".png"), small.getvalue())
    drawing = io.BytesIO()
    with rc_context({"svg.hashsalt": path.name}):  # the same file each time
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    write_output(path.with_suffix(".svg"), drawing.getvalue())


def contact_sheet(tiles: Sequence[Image.Image], across: int) -> bytes:
    """A PNG of images on white, in even rows of at most `across`."""
    width, height = max(tile.width for tile in tiles) + 4, max(tile.height for tile in tiles) + 4
    across = -(-len(tiles) // -(-len(tiles) // across))
    sheet = Image.new("RGB", (across * width, -(-len(tiles) // across) * height), "white")
    for number, tile in enumerate(tiles):
        sheet.paste(tile, (number % across * width, number // across * height))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def heat(
    relevances: Float[Tensor, "rows columns"], size: tuple[int, int], drawn: tuple[int, int], record: Preprocessing,
    patch: int,
) -> Float32[np.ndarray, "height width"]:  # fmt: skip
    """Heat in 0..1 for each drawn pixel of an image of `size` (width, height): positive relevance, bilinear between
    patch centres, scaled to a maximum of 1; NaN outside the model's crop."""
    seen_w, seen_h, left, top = placement(*size, record)
    rows, columns = relevances.shape
    across = _between(drawn[0], seen_w, left, patch, columns)
    down = _between(drawn[1], seen_h, top, patch, rows)
    positive = relevances.clamp(min=0).double().numpy()
    return (down @ (positive / max(positive.max(), 1e-30)) @ across.T).astype(np.float32)


def _between(drawn: int, seen: int, start: int, patch: int, count: int) -> Float[np.ndarray, "drawn count"]:
    """Weights of `count` patches for each pixel of an edge that the model saw `seen` pixels long, from `start`."""
    place = ((np.arange(drawn) + 0.5) * seen / drawn + start) / patch  # in patches
    inside = np.clip(place - 0.5, 0, count - 1)
    shares = np.clip(1 - np.abs(inside[:, None] - np.arange(count)), 0, 1)
    shares[(place < 0) | (place > count)] = np.nan
    return shares


def overlay(
    image: Image.Image, relevances: Float[Tensor, "rows columns"], record: Preprocessing, patch: int,
    caption: str | None = None,
) -> Image.Image:  # fmt: skip
    """The image under heat from clear to red, dark grey outside the model's crop, with a caption below. `record`:
    preprocessing of the pixels that the relevances belong to."""
    from matplotlib import colormaps

    image = to_rgb(image)
    factor = min(LARGEST, max(SMALLEST, *image.size)) / max(image.size)
    drawn = tuple(max(1, round(edge * factor)) for edge in image.size)
    shown = np.asarray(image.resize(drawn, Image.Resampling.BICUBIC), np.float32)
    hot = heat(relevances, image.size, drawn, record, patch)
    unseen = np.isnan(hot)[..., None]
    hot = np.nan_to_num(hot)
    opacity = (STRONGEST * np.sqrt(hot))[..., None]  # keeps half the heat visible
    mixed = shown * (1 - opacity) + 255 * colormaps["turbo"](REDDEST * hot)[..., :3].astype(np.float32) * opacity
    mixed = np.where(unseen, 0.35 * shown.mean(-1, keepdims=True) + 40, mixed)
    pixels = np.clip(mixed + 0.5, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels if caption is None else np.concatenate([pixels, _caption_pixels(caption, drawn[0])]))


def _caption_pixels(text: str, width: int) -> UInt8[np.ndarray, "height width 3"]:
    """Lines of text in black on white."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = sum(ord(sign) > 0x2E7F for sign in text) / max(1, len(text))  # share of letters of double width
    fit = max(8, int(width / (LETTER * (1 + wide))) - 1)
    lines = textwrap.wrap(shown(text), fit, max_lines=LINES, placeholder=" …") or [""]
    figure = Figure(figsize=(width / 100, (8 + 16 * len(lines)) / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.text(4 / width, 0.5, "\n".join(lines), va="center", fontsize=8.5, parse_math=False, fontfamily=fonts(text))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
