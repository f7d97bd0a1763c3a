"""Plot of speed relative to each peer, for every case."""

from pathlib import Path
from typing import Any

from benchmarks.suite.report import pairs

TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def draw(results: dict[str, dict[str, Any]], path: Path) -> bool:
    """One line per case at its most threads, one dot per peer of the same arithmetic. Returns False without any."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: list[tuple[str, list[tuple[str, float]]]] = []
    for job in results.values():
        most = {row["case"]: row["threads"] for row in sorted(job["rows"], key=lambda row: row["threads"])}
        for row in job["rows"]:
            dots = [(row["candidates"][peer]["library"], same["median"]) for peer, same, _ in pairs(row)
                    if same and not same["floor"]]  # fmt: skip
            if row["threads"] == most[row["case"]] and dots:
                lines.append((row["case"], dots))
    if not lines:
        path.unlink(missing_ok=True)
        return False
    libraries = list(dict.fromkeys(name for _, dots in lines for name, _ in dots))
    with plt.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "ahead"}):
        figure, axes = plt.subplots(figsize=(9, 0.26 * len(lines) + 1.3), layout="constrained")
        for name, colour in zip(libraries, plt.get_cmap("tab20").colors, strict=False):
            own = [(value, y) for y, (_, dots) in enumerate(lines) for peer, value in dots if peer == name]
            axes.scatter(*zip(*own, strict=True), s=28, color=colour, label=name, zorder=3)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        ticks = [t for t in TICKS if t <= 1.3 * max(value for _, dots in lines for _, value in dots)]
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
