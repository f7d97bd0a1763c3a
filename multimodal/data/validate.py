"""Every item of a source decoded to its end, before a run meets it: what is broken, why, and how often."""

import math
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

from multimodal.data.loader import BROKEN, end_with_parent
from multimodal.data.sources import Sample, Source
from multimodal.errors import DataError
from multimodal.tokens.audio.reading import SAMPLE_RATE, stream_audio
from multimodal.tokens.audio.reading import SUFFIXES as SOUNDS
from multimodal.tokens.image.reading import SUFFIXES as PICTURES
from multimodal.tokens.image.reading import read_image

Kind = Literal["auto", "image", "audio"]
CHUNK = 32  # items a worker is given at once
# a duration may differ by the larger of both from the decoded sound
DURATION_SECONDS, DURATION_SHARE = 0.1, 0.05


class Fault(NamedTuple):
    """`cause` is the same for like faults, `detail` is the whole reason."""

    name: str
    cause: str
    detail: str


class Checked(NamedTuple):
    faults: list[Fault]
    seconds: float  # of sound


@dataclass
class Report:
    items: int
    broken: int = 0
    faults: list[Fault] = field(default_factory=list)
    sound: float = 0.0  # seconds
    elapsed: float = 0.0  # seconds

    @property
    def causes(self) -> dict[str, int]:
        """How many faults have each cause, the most frequent first."""
        return dict(Counter(fault.cause for fault in self.faults).most_common())

    def to_dict(self, data: str) -> dict[str, Any]:
        return {
            "data": data,
            "items": self.items,
            "broken": self.broken,
            "sound_seconds": round(self.sound, 2),
            "elapsed_seconds": round(self.elapsed, 2),
            "causes": self.causes,
            "faults": [fault._asdict() for fault in self.faults],
        }


def validate(
    source: Source, kind: Kind = "auto", workers: int = 0, labels: Collection[str] = (),
    progress: Callable[[int, int, int], None] = lambda done, items, broken: None,
) -> Report:  # fmt: skip
    """Decodes all media, and checks texts, labels (against the known `labels`, where given) and the
    field `duration`.

    `progress(done, items, broken)` is called as results come. A decoder that crashes its worker is a fault of the
    item."""
    check = Check(source, kind, frozenset(labels))
    report, began = Report(len(source)), time.perf_counter()
    for done, checked in enumerate(_checked(check, len(source), workers), 1):
        report.faults += checked.faults
        report.broken += bool(checked.faults)
        report.sound += checked.seconds
        progress(done, report.items, report.broken)
    report.elapsed = time.perf_counter() - began
    return report


def summary(data: str, report: Report) -> list[str]:
    """Lines for people: the broken items, the causes with their counts, and the total."""
    hours = f", {report.sound / 3600:.2f} h of sound" if report.sound else ""
    return [
        *(f"{fault.name}: {fault.detail}" for fault in report.faults),
        *(f"{count:8} {cause}" for cause, count in report.causes.items()),
        f"{data}: {report.broken} of {report.items} items are broken{hours}, checked in {report.elapsed:.1f} s",
    ]


class Check:
    """Checks one item by its key."""

    def __init__(self, source: Source, kind: Kind, labels: frozenset[str]):
        self.source, self.kind, self.labels = source, kind, labels

    def __call__(self, key: int) -> Checked:
        seconds = 0.0
        name, medium = (row := self.source.row(key)).place, row.name
        found: list[str] = []
        try:
            sample = self.source.read(key)
            found += [*_text_faults(sample), *self._label_faults(sample)]
            seconds = self._decode(sample)
            found += _duration_faults(sample, seconds)
        except BROKEN as error:
            found.append(" ".join(str(error).split()) or type(error).__name__)
        return Checked([fault(name, text, medium) for text in found], seconds)

    def _decode(self, sample: Sample) -> float:
        """Seconds of sound. Raises ImageError, AudioError or DataError."""
        ending = Path(sample.name).suffix.lower()
        if self.kind == "image" or (self.kind == "auto" and ending in PICTURES):
            read_image(sample.media)
            return 0.0
        if self.kind == "auto" and ending not in SOUNDS:
            raise DataError(f"neither a picture nor a recording by its name ({ending or 'no ending'})")
        return sum(len(chunk) for chunk in stream_audio(sample.media)) / SAMPLE_RATE

    def _label_faults(self, sample: Sample) -> Iterator[str]:
        if self.labels and sample.label not in self.labels:
            yield f"label is unknown ({sample.label!r})"


def fault(name: str, text: str, medium: str = "") -> Fault:
    """Messages are `NAME: MEDIUM: cause (value)`: names and value are not part of the cause, nor are numbers of
    seconds. A row of a list has its own `name`, besides that of its `medium`."""
    detail = re.sub(r"^(?:<bytes>|\d+ bytes): ", "", text.removeprefix(f"{name}: "))
    cause = detail.removeprefix(f"{medium}: ").partition(" (")[0]
    return Fault(name, re.sub(r"[\d.]+(?= packets| s )", "N", cause), detail)


def _text_faults(sample: Sample) -> Iterator[str]:
    for text in sample.texts:
        if not text.strip():
            yield "text is empty (0 characters)"
        elif any("\ud800" <= c <= "\udfff" for c in text):
            yield f"text is not UTF-8 ({text!r:.80})"


def _duration_faults(sample: Sample, seconds: float) -> Iterator[str]:
    said = sample.fields.get("duration")
    if said is None or not seconds:
        return
    try:
        said = float(said)  # a column of a CSV is a text
    except (TypeError, ValueError):
        said = math.nan
    if not abs(said - seconds) <= max(DURATION_SECONDS, DURATION_SHARE * seconds):
        yield f"duration does not agree with the sound (said {said:.2f} s, found {seconds:.2f} s)"


def _checked(check: Check, items: int, workers: int) -> Iterator[Checked]:
    """Results in the order of the items."""
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


def _one_by_one(check: Check, keys: Sequence[int]) -> Iterator[Checked]:
    """Finds which of the items crashes a worker."""
    keys = deque(keys)
    while keys:
        with _pool(check, 1) as pool:
            try:
                while keys:
                    yield pool.submit(_check_all, [keys[0]]).result()[0]
                    keys.popleft()
            except BrokenProcessPool:
                name = check.source.name(keys.popleft())
                yield Checked([fault(name, "the decoder crashes on it (its process was killed)")], 0.0)


def _pool(check: Check, workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (check,))


def _begin(check: Check) -> None:
    global _check
    _check = check
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()


_check: Check


def _check_all(keys: Sequence[int]) -> list[Checked]:
    return [_check(key) for key in keys]
