"""Validation of training data: decode every item and report what is broken."""

import multiprocessing
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from multimodal.data.loader import BROKEN
from multimodal.data.sources import PATHS, Sample, Source, duration_of
from multimodal.errors import DataError, one_line
from multimodal.system.processes import end_with_parent
from multimodal.tokens.audio.reading import SAMPLE_RATE, stream_audio
from multimodal.tokens.audio.reading import SUFFIXES as SOUNDS
from multimodal.tokens.image.reading import SUFFIXES as IMAGES
from multimodal.tokens.image.reading import read_image

Kind = Literal["auto", "image", "audio"]
CHUNK = 32  # items per task of a worker
# tolerance of a duration: the larger of both
DURATION_SECONDS, DURATION_SHARE = 0.1, 0.05


class DataFault(NamedTuple):
    """`cause` groups faults of one kind, `detail` is the full reason."""

    name: str
    cause: str
    detail: str


class Checked(NamedTuple):
    faults: list[DataFault]
    seconds: float  # of audio


@dataclass
class ValidationReport:
    items: int
    texts: int = 0  # items with a text
    labels: int = 0  # items with a label
    columns: tuple[str, ...] = ()  # of the first item
    broken: int = 0
    faults: list[DataFault] = field(default_factory=list)
    sound: float = 0.0  # seconds
    elapsed: float = 0.0  # seconds

    @property
    def causes(self) -> dict[str, int]:
        """Number of faults by cause, the most frequent first."""
        return dict(Counter(fault.cause for fault in self.faults).most_common())

    def to_dict(self, data: str) -> dict[str, Any]:
        return {
            "data": data,
            "items": self.items,
            "broken": self.broken,
            "texts": self.texts,
            "labels": self.labels,
            "sound_seconds": round(self.sound, 2),
            "elapsed_seconds": round(self.elapsed, 2),
            "causes": self.causes,
            "faults": [fault._asdict() for fault in self.faults],
        }


def validate(
    source: Source, kind: Kind = "auto", workers: int = 0, labels: Collection[str] = (),
    progress: Callable[[int, int, int], None] = lambda done, items, broken: None,
) -> ValidationReport:  # fmt: skip
    """Decode all media and check texts, labels (against `labels`, if given) and the field `duration`.

    `progress(done, items, broken)` is called with each result. A decoder that crashes its worker is a fault of the
    item."""
    check = ItemCheck(source, kind, frozenset(labels))
    rows, began = [source.row(key) for key in range(len(source))], time.perf_counter()
    report = ValidationReport(
        len(rows), sum(bool(row.texts) for row in rows), sum(row.label is not None for row in rows),
        tuple(rows[0].fields),
    )  # fmt: skip
    for done, checked in enumerate(_checked(check, len(source), workers), 1):
        report.faults += checked.faults
        report.broken += bool(checked.faults)
        report.sound += checked.seconds
        progress(done, report.items, report.broken)
    report.elapsed = time.perf_counter() - began
    return report


def summary(data: str, report: ValidationReport) -> list[str]:
    """Return the printed report: broken items, causes with their counts, and the totals."""
    hours = f", {report.sound / 3600:.2f} h of audio" if report.sound else ""
    others = [name for name in report.columns if name not in (*PATHS, "duration")]
    unread = others and not report.texts and not report.labels
    hint = "no text and no label among the columns {}; name one with --text_column or --label_column"
    return [
        *(f"{fault.name}: {fault.detail}" for fault in report.faults),
        *(f"{count:8} {cause}" for cause, count in report.causes.items()),
        f"{data}: {report.broken} of {report.items} items are broken{hours}, checked in {report.elapsed:.1f} s",
        *([f"{data}: {hint.format(', '.join(report.columns))}"] if unread else []),
    ]


