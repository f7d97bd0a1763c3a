"""Text cleaning as a stream: chunks of pages through the rules in worker processes, then one set of spans in order."""

import dataclasses
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from multimodal.data.cleaning.cleaner import CleanedPage, Cleaner
from multimodal.data.cleaning.merge import Merge
from multimodal.data.cleaning.options import CleanMachineOptions, CleanOptions
from multimodal.data.cleaning.pages import Chunk, Position, chunks
from multimodal.data.cleaning.report import CleanReport
from multimodal.data.cleaning.state import State
from multimodal.data.cleaning.targets import Target, part_of
from multimodal.data.loader import calm_pool_worker
from multimodal.data.manifests import is_json
from multimodal.errors import DataError

COMMIT = 5.0  # seconds between states on disk


def clean(
    inputs: Sequence[Path], output: Path, options: CleanOptions, explain: Path | None = None,
    bad_words: Iterable[str] = (), workers: int = CleanMachineOptions.workers.default,
    memory: int = CleanMachineOptions.memory.default << 20,
    progress: Callable[[int], None] = lambda read: None,
) -> CleanReport:  # fmt: skip
    """Write the clean pages of text files and JSON lines, plain, gzip or Zstandard by their endings, to `output`.

    Text output has an empty line between pages. `explain`: JSON lines that name the rule of each dropped line and the
    place of its first copy. `memory`: bytes for the set of spans, which goes to disk beyond. Progress is kept in
    `output`.state; a call with the same inputs and options resumes to the same bytes, for any number of workers.
    `progress(bytes)` gets what was read of the files. Raises UsageError, and DataError where a worker is killed."""
    words = sorted(set(bad_words))
    settings = {"options": vars(options), "explain": str(explain), "bad_words": words,
                "inputs": [[str(path), *_version(path)] for path in inputs]}  # fmt: skip
    begun = any(part_of(path).exists() for path in (output, explain) if path)
    state = State(output.with_name(f"{output.name}.state"), settings, memory, keep=begun)
    targets: list[Target] = []
    try:
        targets += (Target(path, is_ours=state.resumed) for path in (output, explain) if path)
        report = _run(inputs, options, words, workers, state, targets, progress)
        for target in targets:
            target.place()
        state.progress = None
    finally:
        for target in targets:
            target.close(remove=state.progress is None)
        state.close(remove=state.progress is None)
    return report


def _version(path: Path) -> tuple[int, int]:
    """Size and time of a file, by which a change is seen."""
    status = path.stat() if path.exists() else None
    return (status.st_size, status.st_mtime_ns) if status else (0, 0)


def _run(
    inputs: Sequence[Path], options: CleanOptions, bad_words: Sequence[str], workers: int, state: State,
    targets: Sequence[Target], progress: Callable[[int], None],
) -> CleanReport:  # fmt: skip
    saved = state.progress
    if saved and not (saved["done"] or all(map(Target.holds, targets, saved["sizes"]))):
        state.clear()
        saved = None
    report = CleanReport(**saved["report"]) if saved else CleanReport()
    if saved and saved["done"]:
        return report
    for target, size in zip(targets, saved["sizes"] if saved else [0] * len(targets), strict=True):
        target.open(size)
    start, last = Position(*saved["position"]) if saved else Position(), time.monotonic()
    json = [is_json(path) for path in inputs]
    merge = Merge(options, state, report, list(map(str, inputs)), json, is_json(targets[0].path), len(targets) > 1)
    cleaner = Cleaner(options, json, bad_words, len(targets) > 1)

    def commit(position: Position, done: bool) -> None:
        sizes = [target.flushed() for target in targets]
        state.commit({"position": position, "sizes": sizes, "report": dataclasses.asdict(report), "done": done})

    for chunk, pages in _cleaned(chunks(inputs, options.documents, start, progress), cleaner, workers):
        for target, data in zip(targets, merge(chunk, pages), strict=False):
            target.write(data)
        if time.monotonic() - last > COMMIT:
            commit(chunk.end, False)
            last = time.monotonic()
    commit(Position(len(inputs)), True)
    return report


def _cleaned(source: Iterator[Chunk], cleaner: Cleaner, workers: int) -> Iterator[tuple[Chunk, list[CleanedPage]]]:
    """Chunks in order. Raises DataError where a worker is killed."""
    if workers < 2:
        yield from ((chunk, cleaner(chunk.pages)) for chunk in source)
        return
    waiting: deque = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (cleaner,)) as pool:
        try:
            for chunk in source:
                waiting.append((chunk._replace(pages=[]), pool.submit(_clean, chunk.pages)))
                while len(waiting) > 2 * workers:
                    first, result = waiting.popleft()
                    yield first, result.result()
            for first, result in waiting:
                yield first, result.result()
        except BrokenProcessPool:
            raise DataError("a worker was killed, as by want of memory; rerun to resume, with fewer workers") from None


def _begin(cleaner: Cleaner) -> None:
    global _cleaner
    _cleaner = cleaner
    calm_pool_worker()


_cleaner: Cleaner


def _clean(pages: list) -> list[CleanedPage]:
    return _cleaner(pages)
