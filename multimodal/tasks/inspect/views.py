"""Views of `multimodal inspect`: a JSON record, lines for a terminal, and a figure."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import Whisper
from multimodal.tasks.inspect import numbers as numbers
from multimodal.tasks.inspect import plots as plots
from multimodal.tasks.inspect.alignment import AlignmentRequest, alignment
from multimodal.tasks.inspect.induction import induction, usable_ids
from multimodal.tasks.inspect.maps import (
    AttentionMap,
    Axis,
    attention,
    image_tower,
    is_audio_model,
    is_image_model,
    tower_of,
)
from multimodal.tasks.inspect.numbers import HeadSelection, chosen
from multimodal.tasks.inspect.options import ViewOptions
from multimodal.tokens.image.reading import read_image, to_rgb
from multimodal.weights.folder import Checkpoint

STRONGEST = 3  # keys listed for a token
UNITS = {"token": "tokens", "patch": "pixels", "second": "s"}


class View(NamedTuple):
    record: dict[str, Any]
    lines: list[str]
    draw: Callable[[], bytes]


def view(checkpoint: Checkpoint, what: str, request: AlignmentRequest | None, options: ViewOptions) -> View:
    """Compute a view. Raises UsageError for an unsupported model or missing input, and as `attention`, `alignment`."""
    if what in _WEIGHTS:
        return _WEIGHTS[what](checkpoint, options)
    if request is None:
        raise UsageError(f"{what}: expected an INPUT (a text, or an image or audio file)", argument="what")
    return _INPUTS[what](checkpoint, request, options)


def _titled(checkpoint: Checkpoint, what: str, request: AlignmentRequest | None = None) -> str:
    """Title of a figure, with the base name of a file."""
    model = Path(checkpoint.source).name or "model"
    if request is None:
        return f"{model}: {what}"
    files = is_image_model(checkpoint.model) or is_audio_model(checkpoint.model)
    return f"{model}: {what} {Path(request.input).name if files else request.input}"


def rounded(values: Tensor) -> Any:
    """Nested lists of five digits."""
    return [rounded(row) for row in values] if values.ndim else float(f"{float(values):.5g}")


def _sides(seen: AttentionMap) -> dict[str, Any]:
    facts = {}
    for side, axis in (("queries", seen.queries), ("keys", seen.keys)):
        own = {"unit": axis.unit, "tokens": list(axis.names) or None, "grid": axis.grid, "step": axis.step}
        own["before_patches"] = axis.prefix or None
        facts[side] = {key: value for key, value in own.items() if value is not None}
    return facts


def _attention(checkpoint: Checkpoint, request: AlignmentRequest, options: ViewOptions) -> View:
    seen = attention(checkpoint, request.input)
    maps = chosen(seen.weights, options.layer, options.head)
    title = _titled(checkpoint, "self-attention over", request)
    record = {"what": "attention", "layers": maps.layers, "heads": maps.heads, **_sides(seen)}
    lines = _summary(seen, maps)
    if seen.keys.grid is None:
        record["weights"] = rounded(maps.weights)
        lines += _strongest(seen, maps)
        return View(record, lines, lambda: plots.plot_maps(maps, seen.queries, seen.keys, title))
    tower = tower_of(checkpoint.model)
    over = numbers.over_image(maps.weights, seen.keys, tower.config.class_token)
    record |= {"of": "class token" if tower.config.class_token else "mean of patches", "maps": rounded(over)}
    title = f"{title} ({record['of']}, each map in its own scale)"
    tiles = [(_panel(maps, i, j), over[i, j]) for i in range(len(maps.layers)) for j in range(len(maps.heads))]
    across = len(maps.heads) if len(maps.layers) > 1 else min(5, len(maps.heads) + 1)
    alone = None if len(maps.layers) > 1 else "image"
    return View(record, lines, lambda: _overlay(checkpoint, request, tiles, across, title, alone))


def _panel(maps: HeadSelection, layer: int, head: int) -> str:
    return f"layer {maps.layers[layer]}, head {maps.heads[head]}"


def _overlay(
    checkpoint: Checkpoint, request: AlignmentRequest, tiles: Sequence[tuple[str, Tensor]], across: int, title: str,
    alone: str | None = "image",
) -> bytes:  # fmt: skip
    image, record = to_rgb(read_image(Path(request.input))), checkpoint.preprocessing
    patch = tower_of(checkpoint.model).config.patch
    return plots.plot_images(tiles, image, record, patch, across, title, alone)


def _summary(seen: AttentionMap, maps: HeadSelection) -> list[str]:
    """One line per head; for texts and audio with the attention to the same, the previous and the first position."""
    distance, spread, all_ = numbers.mean_distances(seen), numbers.entropies(seen.weights), seen.weights
    where, ordered = UNITS[seen.keys.unit], seen.keys.grid is None
    before = all_.diagonal(-1, -2, -1).sum(-1) / max(1, all_.shape[-1] - 1)
    places = [all_.diagonal(0, -2, -1).mean(-1), before, all_[..., 0].mean(-1)] if ordered else []
    lines = [f"layer  head  entropy  distance ({where})" + "  itself  before   first" * ordered]
    for layer in maps.layers:
        for head in maps.heads:
            shares = "".join(f"  {float(share[layer, head]):6.3f}" for share in places)
            far = f"{float(distance[layer, head]):{11 + len(where)}.2f}"
            lines.append(f"{layer:5}  {head:4}  {float(spread[layer, head]):7.2f}  {far}{shares}")
    return lines


def _strongest(seen: AttentionMap, maps: HeadSelection) -> list[str]:
    """Strongest keys of each query of a single head."""
    if maps.weights.shape[:2] != (1, 1):
        return []
    keys = seen.keys.names or [f"{place * seen.keys.step:.2f}" for place in range(maps.weights.shape[-1])]
    queries = seen.queries.names or [f"{place * seen.queries.step:.2f}" for place in range(maps.weights.shape[-2])]
    width, lines = min(20, max(map(len, queries))), []
    for name, row in zip(queries, maps.weights[0, 0], strict=True):
        best = row.topk(min(STRONGEST, len(row)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        found = ", ".join(f"{keys[i]} {value:.3f}" for value, i in pairs if value >= 0.0005)
        lines.append(f"{name:>{width}}  {found}")
    return lines


def _distance(checkpoint: Checkpoint, request: AlignmentRequest, options: ViewOptions) -> View:
    seen = attention(checkpoint, request.input)
    found, unit = numbers.mean_distances(seen), UNITS[seen.keys.unit]
    record = {"what": "distance", "unit": unit, "distances": rounded(found)}
    lines = [f"mean attention distance ({unit}): rows are layers, columns are heads"]
    lines += [f"{layer:3}  " + " ".join(f"{float(value):8.2f}" for value in row) for layer, row in enumerate(found)]
    title = _titled(checkpoint, "attention distance over", request)
    return View(record, lines, lambda: plots.plot_distances(found, unit, title))


def _alignment(checkpoint: Checkpoint, request: AlignmentRequest, options: ViewOptions) -> View:
    seen = alignment(checkpoint, request)
    maps = _mean(checkpoint, seen) if options.layer is None and options.head is None else None
    maps = chosen(seen.weights, options.layer, options.head) if maps is None else maps
    record = {"what": "alignment", "layers": maps.layers, "heads": maps.heads, **_sides(seen)}
    title = _titled(checkpoint, "alignment with", request)
    if seen.keys.grid is None:
        record["weights"] = rounded(maps.weights)
        lines = _strongest(seen, maps) or _heads_alone(maps)
        return View(record, lines, lambda: plots.plot_maps(maps, seen.queries, seen.keys, title))
    over = maps.weights.mean((0, 1)).unflatten(-1, seen.keys.grid)  # T rows columns
    record["maps"] = rounded(over)
    rows, columns = seen.keys.grid
    lines = []
    for name, one in zip(seen.queries.names, over, strict=True):
        row, column = divmod(int(one.argmax()), columns)
        lines.append(f"{name}: most at row {row} of {rows}, column {column} of {columns} ({float(one.max()):.3f})")
    apart = over - over.mean(0) if len(over) > 1 else over  # attention shared by all tokens says nothing about one
    tiles = list(zip(seen.queries.names, apart, strict=True))
    return View(record, lines, lambda: _overlay(checkpoint, request, tiles, 5, title))


def _mean(checkpoint: Checkpoint, seen: AttentionMap) -> HeadSelection:
    """Mean over the alignment heads of a Whisper, or over all heads."""
    if isinstance(checkpoint.model, Whisper):
        from multimodal.tasks.transcribe.whisper.words import alignment_heads

        pairs = alignment_heads(checkpoint)
        weights = torch.stack([seen.weights[layer, head] for layer, head in pairs]).mean(0)
    else:
        pairs = [(i, j) for i in range(seen.weights.shape[0]) for j in range(seen.weights.shape[1])]
        weights = seen.weights.mean((0, 1))
    layers, heads = (sorted({pair[i] for pair in pairs}) for i in (0, 1))
    return HeadSelection(weights[None, None], layers, heads, f"mean of {len(pairs)} heads")


def _heads_alone(maps: HeadSelection) -> list[str]:
    spread = numbers.entropies(maps.weights)
    return ["layer  head  entropy"] + [
        f"{layer:5}  {head:4}  {float(spread[i, j]):7.2f}"
        for i, layer in enumerate(maps.layers) for j, head in enumerate(maps.heads)
    ]  # fmt: skip


def _filters(checkpoint: Checkpoint, options: ViewOptions) -> View:
    if not is_image_model(checkpoint.model):
        raise UsageError(f"filters: expected an image model, got {checkpoint.kind}", argument="what")
    components, shares = numbers.filters(image_tower(checkpoint.model))
    record = {"what": "filters", "shares": rounded(shares), "components": rounded(components)}
    lines = ["principal components of the patch filters, and their share of the variance"]
    lines += [f"{number:4}  {100 * float(share):6.2f} %" for number, share in enumerate(shares)]
    title = _titled(checkpoint, "principal components of the patch filters")
    return View(record, lines, lambda: plots.plot_filters(components, shares, title))


def _positions(checkpoint: Checkpoint, options: ViewOptions) -> View:
    model = checkpoint.model
    part = model.encoder if isinstance(model, Whisper | EncoderDecoder) else model
    values, axis = numbers.position_similarity(tower_of(model) if is_image_model(model) else part)
    record = {"what": "positions", "unit": axis.unit, "grid": axis.grid, "step": axis.step}
    record["similarity"] = rounded(values)
    lines = ["mean cosine of position embeddings by their distance"]
    for apart in [2**i for i in range(int(math.log2(max(2, len(values) - 1))) + 1)]:
        if axis.grid is None and apart < len(values):
            near = values.diagonal(apart).mean()
            lines.append(f"{apart * axis.step:8g} {UNITS[axis.unit]}  {float(near):6.3f}")
    lines = lines if axis.grid is None else _by_patches(values, axis)
    title = _titled(checkpoint, "similarity of position embeddings")
    return View(record, lines, lambda: plots.plot_similarity(values, axis, title))


def _by_patches(values: Float[Tensor, "N N"], axis: Axis) -> list[str]:
    rows, columns = axis.grid
    grid = values.view(rows, columns, rows, columns)
    lines = ["mean cosine of position embeddings, by patches to the right and down"]
    for apart in range(1, max(rows, columns)):
        right, down = grid.diagonal(apart, 1, 3), grid.diagonal(apart, 0, 2)
        right = right.diagonal(0, 0, 1).mean() if apart < columns else torch.tensor(math.nan)
        down = down.diagonal(0, 0, 1).mean() if apart < rows else torch.tensor(math.nan)
        lines.append(f"{apart:4}  {float(right):6.3f}  {float(down):6.3f}")
    return lines


def _induction(checkpoint: Checkpoint, options: ViewOptions) -> View:
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not isinstance(model, TextTransformer) or not model.config.causal:
        raise UsageError(f"induction: expected a causal language model, got {checkpoint.kind}", argument="what")
    begin = None if tokenizer is None else tokenizer.bos_id
    vocabulary = model.config.vocabulary if tokenizer is None else usable_ids(tokenizer)
    length = min(50, (model.config.context - 1) // 2) if options.length is None else options.length
    found = induction(model, vocabulary, length, begin=begin)
    scores = found.prefix_matching
    ranked = [divmod(int(place), scores.shape[1]) for place in scores.flatten().argsort(descending=True)]
    heads = [{"layer": i, "head": j, "prefix_matching": rounded(scores[i, j]),
              "previous_token": rounded(found.previous[i, j])} for i, j in ranked]  # fmt: skip
    record = {"what": "induction", "length": length, "heads": heads, "losses": found.losses}
    lines = [f"random sequences of {length} tokens, repeated once", "layer  head  prefix matching  previous token"]
    lines += [f"{one['layer']:5}  {one['head']:4}  {one['prefix_matching']:15.3f}  {one['previous_token']:14.3f}"
              for one in heads]  # fmt: skip
    if found.losses:
        lines.append("nats per token: {:.2f} the first time, {:.2f} the second".format(*found.losses))
    title = _titled(checkpoint, f"prefix matching on {length} repeated tokens")
    return View(record, lines, lambda: plots.plot_heads(scores, "prefix-matching score", title))


_WEIGHTS = {"filters": _filters, "positions": _positions, "induction": _induction}
_INPUTS = {"attention": _attention, "distance": _distance, "alignment": _alignment}
