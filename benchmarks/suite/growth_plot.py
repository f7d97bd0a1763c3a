"""Plot of time and memory per unit as work grows, with the machine's roofline."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.suite.cases import OURS
from benchmarks.suite.machine import roofline
from benchmarks.suite.report import seconds

Row = dict[str, Any]
ACROSS = {  # what grows along a series
    "images": "image files", "labels": "labels, one image", "audio": "seconds of audio",
    "batch": "ViT-B/16, images at once", "prompt of GPT-2": "GPT-2 small, tokens",
    "prompt of 4 Llama layers": "4 Llama layers, tokens", "model": "ViT Ti to L, M weights",
    "Whisper encoder": "Whisper encoders, M weights",
}  # fmt: skip
COLOURS = {"float32": "#0b5fa5", "bfloat16": "#e07b00", "int8": "#1f9d55", "shipped": "#8e44ad"}
GREYS, MARKS = ("#333333", "#777777", "#999999"), ("s", "^", "D")
DASHES = {"float32": (4, 1.5), "bfloat16": (1.5, 1.2), "int8": (5, 1.5, 1, 1.5)}
WIDTH = 2.55  # inches of a series
COLUMNS = 4
LOOK = {"svg.fonttype": "none", "svg.hashsalt": "growth", "font.sans-serif": ["DejaVu Sans"], "font.size": 8,
        "axes.titlesize": 8.5, "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip
ROOF = ("float32", "bfloat16")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the rows of growth.json: four series side by side, time above memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series: dict[str, list[Row]] = {}
    for row in sorted(results["rows"], key=lambda row: row["at"]):
        series.setdefault(row["series"], []).append(row)
    series = {name: series[name] for name in sorted(series, key=[row["series"] for row in results["rows"]].index)}
    used = [candidate["library"] for row in results["rows"] for candidate in row["candidates"].values()]
    libraries = [name for name in dict.fromkeys(used) if name != OURS]
    columns = min(COLUMNS, len(series))
    lines = -(-len(series) // columns)
    size = (WIDTH * columns, 3.9 * lines + 0.9)
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(2 * lines, columns, figsize=size, squeeze=False, layout="constrained")
        for place, (name, rows) in enumerate(series.items()):
            line, column = divmod(place, columns)
            panel(axes[2 * line, column], axes[2 * line + 1, column], name, rows, results["machine"], libraries)
        for place in range(len(series), lines * columns):
            for part in (0, 1):
                axes[2 * (place // columns) + part, place % columns].set_visible(False)
        legend(figure, axes, columns + (columns > 2))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    # a hundredth of a point is enough, and half as large
    text = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", path.read_text())
    path.write_text(re.sub(r"\n +", "\n", text))


def panel(above: Any, below: Any, name: str, rows: list[Row], machine: dict[str, Any], libraries: list[str]) -> None:
    """Seconds per unit, and peak resident MB of the process."""
    for title in dict.fromkeys(key for row in rows for key in row["candidates"]):
        times, sizes = curve(rows, title)
        if not times:
            continue
        look = style(rows, title, libraries)
        above.plot(*zip(*times, strict=True), **look)
        below.plot(*zip(*sizes, strict=True), **look)
        if len(times) < len(rows) and times[-1][0] < rows[-1]["at"]:  # skipped at further points
            above.plot(*times[-1], marker="x", markersize=7, color=look["color"], linestyle="none")
    for kind in ROOF:
        if points := list(roof(rows, machine, kind)):
            above.plot(*zip(*points, strict=True), color=COLOURS[kind], linewidth=0.9, linestyle=":",
                       label=f"roofline, {kind}")  # fmt: skip
    above.set_title(ACROSS.get(name, name))
    above.set_ylabel(f"time a {rows[0]['unit']}")
    below.set_ylabel("peak MB, whole process")
    for part in (above, below):
        part.set_xscale("log")
        part.set_yscale("log")
        part.minorticks_off()
        part.set_xticks([row["at"] for row in rows], [short(row["at"], name) for row in rows])
        part.grid(axis="y", color="#e4e4e4", linewidth=0.5)
    scale(above, seconds)
    scale(below, lambda size: f"{size:g}")


def curve(rows: list[Row], title: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    rows = [(row, row["candidates"][title]) for row in rows if "wall" in row["candidates"].get(title, {})]
    times = [(row["at"], figures["wall"]["median"] / row["units"]) for row, figures in rows]
    return times, [(row["at"], figures.get("peak MB") or float("nan")) for row, figures in rows]


def style(rows: list[Row], title: str, libraries: list[str]) -> dict[str, Any]:
    """Ours in colours by kind, with full lines; peers in greys, a mark a library, dashes by kind."""
    candidate = next(row["candidates"][title] for row in rows if title in row["candidates"])
    kind, library = candidate["kind"], candidate["library"]
    if library == OURS:
        return {"color": COLOURS[kind], "linewidth": 1.9, "marker": "o", "markersize": 3.5, "label": title,
                "zorder": 4}  # fmt: skip
    number = libraries.index(library)
    return {"color": GREYS[number // len(MARKS) % len(GREYS)], "linewidth": 1.0, "marker": MARKS[number % len(MARKS)],
            "markersize": 3, "dashes": DASHES.get(kind, (1, 1)), "label": title, "zorder": 3}  # fmt: skip


def roof(rows: list[Row], machine: dict[str, Any], kind: str) -> Iterator[tuple[float, float]]:
    """Lower bound of seconds per unit on this machine: the longer of computing and of reading the weights."""
    if any(candidate["kind"] == kind for row in rows for candidate in row["candidates"].values()):
        for row in rows:
            if least := roofline(row, machine, kind):
                yield row["at"], least / row["units"]


def short(value: float, name: str) -> str:
    """10 m, 1k, 86.6"""
    if name == "audio":
        size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "m"), (1, "s")) if value >= size)
        return f"{value / size:g} {unit}"
    if value >= 1000:
        return f"{value / (1000 if value % 1000 == 0 else 1024):g}k"
    return f"{value:g}"


def scale(axes: Any, name: Callable[[float], str]) -> None:
    """Show at least a factor of five, so that flat lines look flat; ticks at round numbers."""
    low, high = axes.get_ylim()
    middle, half = (low * high) ** 0.5, max((high / low) ** 0.5, 5**0.5)
    low, high = middle / half, middle * half
    axes.set_ylim(low, high)
    steps = (1, 2, 5) if high < 50 * low else (1,)
    ticks = [m * 10.0**e for e in range(-7, 6) for m in steps if low <= m * 10.0**e <= high]
    axes.set_yticks(ticks, [name(tick) for tick in ticks])


def legend(figure: Any, axes: Any, columns: int) -> None:
    """One legend: ours, then peers, then rooflines."""
    handles = {label: line for part in axes.flat for line, label in zip(*part.get_legend_handles_labels(), strict=True)}
    order = sorted(handles, key=lambda label: (not label.startswith("ours"), label.startswith("roofline"), label))
    figure.legend([handles[label] for label in order], order, loc="outside lower center", ncols=columns, frameon=False,
                  fontsize=7.5, handlelength=3.2)  # fmt: skip
