"""What `multimodal evaluate captions` does with its flags (`cli_evaluate.py`)."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from multimodal.cli.output import fail, printable
from multimodal.cli.shared import Progress, output_file, outputs_of, print_json, trust
from multimodal.errors import UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.files import versions
from multimodal.tasks.caption.options import CaptionOptions
from multimodal.tasks.encode.features import encoder
from multimodal.tasks.evaluate.captions import (
    Captioned,
    Evaluation,
    Written,
    open_references,
    read_captions,
    record,
    write_captions,
)
from multimodal.tasks.evaluate.captions import evaluate as run
from multimodal.tasks.evaluate.report import Section, aligned, write_page
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

SHOWN = 10  # captions of a report, the worst and the best


def evaluate(options: Namespace) -> int:
    began = time.perf_counter()
    report = output_file(options.report, "--report", (".md", ".html"), outputs_of(options))
    if options.threads:
        torch.set_num_threads(options.threads)
    clip = _clip(options)
    referenced = open_references(options.data, options.limit, 2 if options.agreement else 1, trust(options))
    captions, facts = _captions(options, referenced)
    shown = Progress(f"{options.clip_model}: pictures")
    try:
        found = run(
            referenced, captions, clip, options.agreement, shown, batch_size=options.batch_size, workers=options.workers
        )
    finally:
        shown.clear()
    for line in found.broken:
        fail(line)
    facts = {"task": "captions", "data": options.data, **facts, "clip_model": clip and clip.source,
             "seconds": round(time.perf_counter() - began, 2)}  # fmt: skip
    told = record(found, facts)
    if options.output == "json":
        print_json(told)
    else:
        for line in _summary(found):
            print(printable(line))
    sys.stdout.flush()
    if report is not None:
        write_page(report, "Evaluation of captions", _sections(found, facts))
    return int(bool(found.broken))


def _clip(options: Namespace) -> Checkpoint | None:
    """Loaded first, so that a wrong name costs nothing."""
    if options.clip_model is None:
        return None
    checkpoint = load(options.clip_model)
    encoder(checkpoint, "embedding")
    return prepare_for_inference(checkpoint, options.compute_type, options.device)


def _captions(options: Namespace, referenced: Captioned) -> tuple[Written, dict[str, Any]]:
    asked = {name: value for name, value in vars(options).items() if name in CaptionOptions.__dataclass_fields__}
    if options.predictions is not None:
        if asked:
            raise UsageError(f"--{next(iter(asked))}: is for a captioner, and --predictions has captions already")
        return read_captions(Path(options.predictions), referenced), {"predictions": options.predictions}
    checkpoint = load(options.model, options.architecture)
    shown = Progress("captions")
    try:
        found = write_captions(
            referenced, checkpoint, shown, batch_size=options.batch_size, workers=options.workers,
            compute_type=options.compute_type, device=options.device, **asked,
        )  # fmt: skip
    finally:
        shown.clear()
    return found, {"model": checkpoint.source, "options": asked}


def _summary(found: Evaluation) -> Iterator[str]:
    yield from aligned(_table(found))
    f = found.figures()
    cut = f", {f['cut']} cut at the most tokens" if f["cut"] else ""
    yield f"(in %; {f['pictures']} captions, {f['distinct']} different, {f['words_per_caption']:.1f} words each{cut})"
    if found.broken:
        yield f"left out: {len(found.broken)}"


def _table(found: Evaluation) -> list[tuple]:
    """Scores, beside those of people where they are known."""
    rows = [(name, round(value, 2)) for name, value in found.scores.items()]
    if found.people is None:
        return [("score", "captions"), *rows]
    people = {name: round(value, 2) for name, value in found.people.items()}
    return [("score", "captions", "people"), *((name, value, people.get(name)) for name, value in rows)]


def _sections(found: Evaluation, facts: dict[str, Any]) -> Iterator[Section]:
    yield Section("Scores, in %", _table(found))
    counts = {name: value for name, value in found.figures().items() if name not in {*found.scores, "people"}}
    yield Section("Captions", [("figure", "value"), *((name, str(value)) for name, value in counts.items())])
    ranked = sorted(found.rows, key=lambda row: row["cider"])
    yield Section("Lowest CIDEr-D", lines=list(_said(ranked[:SHOWN])))
    yield Section("Highest CIDEr-D", lines=list(_said(ranked[: -SHOWN - 1 : -1])))
    if found.broken:
        yield Section("Left out", lines=found.broken)
    yield Section("Facts", lines=[f"{name}: {value}" for name, value in (facts | {"versions": versions()}).items()])


def _said(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        fits = f", CLIPScore {row['clip_score']:.1f}" if "clip_score" in row else ""
        people = " | ".join(row["references"])
        yield f"{row['file']} (CIDEr-D {row['cider']:.1f}{fits}): {row['caption']}  —  people: {people}"