class ItemCheck:
    """Checks one item by its key."""

    def __init__(self, source: Source, kind: Kind, labels: frozenset[str]):
        self.source, self.kind, self.labels = source, kind, labels

    def __call__(self, key: int) -> Checked:
        seconds = 0.0
        name, medium = (row := self.source.row(key)).place, row.name
        faults: list[str] = []
        try:
            sample = self.source.read(key)
            faults += [*_text_faults(sample), *self._label_faults(sample)]
            seconds = self._decode(sample)
            faults += _duration_faults(sample, seconds)
        except BROKEN as error:
            faults.append(one_line(error))
        return Checked([fault(name, text, medium) for text in faults], seconds)

    def _decode(self, sample: Sample) -> float:
        """Return the seconds of audio. Raises ImageError, AudioError or DataError."""
        ending = Path(sample.name).suffix.lower()
        if self.kind == "image" or (self.kind == "auto" and ending in IMAGES):
            read_image(sample.media)
            return 0.0
        if self.kind == "auto" and ending not in SOUNDS:
            raise DataError(f"not an image or audio file by its name ({ending or 'no ending'})")
        return sum(len(chunk) for chunk in stream_audio(sample.media)) / SAMPLE_RATE

    def _label_faults(self, sample: Sample) -> Iterator[str]:
        if self.labels and sample.label not in self.labels:
            yield f"label is unknown ({sample.label!r})"


def fault(name: str, text: str, medium: str = "") -> DataFault:
    """Split a message `NAME: MEDIUM: cause (value)` into detail and cause, the latter without names and numbers. A row
    of a list has a `name` next to that of its `medium`."""
    detail = re.sub(r"^(?:<bytes>|\d+ bytes): ", "", text.removeprefix(f"{name}: "))
    cause = detail.removeprefix(f"{medium}: ").partition(" (")[0]
    return DataFault(name, re.sub(r"[\d.]+(?= packets| s\b)", "N", cause), detail)


def _text_faults(sample: Sample) -> Iterator[str]:
    for text in sample.texts:
        if not text.strip():
            yield "text is empty (0 characters)"
        elif any("\ud800" <= c <= "\udfff" for c in text):
            yield f"text is not UTF-8 ({text!r:.80})"


def _duration_faults(sample: Sample, seconds: float) -> Iterator[str]:
    if sample.fields.get("duration") is None or not seconds:
        return
    listed = duration_of(sample.fields)
    if not abs(listed - seconds) <= max(DURATION_SECONDS, DURATION_SHARE * seconds):
        yield f"duration differs from the audio (listed {listed:.2f} s, actual {seconds:.2f} s)"


def _checked(check: ItemCheck, items: int, workers: int) -> Iterator[Checked]:
    """Yield results in the order of the items."""
    if not workers:
        yield from map(check, range(items))
        return
    chunks = deque(range(at, min(at + CHUNK, items)) for at in range(0, items, CHUNK))
    while chunks:
        waiting: deque = deque()
        with _pool(check, workers) as pool:
            try:
                while chunks or waiting:
                    while chunks and len(waiting) < 3 * workers:
                        waiting.append((chunks[0], pool.submit(_check_all, chunks[0])))
                        chunks.popleft()
                    results = waiting[0][1].result()
                    waiting.popleft()
                    yield from results
                return
            except BrokenProcessPool:
                lost = [key for chunk, _ in waiting for key in chunk]
        yield from _one_by_one(check, lost)


def _one_by_one(check: ItemCheck, keys: Sequence[int]) -> Iterator[Checked]:
    """Find the items that crash a worker."""
    keys = deque(keys)
    while keys:
        with _pool(check, 1) as pool:
            try:
                while keys:
                    yield pool.submit(_check_all, [keys[0]]).result()[0]
                    keys.popleft()
            except BrokenProcessPool:
                name = check.source.name(keys.popleft())
                yield Checked([fault(name, "the decoder crashed (its process was killed)")], 0.0)


def _pool(check: ItemCheck, workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (check,))


def _begin(check: ItemCheck) -> None:
    global _check
    _check = check
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()


_check: ItemCheck


def _check_all(keys: Sequence[int]) -> list[Checked]:
    return [_check(key) for key in keys]
