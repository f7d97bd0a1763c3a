"""Drawing shared by figures: fonts that have the letters of a text, and heat maps over images."""

import textwrap
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Float32, UInt8
from PIL import Image
from torch import Tensor

from multimodal.tokens.image.preprocessing import Preprocessing, placement, to_rgb

MISSING = "□"


@lru_cache(maxsize=64)
def _letters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@lru_cache(maxsize=1024)
def _font_of(sign: str) -> str | None:
    """The name of an installed font that has this letter."""
    from matplotlib import font_manager

    first = font_manager.findfont("DejaVu Sans")
    if ord(sign) in _letters(first):
        return "DejaVu Sans"
    others = {
        entry.name: entry.fname
        for entry in font_manager.fontManager.ttflist
        if entry.style == "normal" and "Last Resort" not in entry.name  # which only draws what is missing
    }
    return next((name for name, path in sorted(others.items()) if ord(sign) in _letters(path)), None)


def shown(text: str) -> str:
    """One line, with a box for each letter that no installed font has."""
    return "".join(sign if _font_of(sign) else MISSING for sign in " ".join(text.split()))


def fonts(text: str) -> list[str]:
    """The fonts that have the letters of a text."""
    return list(dict.fromkeys(["DejaVu Sans", *filter(None, map(_font_of, text))]))


STRONGEST = 0.65  # opacity of the hottest place


REDDEST = 0.9  # of the colours, whose end is nearly black


SMALLEST, LARGEST = 320, 1600  # pixels of the longer edge of what is drawn


LETTER = 7  # pixels of width of a letter of the caption, about


LINES = 3  # of the caption


def heat(
    relevances: Float[Tensor, "rows columns"], size: tuple[int, int], drawn: tuple[int, int], record: Preprocessing,
    patch: int,
) -> Float32[np.ndarray, "height width"]:  # fmt: skip
    """0..1 for each pixel of a picture of `size` (width, height) drawn at another, by what speaks for the label in
    the patch there (bilinear between the centres of patches), the highest 1; NaN where the model did not look."""
    seen_w, seen_h, left, top = placement(*size, record)
    rows, columns = relevances.shape
    across = _between(drawn[0], seen_w, left, patch, columns)
    down = _between(drawn[1], seen_h, top, patch, rows)
    positive = relevances.clamp(min=0).double().numpy()
    return (down @ (positive / max(positive.max(), 1e-30)) @ across.T).astype(np.float32)


def _between(drawn: int, seen: int, start: int, patch: int, count: int) -> Float[np.ndarray, "drawn count"]:
    """Shares of `count` patches in each pixel of an edge, which the model saw `seen` pixels long, from `start` on."""
    place = ((np.arange(drawn) + 0.5) * seen / drawn + start) / patch  # in patches
    inside = np.clip(place - 0.5, 0, count - 1)
    shares = np.clip(1 - np.abs(inside[:, None] - np.arange(count)), 0, 1)
    shares[(place < 0) | (place > count)] = np.nan
    return shares


def overlay(
    picture: Image.Image, relevances: Float[Tensor, "rows columns"], record: Preprocessing, patch: int,
    caption: str | None = None,
) -> Image.Image:  # fmt: skip
    """The picture with heat from clear to red where it speaks for the label, dark grey where the model did not look,
    and a caption below. `record`: what the pixels of these relevances were made with."""
    from matplotlib import colormaps

    picture = to_rgb(picture)
    factor = min(LARGEST, max(SMALLEST, *picture.size)) / max(picture.size)
    drawn = tuple(max(1, round(edge * factor)) for edge in picture.size)
    shown = np.asarray(picture.resize(drawn, Image.Resampling.BICUBIC), np.float32)
    hot = heat(relevances, picture.size, drawn, record, patch)
    unseen = np.isnan(hot)[..., None]
    hot = np.nan_to_num(hot)
    opacity = (STRONGEST * np.sqrt(hot))[..., None]  # so that half the heat is seen too
    mixed = shown * (1 - opacity) + 255 * colormaps["turbo"](REDDEST * hot)[..., :3].astype(np.float32) * opacity
    mixed = np.where(unseen, 0.35 * shown.mean(-1, keepdims=True) + 40, mixed)
    pixels = np.clip(mixed + 0.5, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels if caption is None else np.concatenate([pixels, _written(caption, drawn[0])]))


def _written(text: str, width: int) -> UInt8[np.ndarray, "height width 3"]:
    """Lines of text in black on white, in the fonts that have its letters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from multimodal.tasks.figures import fonts, shown

    wide = sum(ord(sign) > 0x2E7F for sign in text) / max(1, len(text))  # share of letters of double width
    fit = max(8, int(width / (LETTER * (1 + wide))) - 1)
    lines = textwrap.wrap(shown(text), fit, max_lines=LINES, placeholder=" …") or [""]
    figure = Figure(figsize=(width / 100, (8 + 16 * len(lines)) / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.text(4 / width, 0.5, "\n".join(lines), va="center", fontsize=8.5, parse_math=False, fontfamily=fonts(text))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
