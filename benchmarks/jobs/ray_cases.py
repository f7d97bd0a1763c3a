"""Files per second of the command and through Ray Data (`recipes/batch_ray.py`) on the same two processors: whole
processes, start included. Ray's side is left out where ray is not installed."""

from benchmarks.suite.cases import Candidate, Case, Options

ACTORS = 2
PEERS = "benchmarks.peers.batch:"


def cases(options: Options) -> list[Case]:
    images, recordings = (40, 4) if options.tiny else (1024, 128)
    return [
        case("classify", "images", images, "image"),
        case("transcribe", "recordings", recordings, "recording"),
    ]


def case(task: str, data: str, count: int, unit: str) -> Case:
    settings = {"task": task, "count": count, "actors": ACTORS}
    return Case(
        "ray", f"{task} {count:,} {data}", unit, count,
        (
            Candidate("ours, the command", PEERS + "plain", settings),
            Candidate(f"Ray, {ACTORS} actors", PEERS + "through_ray", settings, "ray"),
        ),
        reference="ours, the command", checks={"float32": ("differing", 0.0)}, prepare=PEERS + data, settings=settings,
        threads=(2,), rounds=1,
    )  # fmt: skip
