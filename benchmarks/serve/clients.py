"""Clients of a server: threads with a connection each, and live streams at the pace of speech."""

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import numpy as np

CHUNK = 0.1  # seconds of sound in a message


class Call(NamedTuple):
    """A request: path, type and body."""

    path: str
    kind: str
    body: bytes


def form(file: bytes) -> tuple[str, bytes]:
    head = b'--edge\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return "multipart/form-data; boundary=edge", head + file + b"\r\n--edge--\r\n"


def load(
    port: int, calls: Sequence[Call], clients: int, most: int, seconds: float, read: Callable[[dict], object]
) -> tuple[list[float], float, dict[int, object]]:  # fmt: skip
    """Latencies (s) of at most `most` requests begun within `seconds`, the time from the first to the last answer, and
    what `read` finds in the answer to each call."""
    numbers, lock = count(), threading.Lock()
    latencies, found = list[float](), dict[int, object]()
    begun = time.perf_counter()

    def client(_: int) -> None:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while True:
            with lock:
                number = next(numbers)
            start = time.perf_counter()
            if number >= most or start - begun > seconds:
                break
            call = calls[number % len(calls)]
            line.request("POST", call.path, call.body, {"content-type": call.kind})
            answer = line.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise OSError(f"{call.path}: {answer.status} {body[:200]!r}")
            latencies.append(time.perf_counter() - start)
            found[number % len(calls)] = read(json.loads(body))
        line.close()

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return latencies, time.perf_counter() - begun, found


def live(port: int, samples: np.ndarray, streams: int) -> list[float]:
    """Latencies (s) of the lines of so many live streams of 16-bit samples at 16 kHz, as the server tells them: from
    the last sample needed to the line."""
    from websockets.sync.client import connect

    def one(number: int) -> list[float]:
        with connect(f"ws://127.0.0.1:{port}/v1/audio/stream?rate=16000", open_timeout=30, close_timeout=10) as socket:
            time.sleep(CHUNK * number / streams)  # streams do not speak in time
            begun, size = time.perf_counter(), int(CHUNK * 16_000)
            for sent, first in enumerate(range(0, len(samples), size), 1):
                socket.send(samples[first : first + size].tobytes())
                time.sleep(max(0.0, begun + sent * CHUNK - time.perf_counter()))
            socket.send("end")
            lines = [json.loads(message) for message in socket]
        return [line["latency"] for line in lines if line["type"] in ("partial", "final")]

    with ThreadPoolExecutor(streams) as pool:
        return [latency for own in pool.map(one, range(streams)) for latency in own]


class Used(NamedTuple):
    """Memory (MB) and processor time (s) of a process and its descendants."""

    memory: float
    seconds: float


def used(process: int) -> Used:
    memory, seconds, waiting = 0.0, 0.0, [process]
    while waiting:
        one = waiting.pop()
        try:
            with open(f"/proc/{one}/status") as file:
                memory += next((int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS")), 0.0)
            with open(f"/proc/{one}/stat") as file:
                seconds += sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
            with open(f"/proc/{one}/task/{one}/children") as file:
                waiting += map(int, file.read().split())
        except FileNotFoundError:
            continue
    return Used(memory, seconds)
