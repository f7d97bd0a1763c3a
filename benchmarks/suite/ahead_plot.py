"""Plot of speed relative to each peer, for every case."""

from pathlib import Path
from typing import Any

from benchmarks.suite.report import pairs

COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#999933",
    "#882255",
    "#555555",
    "#dd8452",
    "#000000",
    "#7fbf7f",
    "#b07aa1",
    "#9c755f",
)


def draw(results: dict[str, dict[str, Any]], path: Path) -> bool:
    """One line per case at its most threads, one dot per peer of the same arithmetic. Returns False without any."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: list[tuple[str, list[tuple[str, float]]]] = []
    for held in results.values():
        most = {row["case"]: row["threads"] for row in sorted(held["rows"], key=lambda row: row["threads"])}
        for row in held["rows"]:
            dots = [(f"{library(row, peer)}", same["median"]) for peer, same, _ in pairs(row)
                    if same and not same["floor"]]  # fmt: skip
            if row["threads"] == most[row["case"]] and dots:
                lines.append((row["case"], dots))
    if not lines:
        path.unlink(missing_ok=True)
        return False
    libraries = list(dict.fromkeys(name for _, dots in lines for name, _ in dots))
    with plt.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "ahead"}):
        figure, axes = plt.subplots(figsize=(9, 0.26 * len(lines) + 1.3), layout="constrained")
        for number, name in enumerate(libraries):
            own = [(value, y) for y, (_, dots) in enumerate(lines) for peer, value in dots if peer == name]
            axes.scatter(*zip(*own, strict=True), s=28, color=COLOURS[number % len(COLOURS)], label=name, zorder=3)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if t <= 1.3 * max(v for _, d in lines for _, v in d)]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(lines)), [name for name, _ in lines])
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_xlabel("times as fast as the peer (right of 1: ours is faster)")
        figure.legend(loc="outside upper center", ncols=min(5, len(libraries)), frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    return True


def library(row: dict[str, Any], peer: str) -> str:
    return row["candidates"][peer]["library"]
