"""Mutated FAISS files, each opened and searched in a forked child under limits of time and memory.

    python tests/helpers/processes/faiss_fuzz.py 2000

prints how many were refused, how many were searched, and each that crashed, hung or raised anything else."""

import os
import random
import resource
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path

import faiss
import numpy as np
import torch

from multimodal.errors import CheckpointError
from multimodal.tasks.retrieve import nearest

COUNT, WIDTH = 300, 8
SECONDS, MEMORY = 10, 1 << 30  # of a child; the memory beyond what it has at its start
EXTREMES = (0, 1, 2, 0x7F, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def original() -> bytes:
    values = np.random.default_rng(0).standard_normal((COUNT, WIDTH)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    with tempfile.TemporaryDirectory() as folder:
        nearest.build_search(values, Path(folder, "ivf"))
        return Path(folder, "ivf").read_bytes()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to three of: a flipped bit, an extreme number (mostly in the first kilobyte), a cut, a splice, a doubling."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(len(made), 1024) if rng.random() < 0.6 else len(made))
        way = rng.choice(("bit", "u4", "u8", "u8", "cut", "splice", "double", "tail"))
        if way == "bit":
            made[at] ^= 1 << rng.randrange(8)
        elif way in ("u4", "u8"):
            size = int(way[1])
            made[at : at + size] = struct.pack("<Q", rng.choice(EXTREMES))[:size]
        elif way == "cut":
            del made[at : at + rng.choice((1, 4, 8, 64, len(made)))]
        elif way == "splice":
            other = rng.randrange(len(made))
            made[at : at + 16] = made[other : other + 16]
        elif way == "double":
            made[at:at] = made[at : at + rng.choice((4, 8, 64))]
        else:  # behind the tables: codes and rows
            place = rng.randrange(len(made) // 2, len(made))
            made[place : place + 4] = struct.pack("<i", rng.choice((-2, -1, 0, COUNT - 1, COUNT, 2**30)))
        if not made:
            return b""
    return bytes(made)


def use(path: Path) -> None:
    """Open and search, as `Index.search` does."""
    index = nearest.open_search(path, COUNT, WIDTH)
    queries = torch.nn.functional.normalize(torch.randn(5, WIDTH), dim=-1)
    vectors = np.zeros((COUNT, WIDTH), np.float32)
    for effort in (1, 8, 64):
        found = nearest.candidates(index, queries, 20, effort)
        nearest.rescored(vectors, queries, found, 5)


def child(path: Path) -> str:
    """Outcome of one file: refused, searched, or the fault."""
    number = os.fork()
    if number == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            use(path)
            os._exit(0)
        except CheckpointError as error:
            os._exit(1 if len(str(error).splitlines()) == 1 else 2)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(3)
    status = os.waitpid(number, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return {0: "searched", 1: "refused", 2: "several lines"}.get(os.waitstatus_to_exitcode(status), "exception")


def main(count: int, seed: int = 0) -> Counter:
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    rng, counts = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as folder:
        data = original()
        for number in range(count):
            path = Path(folder, "search.faiss")
            path.write_bytes(mutated(data, rng))
            told = child(path)
            counts[told] += 1
            if told not in ("searched", "refused"):
                print(f"{number} (seed {seed}): {told}")
    return counts


if __name__ == "__main__":
    for told, number in sorted(main(int(sys.argv[1])).items()):
        print(told, number)
