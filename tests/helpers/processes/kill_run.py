"""Kill a training run at random moments and resume it each time.

    python -m tests.helpers.processes.kill_run FOLDER 50 0

The runs are forks of this program, which has imported everything, so that a kill costs no start. A run tells each
step through a pipe and saves after each one; it is killed within the time of one step and save after a random message.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.utils.tensorboard

from multimodal.errors import CheckpointError
from multimodal.train.checkpoint.atomic import check, newest_state, saved_states
from tests.helpers import tiny_run

WIDTH, STEPS = 96, 90  # a state of 4 MB


def train(run: Path, messages: int) -> None:
    loop = tiny_run.loop(run, width=WIDTH, steps=STEPS, save_every=1, log_every=10**6, resume=True)
    step = loop.step

    def told(batches):
        metrics = step(batches)
        os.write(messages, loop.done.to_bytes(4))
        return metrics

    loop.step = told
    loop.fit()


def fork(run: Path) -> tuple[int, int]:
    """Process id and the read end of its pipe of steps."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    try:
        train(run, into)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill_once(run: Path, chance: random.Random, pace: float) -> tuple[int | None, float]:
    """Last reported step (None: killed before one) and seconds per step."""
    pid, out = fork(run)
    told, began = None, 0.0
    for _ in range(chance.randrange(4)):
        message = os.read(out, 4)
        if not message:
            break
        now = time.monotonic()
        told, pace, began = int.from_bytes(message), now - began if began else pace, now
    time.sleep(chance.uniform(0, pace))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(out)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a resumed run failed after {told}")
    return told, pace


def finish(run: Path) -> dict:
    pid, out = fork(run)
    while os.read(out, 4):
        pass
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the last run failed")
    return newest_state(run / "states")[1]


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    chance, pace, newest = random.Random(seed), 0.2, 0
    killed = {"in a save": 0, "damaged": 0, "backwards": 0, "lost": 0}
    run, left = folder / "killed", set()
    for _ in range(kills):
        told, pace = kill_once(run, chance, pace)
        states = saved_states(run / "states")
        parts = {path.stat().st_ino for path in (run / "states").glob(".state-*.partial")}
        killed["in a save"], left = killed["in a save"] + bool(parts - left), parts
        for path in states:
            try:
                check(path)
            except CheckpointError:
                killed["damaged"] += 1
        now = int(states[-1].name.split("-")[1]) if states else 0
        killed["backwards"] += now < newest
        killed["lost"] += told is not None and now < told - 1  # the save after the step before was complete
        newest = now
    result = killed | {"kills": kills, "steps": newest, "equal": same(finish(run), finish(folder / "unbroken"))}
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
