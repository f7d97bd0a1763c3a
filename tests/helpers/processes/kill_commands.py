"""Kill commands at random moments and rerun them until they end.

    python -m tests.helpers.processes.kill_commands FOLDER 200 0

The calls are forks of this program, which has run each command once, so that a kill costs no start. Nothing that was
finished may be lost, and what a command ends with must equal, byte for byte, what it ends with when nobody kills it.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from PIL import Image

from multimodal.cli.main import main
from tests.helpers.data.sets import wav
from tests.helpers.folders import clip_and_asr

LIMIT = 300  # seconds of one call
LABELS = ["--labels", "a red square", "a blue square", "--batch_size", "4"]


def commands(folder: Path) -> dict[str, tuple[list[str], Callable[[Path], list[str]]]]:
    """Inputs with all flags, and the output's flag, by name."""
    clip_and_asr(folder)
    (folder / "images").mkdir()
    (folder / "audio").mkdir()
    for number in range(40):
        Image.new("RGB", (40 + number, 30), (6 * number, 0, 250 - 6 * number)).save(folder / f"images/{number:02}.png")
    for number in range(12):
        (folder / f"audio/{number:02}.wav").write_bytes(wav(0.3 + 0.1 * number))
    classify = ["classify", str(folder / "images"), *LABELS, "-m", str(folder / "clip")]
    transcribe = ["transcribe", str(folder / "audio"), "-m", str(folder / "asr"), "--batch_size", "2"]
    transcribe += ["--skip_existing"]
    index = ["index", str(folder / "images"), "-m", str(folder / "clip"), "--batch_size", "4"]
    return {
        "classify csv": (classify, lambda out: ["-o", str(out / "results.csv")]),
        "classify jsonl": (classify, lambda out: ["-o", str(out / "results.jsonl"), "--format", "jsonl"]),
        "transcribe": (transcribe, lambda out: ["-o", str(out)]),
        "index": (index, lambda out: ["-o", str(out / "made")]),
    }


def fork(arguments: list[str], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    with contextlib.suppress(BaseException):
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code or 0
    os._exit(code)


def ended(pid: int) -> int:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    raise SystemExit(f"a call hangs: {pid}")


def content(out: Path) -> dict[str, bytes]:
    """File contents by name, without the times and folders that an index keeps."""
    found = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    for name, data in found.items():
        if name == "made/index.json":
            record = json.loads(data)
            for file in record["files"].values():
                file.pop("mtime_ns")
            found[name] = json.dumps(record).encode()
    return found


def finished(name: str, out: Path) -> dict[str, bytes]:
    """Whole outputs of transcribe, whole lines of the others."""
    files = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    if name == "transcribe":
        return {name: data for name, data in files.items() if name.split(".")[0].isdigit()}
    found = {}
    for file in {"results.csv", "results.jsonl", "images-1.jsonl"} & files.keys():
        rows = [row for row in files[file].splitlines(keepends=True) if row.endswith(b"\n")]
        found[file] = b"".join(rows)
    return found


def _safe(file: str, data: bytes) -> bytes:
    """Results that a kill must not undo: in CSV all but the last image's rows, which the next call rewrites."""
    return b"".join(data.splitlines(keepends=True)[:-2]) if file == "results.csv" else data


def calls(name: str, call: tuple, folder: Path, chance: random.Random, found: Counter) -> Iterator[None]:
    """A kill with each step. `call`: as `commands` has it."""
    place, log = folder / name.replace(" ", "-"), folder / f"{name}.log"
    (place / "whole").mkdir(parents=True)
    began = time.monotonic()
    if ended(fork([*call[0], *call[1](place / "whole")], log)):
        raise SystemExit(f"{name} fails: {log.read_text()[-2000:]}")
    span, whole, out, before = time.monotonic() - began, content(place / "whole"), place / "out", {}
    while True:
        out.mkdir(exist_ok=True)
        pid = fork([*call[0], *call[1](out)], log)
        time.sleep(chance.uniform(0, span))
        os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        now = finished(name, out)
        found["lost"] += any(not now.get(file, b"").startswith(data) for file, data in before.items())
        before = {file: _safe(file, data) for file, data in now.items()}
        if code == -signal.SIGKILL:
            yield
            continue
        if code:
            raise SystemExit(f"{name} fails: {log.read_text()[-2000:]}")
        same(name, content(out), whole, found)
        shutil.rmtree(out)
        before = {}


def same(name: str, now: dict[str, bytes], whole: dict[str, bytes], found: Counter) -> None:
    found[f"{name}: ends"] += 1
    found["left behind"] += len(now.keys() - whole.keys())
    if wrong := [file for file in whole if now.get(file) != whole[file]]:
        found["differ"] += 1
        print(f"{name}: differ: {wrong}", file=sys.stderr, flush=True)


def many(folder: Path, kills: int, seed: int) -> dict[str, int]:
    chance, found = random.Random(seed), Counter({"lost": 0, "differ": 0, "left behind": 0})
    todo = commands(folder)
    (folder / "warm").mkdir()
    for inputs, flags in todo.values():  # do the late imports once
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
            main([*inputs, *flags(folder / "warm")])
    going = {name: calls(name, call, folder, chance, found) for name, call in todo.items()}
    for number in range(kills):
        name = list(going)[number % len(going)]
        next(going[name])
        found[f"{name}: kills"] += 1
    for name, (inputs, flags) in todo.items():
        out = folder / name.replace(" ", "-") / "out"
        out.mkdir(exist_ok=True)
        if ended(fork([*inputs, *flags(out)], folder / f"{name}.log")):
            raise SystemExit(f"{name} does not go on")
        same(name, content(out), content(out.with_name("whole")), found)
    return {"kills": kills, **found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(many(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
