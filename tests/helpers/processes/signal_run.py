"""Stop a training run with two workers by signals at random moments; many of them beside busy loops on all cores.

    python -m tests.helpers.processes.signal_run FOLDER 1000 0

The runs are forks of this program, which has imported everything. Each must end with code 75, at the step that it was
at, and leave no process behind; one that is resumed to its end must equal an unbroken one.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import multimodal.train.loop
from multimodal.system.signals import SIGNALS
from multimodal.train.checkpoint.atomic import newest_state
from multimodal.train.recipe_cli import start
from tests.helpers import tiny_run
from tests.helpers.processes.kill_run import same

STEPS = 80
BUSY = 100  # signals from which on all cores are busy
LIMIT = 120  # seconds; a run that has not ended by then hangs
SPAN = 0.4  # seconds after the start of the loop, within which most signals arrive


@dataclass
class Settings:
    run: Path
    messages: int


def main(settings: Settings) -> None:
    """Report the step where the loop starts, and each finished step."""
    loop = tiny_run.loop(settings.run, steps=STEPS, workers=2, save_every=10**6, log_every=10**6, resume=True)
    step, begin = loop.step, loop.begin

    def told() -> None:
        os.write(settings.messages, loop.done.to_bytes(4))

    loop.step = lambda batches: (step(batches), told())[0]
    loop.begin = lambda: (begin(), told())
    loop.fit()


def fork(run: Path) -> tuple[int, int]:
    """Process id (also its group's) and the read end of its pipe of steps."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    code = 1
    try:
        os.setsid()
        os.close(out)
        log = os.open(f"{run}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        sys.argv = [__file__, "--run", str(run), "--messages", str(into)]
        start(main)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def told(out: int, limit: float) -> int | None:
    """Next step; None at the end or after the time limit."""
    message = os.read(out, 4) if select.select([out], [], [], limit)[0] else b""
    return int.from_bytes(message) if message else None


def stop_once(run: Path, chance: random.Random, found: Counter) -> tuple[int, float]:
    """Exit code and seconds from the signal to the end."""
    pid, out = fork(run)
    done = told(out, LIMIT)
    time.sleep(chance.uniform(0, SPAN))
    began = time.monotonic()
    for _ in range(chance.choice([1, 1, 2, 3])):
        number, send = chance.choice(SIGNALS), chance.choice([os.kill, os.killpg])
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
        found[number.name] += 1
        time.sleep(chance.choice([0, 0.001, 0.02]))
    code = ended(pid, began + LIMIT)
    seconds = time.monotonic() - began
    while (step := told(out, 0)) is not None:
        done = step
    os.close(out)
    found["left behind"] += left_behind(pid)
    if code == 75:
        newest = newest_state(run / "states")
        found["lost"] += newest is None or newest[1]["done"] != done
    return code, seconds


def ended(pid: int, until: float) -> int | None:
    """Exit code; None if it had to be killed."""
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def left_behind(group: int) -> bool:
    for _ in range(1000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)
    return True


def finish(run: Path) -> dict:
    pid, out = fork(run)
    while told(out, LIMIT) is not None:
        pass
    os.close(out)
    if ended(pid, time.monotonic() + LIMIT) != 0:
        raise SystemExit(f"a run does not end: {Path(f'{run}.log').read_text()[-2000:]}")
    return newest_state(run / "states")[1]


@contextlib.contextmanager
def busy():
    loops = []
    for _ in range(os.cpu_count()):
        pid = os.fork()
        if not pid:
            parent = os.getppid()
            while os.getppid() == parent:
                sum(range(10**5))
            os._exit(0)
        loops.append(pid)
    try:
        yield
    finally:
        for pid in loops:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def many(folder: Path, signals: int, seed: int) -> dict:
    chance, found, codes, slowest, differ = random.Random(seed), Counter(), Counter(), 0.0, 0
    multimodal.train.loop.TrainingLog = tiny_run.Quiet  # TensorBoard's files take longer than the run
    tiny_run.loop(folder / "warm", steps=1).fit()  # imports the late imports before forking
    with busy() if signals >= BUSY else contextlib.nullcontext():
        unbroken, number = finish(folder / "unbroken"), 0
        while codes[75] < signals:
            run, code = folder / f"run-{number}", 75
            while code == 75 and codes[75] < signals:
                code, seconds = stop_once(run, chance, found)
                codes[code], slowest = codes[code] + 1, max(slowest, seconds)
                if codes.total() % 50 == 0:
                    print(dict(codes), dict(found), f"slowest {slowest:.2f} s", file=sys.stderr, flush=True)
            if code not in (0, 75):
                print(f"{run}: {code}: {Path(f'{run}.log').read_text()[-2000:]}", file=sys.stderr, flush=True)
            differ += not same(finish(run), unbroken)
            number += 1
    return {"stopped": codes[75], "hung": codes[None], "codes": {str(code): count for code, count in codes.items()},
            "lost": found["lost"], "left behind": found["left behind"], "runs": number, "differ": differ,
            "slowest": round(slowest, 2), "sent": {n.name: found[n.name] for n in SIGNALS}}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(many(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
