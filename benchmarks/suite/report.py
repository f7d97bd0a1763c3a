"""Markdown tables and plots of a folder of results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.suite.machine import roofline

Row = dict[str, Any]
HEAD = ("benchmark", "threads", "peer", "peer's time", "our time", "speed-up", "range over rounds", "by CPU time",
        "peak MB, ours / peer", "output differs by", "our fastest format")  # fmt: skip


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Job → content of its file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def write(folder: Path) -> None:
    """`README.md`, `ahead.svg` (speed-up over each peer) and `growth.svg` in the folder."""
    from benchmarks.suite import ahead_plot, growth_plot

    results = read(folder)
    parts = [f"# multimodal compared with other libraries, {folder.name}", *about(results)]
    compared = {job: content for job, content in results.items() if job != "growth"}
    parts.append(behind(results))
    if ahead_plot.draw(compared, folder / "ahead.svg"):
        parts.append("![speed-up over each peer](ahead.svg)")
    if "growth" in results:
        growth_plot.draw(results["growth"], folder / "growth.svg")
        parts.append("![time and memory as work grows](growth.svg)")
    for job, content in compared.items():
        parts += [f"## {job}", (rates if job == "front" else table)(content["rows"])]
    if "growth" in results:
        parts += ["## growth", growth(results["growth"])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n")


def rates(rows: list[Row]) -> str:
    """Units a second: of a core by processor time (none where other processes worked), and by wall clock."""
    lines = ["| work | by | a second of a core | a second | MB |", "|---|---|---|---|---|"]
    for row in rows:
        for name, found in row["candidates"].items():
            if "cpu" not in found:
                continue
            worked, wall = found["cpu"]["median"], found["wall"]["median"]
            core = f"{row['units'] / worked:,.0f}" if worked > wall / 10 else ""
            parts = [row["case"], name, core, f"{row['units'] / wall:,.0f}", f"{found['peak MB']:.0f}"]
            lines.append(f"| {' | '.join(parts)} |")
    return "\n".join(lines)


def about(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield (
        "Written by `python -m benchmarks report` from the files beside it. Each candidate is a process of its own, "
        "pinned to as many processors as threads and stopped while another has its turn; outputs are compared before "
        "timing. Times are medians, ratios medians of each round's ratio, above 1: ours is faster. Like is "
        "compared with like (float32 with float32); the last column holds our fastest kind against the same peer. "
        "Memory is the highest resident size while it runs, weights included."
    )
    seen: list[str] = []
    for job, found in results.items():
        machine = found["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        ceilings = "; ".join(
            f"{threads} thread{'s' * (threads != '1')}: " + ", ".join(f"{v:g} {k}" for k, v in found.items())
            for threads, found in machine["ceilings"].items()
        )
        name = machine.get("device", machine["processor"])
        text = (f"{name}, {machine['processors']} processors, {machine['memory GB']:g} GB, {machine['system']}, "
                f"Python {machine['Python']}, {versions}")  # fmt: skip
        if text not in seen:
            seen.append(text)
            yield f"**Machine:** {text}"
        noise = [row["noise"]["median deviation"] for row in found["rows"] if row.get("noise")]
        worst = f", noise of the machine at most {max(noise):.1%}" if noise else ""
        yield f"`{job}`: {machine['date']}, commit {machine['commit']}{worst}. Ceilings, {ceilings}."


def pairs(row: Row) -> Iterator[tuple[str, dict[str, Any] | None, dict[str, Any]]]:
    """(peer, ratio of our first candidate of its kind or None, ratio of our fastest candidate)."""
    for peer in dict.fromkeys(ratio["peer"] for ratio in row.get("ratios", [])):
        ratios = [ratio for ratio in row["ratios"] if ratio["peer"] == peer]
        same = next((ratio for ratio in ratios if ratio["kind"] == ratio["peer kind"]), None)
        yield peer, same, max(ratios, key=lambda ratio: ratio["median"])


def behind(results: dict[str, dict[str, Any]]) -> str:
    """Comparisons in which a peer of the same kind is faster, by the median of the rounds."""
    rows = [(row, peer, same) for job in results.values() for row in job["rows"] for peer, same, _ in pairs(row)
            if same and not same["floor"]]  # fmt: skip
    slower = [f"{row['case']}, threads {row['threads']}: {same['median']:.2f} × {peer}" for row, peer, same in rows
              if same["median"] < 1]  # fmt: skip
    if not slower:
        return f"**Behind:** none of {len(rows)} comparisons."
    return f"**Behind** in {len(slower)} of {len(rows)} comparisons (the log has the causes): {' · '.join(slower)}."


def table(rows: list[Row]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in rows:
        for peer, same, best in pairs(row):
            own, other = row["candidates"][(same or best)["ours"]], row["candidates"][peer]
            name = f"{peer} (a part that both share)" if (same or best)["floor"] else peer
            cells = [row["case"], str(row["threads"]), name, seconds(other["wall"]["median"])]
            if same:
                cells += [seconds(own["wall"]["median"]), f"**{same['median']:.2f}**",
                          f"{min(same['rounds']):.2f} to {max(same['rounds']):.2f}", f"{same['cpu']:.2f}"]  # fmt: skip
            else:
                cells += ["", "", "", ""]
            cells += [f"{own.get('peak MB', 0):.0f} / {other.get('peak MB', 0):.0f}", distance(own)]
            fastest = row["candidates"][best["ours"]]
            other_kind = same is None or best["ours"] != same["ours"]
            name = best["ours"].removeprefix("ours").strip(" ,")
            cells.append(f"{name} {seconds(fastest['wall']['median'])}, {best['median']:.2f}" if other_kind else "")
            lines.append("| " + " | ".join(cells) + " |")
        lines += [f"| {row['case']} | {row['threads']} | {name} | {one['left out']} |" + " |" * (len(HEAD) - 4)
                  for name, one in row["candidates"].items() if "left out" in one]  # fmt: skip
    return "\n".join(lines)


def distance(own: dict[str, Any]) -> str:
    return ", ".join(f"{value:.0e} ({name})" if value else "nothing" for name, value in own.get("distance", {}).items())


def growth(results: dict[str, Any]) -> str:
    """Time and memory per unit of every candidate at every point."""
    head = "| curve | at | candidate | time a unit | units a second | peak MB | share of the roofline |"
    lines = [head, "|---" * 7 + "|"]
    for row in results["rows"]:
        for name, found in row["candidates"].items():
            if "left out" in found:
                lines.append(f"| {row['series']} | {row['at']:g} | {name} | {found['left out']} | | | |")
                continue
            each = found["wall"]["median"] / row["units"]
            least = roofline(row, results["machine"], found["kind"])
            share = f"{least / found['wall']['median']:.0%}" if least else ""
            lines.append(f"| {row['series']} | {row['at']:g} | {name} | {seconds(each)} | {found['units a second']:g} "
                         f"| {found.get('peak MB', 0):.0f} | {share} |")  # fmt: skip
    return "\n".join(lines)


def seconds(value: float) -> str:
    """Three digits with a unit."""
    scale, unit = (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    return f"{value * scale:.0f} {unit}" if value * scale >= 100 else f"{value * scale:.3g} {unit}"
