"""Fuzz campaigns: inputs by seed, findings, and the smallest file that shows each."""

import contextlib
import importlib
import io
import os
import pkgutil
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .child import Case, Ended, Place, problems
from .foreign import FOREIGN
from .kinds_data import KINDS
from .mutators import Random
from .seeds import MAKERS, Seeds

SHRINKS = 40  # runs to make a file smaller
LIGHT = (
    "audio",
    "clip",
    "image",
    "image_other",
    "lists",
    "texts",
    "tars",
    "classifier",
    "results",
    "index",
    "ngram",
    "checkpoint",
)


@dataclass
class Finding:
    kind: str
    seed: str
    problem: str
    folder: Path


@dataclass
class Report:
    """Counts by kind, with one finding per kind and problem."""

    inputs: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    seconds: Counter = field(default_factory=Counter)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    again: Counter = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        yield f"{'kind':<12} {'inputs':>7} {'refused':>8} {'findings':>9} {'s/input':>8}"
        for kind, count in self.inputs.items():
            found = [key for key in self.findings if key[0] == kind]
            yield (f"{kind:<12} {count:7} {self.refused[kind]:8} {len(found):9} {self.seconds[kind] / count:8.2f}")
        yield f"{'all':<12} {self.inputs.total():7} {self.refused.total():8} {len(self.findings):9}"
        for (kind, sort), one in self.findings.items():
            yield f"{kind} --case {kind}:{one.seed} ({self.again[kind, sort]} times): {one.problem}\n    {one.folder}"


def sort_of(problem: str) -> str:
    """Key of a finding: its text without numbers, quotes and file names."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\S*/\S*|\d+|bad\.\w+", "…", problem)[:80]


class Fuzz:
    """Fuzzer in the empty folder `root`; findings are copied into `kept`."""

    def __init__(self, root: Path, kept: Path):
        self.seeds, self.place, self.kept = Seeds(root / "seeds", MAKERS | FOREIGN), Place(root), kept
        self.report = Report()

    def one(self, kind: str, seed: str) -> tuple[list[str], Case, Ended]:
        """Make, run and judge the input of a seed in the working folder."""
        self.place.clear()
        case = KINDS[kind](Random(seed), self.seeds, self.place)
        found, ended = problems(case, self.place)
        return found, case, ended

    def step(self, kind: str, seed: str) -> list[str]:
        found, case, ended = self.one(kind, seed)
        self.report.inputs[kind] += 1
        self.report.refused[kind] += ended.status != 0
        self.report.seconds[kind] += ended.seconds
        for problem in found:
            key = (kind, sort_of(problem))
            self.report.again[key] += 1
            if key not in self.report.findings:
                folder = self.kept / f"{kind}-{len(self.report.findings)}"
                self.report.findings[key] = Finding(kind, seed, problem, folder)
                print(f"\nFOUND --case {kind}:{seed}: {problem}\n    {case.command} -> {folder}", flush=True)
                self._keep(kind, seed, key[1], case, ended, folder)
        return found

    def _keep(self, kind: str, seed: str, sort: str, case: Case, ended: Ended, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.place.work, folder / "work", symlinks=True)
        (folder / "stderr").write_text(ended.err)
        (folder / "stdout").write_text(ended.out)
        (folder / "case").write_text(f"{kind}:{seed}\n{case.command}\n")
        if case.bad is not None and ended.seconds < 3:
            (folder / f"small-{case.bad.name}").write_bytes(self._smaller(kind, seed, sort))

    def _smaller(self, kind: str, seed: str, sort: str) -> bytes:
        """Drop parts of the file while the same problem remains."""
        case = self.one(kind, seed)[1]
        best = case.bad.read_bytes()
        size, at = len(best) // 2, 0
        for _ in range(SHRINKS):
            if size == 0:
                break
            trial = best[:at] + best[at + size :]
            self.place.clear()
            case = KINDS[kind](Random(seed), self.seeds, self.place)
            case.bad.write_bytes(trial)
            if case.finish:
                case.finish()
            if any(sort_of(p) == sort for p in problems(case, self.place)[0]):
                best = trial
            else:
                at += size
            if at >= len(best):
                size, at = size // 2, 0
        return best


def warm(fuzz: Fuzz) -> None:
    """Import the commands' modules, with one thread, before children are forked."""
    import faiss
    import torch

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    import multimodal
    from multimodal.cli.main import main

    for words in (["models"], ["info", fuzz.seeds.model("clip")], ["info", fuzz.seeds.model("asr")]):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main(words)
    for name in ("av", "PIL.ImageFile", "tokenizers", "sentencepiece", "tiktoken", "sklearn.linear_model", "torchaudio",
                 "matplotlib.font_manager", "matplotlib.pyplot",
                 *(module.name for module in pkgutil.walk_packages(multimodal.__path__, "multimodal.")
                   if not module.name.endswith("__main__"))):  # fmt: skip
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(f"warning: {threads} threads in the parent, so children may hang by themselves", file=sys.stderr)


def campaign(fuzz: Fuzz, names: list[str], seed: int, seconds: float, most: int = 1 << 60) -> Report:
    """Run inputs of each kind in turn until the time is up, or Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        _campaign(fuzz, names, seed, seconds, most)
    return fuzz.report


def _campaign(fuzz: Fuzz, names: list[str], seed: int, seconds: float, most: int) -> None:
    until, told, number = time.monotonic() + seconds, time.monotonic(), 0
    while time.monotonic() < until and number < most:
        kind = names[number % len(names)]
        fuzz.step(kind, f"{seed}:{number // len(names)}")
        number += 1
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{number} inputs, {len(fuzz.report.findings)} findings", flush=True)


def new_seed() -> int:
    return random.SystemRandom().randrange(10**6)
