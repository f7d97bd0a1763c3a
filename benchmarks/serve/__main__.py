"""Load of servers over loopback.

    python -m benchmarks.serve [--jobs asr whisper text image live memory] [--out FILE] [--python PATH]

For each job the servers run beside each other and get the same requests in turn, from 1, 8, 32 and 128 clients
(Whisper: 1, 8 and 16) with a connection each: requests a second, latencies and memory (with that of their processes).
A level ends after `--most` requests or `--seconds`; rounds are interleaved, and the median of rates is kept. PATH is
a Python that has the peers: litserve, faster-whisper, infinity-emb. Other work on the machine slows
all servers: read the ratios, and the processor time of a request.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

from benchmarks.serve import jobs
from benchmarks.serve.clients import live, load, used
from benchmarks.suite import machine

JOBS = {"asr": jobs.recognition, "whisper": jobs.whisper, "text": jobs.embedding, "image": jobs.images}
PORT = 8431
STREAMS, GROWTH = 8, 1000


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[0])
    p.add_argument("--jobs", nargs="+", choices=[*JOBS, "live", "memory"], default=[*JOBS, "live", "memory"])
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--most", type=int, default=256, help="requests of a level")
    p.add_argument("--seconds", type=float, default=8.0, help="of a level")
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    found: dict[str, Any] = {"machine": machine.describe("cpu"), "load before": os.getloadavg(), "rows": []}
    for name in args.jobs:
        with tempfile.TemporaryDirectory() as folder:
            if name in JOBS:
                found["rows"] += compared(JOBS[name](Path(folder)), args)
            else:
                found[name] = {"live": streamed, "memory": grown}[name](args)
                print(f"{name}: {found[name]}", flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")


def compared(job: jobs.Comparison, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, answers, plain = [], [], []
    with ExitStack() as stack:
        ports = [PORT + number for number in range(len(job.candidates))]
        servers = [stack.enter_context(jobs.running(one, port, args.python))
                   for one, port in zip(job.candidates, ports, strict=True)]  # fmt: skip
        for one, port, server in zip(job.candidates, ports, servers, strict=True):
            ready(one, port, server)
            load(port, one.calls, 2, 2 * len(one.calls), 60, job.read)  # warm
        for clients in job.clients:
            runs: list[list[tuple]] = [[] for _ in job.candidates]
            for _ in range(args.rounds):
                for place, one in enumerate(job.candidates):
                    before = used(servers[place].pid).seconds
                    latencies, seconds, read = load(ports[place], one.calls, clients, args.most, args.seconds, job.read)
                    runs[place].append((latencies, seconds, used(servers[place].pid).seconds - before))
                    answers.append(read)
                if clients == 1 and job.plain is not None:
                    plain += [timed(job.plain, number) for number in range(16)]
            for place, one in enumerate(job.candidates):
                rows.append(row(job, one, clients, runs[place], used(servers[place].pid).memory))
                print(json.dumps(rows[-1]), flush=True)
    agree = [sum(one[key] == answers[0][key] for key in one if key in answers[0]) for one in answers]
    rows[0]["answers equal"] = f"{sum(agree)} of {sum(len(one) for one in answers)}"
    if plain:
        rows[0]["plain function p50 ms"] = round(1e3 * statistics.median(plain), 1)
    print(json.dumps(rows[0]), flush=True)
    return rows


def timed(work: Any, number: int) -> float:
    begun = time.perf_counter()
    work(number)
    return time.perf_counter() - begun


def row(job: jobs.Comparison, one: jobs.TestedServer, clients: int, runs: list[tuple], memory: float) -> dict[str, Any]:
    latencies = sorted(latency for own, *_ in runs for latency in own)
    at = lambda share: round(1e3 * latencies[min(len(latencies) - 1, int(share * len(latencies)))], 1)
    rate = statistics.median(len(own) / seconds for own, seconds, _ in runs)
    work = sum(one for *_, one in runs) / len(latencies)
    return {"job": job.name, "server": one.name, "clients": clients, "requests": len(latencies),
            "rate": round(rate, 2), "p50 ms": at(0.5), "p95 ms": at(0.95), "p99 ms": at(0.99),
            "processor ms": round(1e3 * work, 1), "memory MB": round(memory)}  # fmt: skip


def ready(one: jobs.TestedServer, port: int, server: Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            line.request("GET", one.ready)
            if line.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{one.name}: not ready after {seconds:g} s, exit {server.poll()}")


def streamed(args: argparse.Namespace) -> dict[str, Any]:
    """Latency of live streams side by side."""
    candidate = jobs.TestedServer("ours", jobs.ours("asr-conformer-en"), [])
    with jobs.running(candidate, PORT, args.python) as server:
        ready(candidate, PORT, server)
        live(PORT, jobs.samples(), 1)
        before, begun = used(server.pid).seconds, time.perf_counter()
        latencies = sorted(live(PORT, jobs.samples(), STREAMS))
        busy = (used(server.pid).seconds - before) / (time.perf_counter() - begun)
    at = lambda share: round(1e3 * latencies[int(share * len(latencies))])
    return {"streams": STREAMS, "lines": len(latencies), "p50 ms": at(0.5), "p95 ms": at(0.95),
            "processors used": round(busy, 2)}  # fmt: skip


def grown(args: argparse.Namespace) -> dict[str, Any]:
    """Memory that requests leave behind."""
    candidate = jobs.TestedServer("ours", jobs.ours("sentence-mini", "asr-conformer-en"), [])
    call = jobs.Call("/v1/embeddings", "application/json", json.dumps({"input": jobs.TEXTS}).encode())
    sound = jobs.Call("/v1/audio/transcriptions", *jobs.form(jobs.recorded(0, 2.0)))
    calls = [call] * 15 + [sound]
    with jobs.running(candidate, PORT, args.python) as server:
        ready(candidate, PORT, server)
        load(PORT, calls, 8, 128, 60, bool)
        before = used(server.pid).memory
        latencies, *_ = load(PORT, calls, 8, GROWTH, 90, bool)
        return {
            "requests": len(latencies),
            "MB before": round(before),
            "grown MB": round(used(server.pid).memory - before, 1),
        }


if __name__ == "__main__":
    main()
