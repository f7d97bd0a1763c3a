"""Evaluation of images: a summary for a terminal and a report, both of the record that `--format json` prints."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multimodal.tasks.evaluate.class_scores import ClassScores
from multimodal.tasks.report.page import Section, aligned, facts_section, percent, write_page

SHARES = ("acc1", "acc5", "mean_per_class_recall")
TABLES = ("per_class", "confused", "sweep", "shots", "image_to_text", "text_to_image", "zeroshot", "left_out")
FACTS = ("data", "limit", "train", "model", "templates", "hypernyms", "classifier",
         "preprocessing", "native", "device",
         "compute_type")  # fmt: skip


def class_record(scores: ClassScores) -> dict[str, Any]:
    return {**scores.figures(), "per_class": scores.classes(), "confused": scores.confused()}


def summary(record: dict[str, Any]) -> Iterator[str]:
    """Lines for a terminal."""
    if "acc1" in record:
        figures = "   ".join(f"{name} {percent(record[name])}" for name in SHARES)
        yield f"{figures}   ({record['images']} images, {record['classes']} classes)"
    if "c" in record:
        how = "given" if not record["sweep"] else f"the best of {len(record['sweep'])} on images held out"
        yield f"C {record['c']:.4g} ({how}), {record['train_images']} training images"
    if record.get("confused"):
        pairs = [f"{row['class']} → {row['taken_for']} ({row['images']})" for row in record["confused"][:5]]
        yield f"most confused: {', '.join(pairs)}"
    if "image_to_text" in record:
        yield from aligned(_both_ways(record))
        yield f"({record['images']} images, {record['texts']} texts)"
    if "shots" in record:
        yield from aligned(_shots(record))
        yield f"({record['images']} images, {record['classes']} classes; mean ± standard deviation of the draws)"
    if record["left_out"]:
        yield f"left out as broken: {len(record['left_out'])}"


def write_report(
    record: dict[str, Any], path: Path, examples: Sequence[Section] = (), image: bytes | None = None
) -> None:
    """Write all figures. `examples`: sections that show single images. `image`: PNG of the confusion matrix, for HTML.
    Raises OSError."""
    write_page(path, f"Evaluation of images: {record['task']}", _sections(record, examples, image))


def _sections(record: dict[str, Any], examples: Sequence[Section], image: bytes | None) -> Iterator[Section]:
    figures = {name: value for name, value in record.items() if name not in (*TABLES, *FACTS, "task")}
    shown = {name: percent(value) if name in SHARES else value for name, value in figures.items()}
    rows = [("figure", "value"), *((name, str(value)) for name, value in shown.items())]
    yield Section("Figures", rows)
    if "image_to_text" in record:
        yield Section("Both ways", _both_ways(record))
    yield from examples
    if "shots" in record:
        yield Section("Shots", _shots(record))
    for name, title in (("confused", "Most confused"), ("per_class", "Classes"), ("sweep", "Choice of C")):
        if rows := record.get(name):
            plot = image if name == "confused" and image else b""
            yield Section(title, [tuple(rows[0]), *(tuple(row.values()) for row in rows)], image=plot)
    if record["left_out"]:
        yield Section("Left out as broken", lines=record["left_out"])
    yield facts_section({name: record[name] for name in FACTS if name in record})


def _both_ways(record: dict[str, Any]) -> list[tuple]:
    rows = {way: record[way] for way in ("image_to_text", "text_to_image")}
    head = ("", *(name.replace("_", " ") for name in rows["image_to_text"]))
    cells = lambda row: (percent(v) if name.startswith("recall") else v for name, v in row.items())
    return [head, *((way.replace("_", " "), *cells(row)) for way, row in rows.items())]


def _shots(record: dict[str, Any]) -> list[tuple]:
    """Accuracies; zero shots are the zero-shot classifier, below Tip-Adapter, which starts from it."""
    zero = record["zeroshot"]
    methods = {name: None for row in record["shots"] for name in row if name != "shots"}
    methods |= {"tip_adapter": None} if zero else {}
    rows = [("shots", *(name.replace("_", " ") for name in methods))]
    if zero:
        rows.append((0, *(percent(zero["acc1"]) if name == "tip_adapter" else None for name in methods)))
    for row in record["shots"]:
        rows.append((row["shots"], *(_spread(row.get(name)) for name in methods)))
    return rows


def _spread(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    sd = "" if row["acc1_sd"] is None else f" ± {100 * row['acc1_sd']:.2f}"
    return f"{percent(row['acc1_mean'])}{sd}"
