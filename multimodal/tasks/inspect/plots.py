"""Figures of attention maps, filters, similarities and distances."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.tasks.figures import fonts, new_figure, overlay, png, shown, written
from multimodal.tasks.inspect.answer_places import Seen
from multimodal.tasks.inspect.maps import Axis
from multimodal.tasks.inspect.numbers import HeadSelection
from multimodal.tokens.image.preprocessing import Preprocessing

DPI = 120
LETTERS = 14  # of a token
NAMED = 48  # most tokens that are all labelled
COLOURS = "viridis"


def plot_maps(maps: HeadSelection, queries: Axis, keys: Axis, title: str) -> bytes:
    """A matrix of queries × keys for each layer and head; several layers are rows. Colours follow the square root of
    the weight, which keeps small ones visible."""
    from matplotlib.colors import PowerNorm

    layers, heads = maps.weights.shape[:2]
    sheet = layers > 1
    down, across = (layers, heads) if sheet else _grid(heads)
    count, wide = maps.weights.shape[-2:]
    named = not sheet and keys.unit == "token" and max(count, wide) <= NAMED
    side = 1.1 if sheet else max(2.6, 0.17 * wide + 0.9) if named else 3.2
    tall = side * min(2.0, max(0.4, count / wide)) if keys.unit == "token" and not sheet else side
    figure, axes = _figure(down, across, side, tall, title)
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(maps.weights.max()), 1e-9))
    for number, one in enumerate(axes.flat):
        layer, head = divmod(number, heads)
        if layer >= layers:
            one.set_visible(False)
            continue
        extent = (_edge(keys, 0), _edge(keys, wide), _edge(queries, count), _edge(queries, 0))
        image = one.imshow(maps.weights[layer, head].numpy(), cmap=COLOURS, norm=norm, aspect="auto", extent=extent,
                           interpolation="nearest")  # fmt: skip
        _label_panel(one, maps, number, sheet)
        if sheet:
            one.set(xticks=[], yticks=[])
            continue
        _ticks(one, "x", keys, wide, named)
        _ticks(one, "y", queries, count, named)
    if not sheet:
        _outer_labels(axes, heads, across, _what(keys, "attended to"), _what(queries, "attends"))
    figure.colorbar(image, ax=axes, label="attention", shrink=min(1.0, 4 / (down * tall)), pad=0.01)
    return png(figure)


def plot_images(
    tiles: Sequence[tuple[str, Float[Tensor, "rows columns"]]], image: Image.Image, record: Preprocessing, patch: int,
    across: int, title: str, first: str | None = "image",
) -> bytes:  # fmt: skip
    """The image under each map, `across` in a row. `first`: title of the plain image."""
    blank = tiles[0][1] * 0
    drawn = ([(first, blank)] if first else []) + list(tiles)
    across = min(across, len(drawn))
    down = -(-len(drawn) // across)
    small = image.copy()
    side = 1.9 if len(drawn) <= 40 else 1.2
    small.thumbnail((round(side * DPI), round(side * DPI)), Image.Resampling.BICUBIC)
    tall = side * small.height / small.width
    figure, axes = _figure(down, across, side, tall + 0.25, title)
    for number, one in enumerate(axes.flat):
        one.set_axis_off()
        if number < len(drawn):
            name, values = drawn[number]
            one.imshow(np.asarray(overlay(small, values, record, patch)))
            _title(one, name, 8 if side > 1.5 else 6)
    return png(figure)


def plot_image_maps(
    seen: Sequence[tuple[str, Image.Image, Float[Tensor, "rows columns"]]], record: Preprocessing, patch: int,
    title: str,
) -> bytes:  # fmt: skip
    """Each image under its map, in the order of the images."""
    across = min(6, len(seen))
    figure, axes = _figure(-(-len(seen) // across), across, 1.9, 2.0, title)
    for one in axes.flat:
        one.set_axis_off()
    for one, (name, image, values) in zip(axes.flat, seen, strict=False):
        one.imshow(np.asarray(overlay(image, values, record, patch)))
        _title(one, name, 7)
    return png(figure)


def plot_answer(seen: Sequence[Seen], tokens: Axis, title: str) -> bytes:
    """A panel for each medium: the mean of the answer's tokens over an image, each token over sound and text."""
    images = [one for one in seen if one.keys.grid is not None]
    strips = [one for one in seen if one.keys.grid is None and one.weights.shape[1]]
    across = min(4, max(1, len(images)))
    down = -(-len(images) // across)
    tall = max(1.4, 0.16 * len(tokens.names) + 0.7)
    size = max(7.0, 2.6 * across), min(60.0, 2.6 * down + tall * len(strips) + 0.6)
    figure = new_figure(size, title, DPI)
    grid = figure.add_gridspec(down + len(strips), across, height_ratios=[2.6] * down + [tall] * len(strips))
    for number, one in enumerate(images):
        axes = figure.add_subplot(grid[number // across, number % across])
        axes.set_axis_off()
        small = one.image.copy()
        small.thumbnail((480, 480), Image.Resampling.BICUBIC)
        heat = one.maps.mean(0).unflatten(0, one.keys.grid)
        axes.imshow(np.asarray(overlay(small, heat, one.record, one.patch)))
        _title(axes, f"{Path(one.name).name} ({float(one.share.mean()):.1%})", 8)
    for number, one in enumerate(strips):
        axes = figure.add_subplot(grid[down + number, :])
        count, wide = one.weights.shape
        across_ = (one.start, one.start + wide * one.keys.step) if one.keys.unit == "second" else (-0.5, wide - 0.5)
        image = axes.imshow(one.maps.numpy(), cmap=COLOURS, aspect="auto", interpolation="nearest",
                            extent=(*across_, count - 0.5, -0.5))  # fmt: skip
        _title(axes, f"{Path(one.name).name} ({float(one.share.mean()):.1%})", 8)
        _ticks(axes, "x", one.keys, wide, wide <= NAMED)
        _ticks(axes, "y", tokens, count, count <= NAMED)
        axes.set_xlabel(_what(one.keys, "attended to"), fontsize=8)
        figure.colorbar(image, ax=axes, pad=0.01)
    return png(figure)


def plot_filters(components: Float[Tensor, "N height width C"], shares: Float[Tensor, "N"], title: str) -> bytes:
    """Filters, each in its own scale; zero is grey."""
    figure, axes = _figure(*_grid(len(components), 7), 1.1, 1.3, title)
    for number, one in enumerate(axes.flat):
        one.set_axis_off()
        if number < len(components):
            values = components[number].numpy()
            values = values if values.shape[-1] == 3 else values[..., :1].repeat(3, -1)
            one.imshow(values / (2 * np.abs(values).max()) + 0.5, interpolation="nearest")
            _title(one, f"{100 * float(shares[number]):.1f} %", 7)
    return png(figure)


def plot_similarity(values: Float[Tensor, "T T"], axis: Axis, title: str) -> bytes:
    """One map per patch at its position, or one matrix for a sequence."""
    if axis.grid is None:
        figure, axes = _figure(1, 1, 4.6, 4.6, title)
        one, count = axes.flat[0], len(values)
        edge = count * axis.step
        image = one.imshow(values.numpy(), cmap=COLOURS, extent=(0, edge, edge, 0), interpolation="nearest")
        what = "position (s)" if axis.unit == "second" else "position (tokens)"
        one.set(xlabel=what, ylabel=what)
    else:
        rows, columns = axis.grid
        figure, axes = _figure(rows, columns, min(0.75, 9 / columns), min(0.75, 9 / rows), title)
        for one, row in zip(axes.flat, values.numpy(), strict=True):
            image = one.imshow(row.reshape(rows, columns), cmap=COLOURS, vmin=float(values.min()), vmax=1)
            one.set(xticks=[], yticks=[])
        figure.supxlabel("column of the patch", fontsize=9)
        figure.supylabel("row of the patch", fontsize=9)
    figure.colorbar(image, ax=axes, label="cosine similarity", shrink=0.7, pad=0.02)
    return png(figure)


def plot_distances(distances: Float[Tensor, "L H"], unit: str, title: str) -> bytes:
    """One point per head, and the mean of each layer."""
    figure, axes = _figure(1, 1, max(4.4, 0.42 * len(distances) + 1), 3.4, title)
    one, layers = axes.flat[0], range(len(distances))
    for head in range(distances.shape[1]):
        one.scatter(layers, distances[:, head].numpy(), s=22, color="tab:blue", alpha=0.6, lw=0,
                    label="head" if head == 0 else None)  # fmt: skip
    one.plot(layers, distances.mean(1).numpy(), color="tab:orange", lw=1.5, marker="_", ms=12, label="layer mean")
    one.set(xlabel="layer", ylabel=f"mean attention distance ({unit})", ylim=(0, 1.08 * float(distances.max())))
    one.xaxis.get_major_locator().set_params(integer=True)
    one.legend(fontsize=8, frameon=False)
    one.spines[["top", "right"]].set_visible(False)
    return png(figure)


def plot_heads(scores: Float[Tensor, "L H"], label: str, title: str) -> bytes:
    """One cell per head, with its value if there is room."""
    layers, heads = scores.shape
    cell = 0.55 if max(layers, heads) <= 16 else 0.25
    figure, axes = _figure(1, 1, max(3.2, cell * heads), max(2.2, cell * layers), title)
    one = axes.flat[0]
    top = max(0.1, float(scores.max()))
    image = one.imshow(scores.numpy(), cmap=COLOURS, vmin=0, vmax=top, aspect="auto")
    one.set(xlabel="head", ylabel="layer")
    for axis in (one.xaxis, one.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if cell > 0.3:
        for layer in range(layers):
            for head in range(heads):
                value = float(scores[layer, head])
                one.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=7,
                         color="black" if value > 0.6 * top else "white")  # fmt: skip
    figure.colorbar(image, ax=axes, label=label, pad=0.02)
    return png(figure)


def _grid(count: int, most: int = 4) -> tuple[int, int]:
    """Rows and columns of panels."""
    across = min(most, count) if count != 4 or most != 4 else 2
    return -(-count // across), across


def _figure(down: int, across: int, width: int | float, height: int | float, title: str) -> tuple[Any, Any]:
    """Figure and panels. `width`, `height`: of a panel, in inches."""
    size = min(60.0, max(5.4, across * width + 1.4)), min(60.0, down * height + 0.9)
    figure = new_figure(size, title, DPI)
    return figure, figure.subplots(down, across, squeeze=False)


def _title(axes: Any, text: str, size: int | float) -> None:
    options = written(text)
    axes.set_title(options.pop("s"), fontsize=size, pad=2, **options)


def _label_panel(axes: Any, maps: HeadSelection, number: int, sheet: bool) -> None:
    layer, head = divmod(number, len(maps.heads))
    if not sheet:
        _title(axes, maps.label or f"layer {maps.layers[layer]}, head {maps.heads[head]}", 9)
        return
    if layer == 0:
        _title(axes, f"head {maps.heads[head]}", 8)
    if head == 0:
        axes.set_ylabel(f"layer {maps.layers[layer]}", fontsize=8)


def _edge(axis: Axis, place: int) -> float:
    """Start of a position on its axis: tokens are centred on whole numbers, audio is in seconds."""
    return place * axis.step if axis.unit == "second" else place - 0.5


def _ticks(axes: Any, which: str, axis: Axis, count: int, named: bool) -> None:
    if axis.unit != "token":
        axes.tick_params(axis=which, labelsize=7)
        return
    step = 1 if named else -(-count // 24)
    places = list(range(0, count, step))
    texts = [shown(axis.names[place]) for place in places] if axis.names else [str(place) for place in places]
    texts = [text if len(text) <= LETTERS else text[: LETTERS - 1] + "…" for text in texts]
    set_ = axes.set_xticks if which == "x" else axes.set_yticks
    set_(places, texts, fontsize=7 if named else 5.5, parse_math=False, **({"rotation": 90} if which == "x" else {}))
    for label in (axes.xaxis if which == "x" else axes.yaxis).get_ticklabels():
        label.set_fontfamily(fonts(label.get_text()))


def _what(axis: Axis, role: str) -> str:
    return f"{role} ({'s' if axis.unit == 'second' else axis.unit})"


def _outer_labels(axes: Any, panels: int, across: int, below: str, left: str) -> None:
    """Label the outer panels only."""
    for number, one in enumerate(axes.flat):
        if number < panels:
            if number + across >= panels:
                one.set_xlabel(below, fontsize=8)
            if number % across == 0:
                one.set_ylabel(left, fontsize=8)
