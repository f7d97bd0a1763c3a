"""Pictures a second of CLIP's picture towers on a GPU, beside timm in the same run.

    python benchmarks/vision_gpu.py --out FOLDER
    python benchmarks/vision_gpu.py --out FOLDER --device cpu --tiny     the same steps at a tiny size, without graphs

Random weights, the same in both libraries; pixels are on the device. In bfloat16: eager, as a CUDA graph, and compiled
by torch.compile as a CUDA graph; attention as PyTorch chooses it, and with cuDNN's asked for first, then flash,
memory-efficient, plain. timm's is all in bfloat16, its pixels too. Vectors are compared with timm's in float32 before
anything is timed; the candidates take turns within a round, of which each times several batches in a row. Figures: the
most pictures a second over the rounds, and the median of the rounds. Kept in FOLDER/vision_gpu.json, which a second
call adds to.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vision_peers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from multimodal.weights import compute

BATCHES = {"ViT-B-16": (256, 1024), "ViT-L-14": (128, 512)}
TINY = {"embed_dim": 64, "vision_cfg": {"image_size": 224, "layers": 2, "width": 768, "patch_size": 16}}
ASKED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Encode = Callable[[Tensor], Tensor]


@contextmanager
def attention(kind: str) -> Iterator[None]:
    with sdpa_kernel(ASKED, set_priority=True) if kind == "cuDNN" else nullcontext():
        yield


def within(encode: Encode, kind: str) -> Encode:
    def run(pixels: Tensor) -> Tensor:
        with attention(kind):
            return encode(pixels)

    return run


def graphed(encode: Encode, pixels: Tensor) -> Encode:
    """The same kernels in one launch; pixels are copied to where the graph reads them."""
    held, stream = pixels.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            encode(held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vectors = encode(held)

    def run(new: Tensor) -> Tensor:
        held.copy_(new)
        graph.replay()
        return vectors

    return run


def candidates(ours: Encode, timm: nn.Module, pixels: Tensor) -> dict[str, Encode]:
    """Every way of every library. Each is compiled for itself: what attention it takes is settled then."""
    found: dict[str, Encode] = {}
    for title, encode in (("ours", ours), ("timm", lambda x: timm(x.bfloat16()))):
        for kind in ("PyTorch's choice", "cuDNN"):
            torch.compiler.reset()
            eager = within(encode, kind)
            found[f"{title}, eager, {kind}"] = eager
            mode = "max-autotune-no-cudagraphs" if pixels.is_cuda else None
            compiled = within(torch.compile(encode, dynamic=False, mode=mode), kind)
            compiled(pixels)
            if pixels.is_cuda:  # captured at once: another compiling of the same code would take this one's place
                found[f"{title}, graph, {kind}"] = graphed(eager, pixels)
                found[f"{title}, compiled and graph, {kind}"] = graphed(compiled, pixels)
            else:
                found[f"{title}, compiled, {kind}"] = compiled
    return found


def check(runs: dict[str, Encode], pixels: Tensor, right: Tensor) -> dict[str, float]:
    """1 - cosine of the worst picture. Ends the program where one is far."""
    found = {}
    for name, run in runs.items():
        far = 1 - torch.nn.functional.cosine_similarity(run(pixels).float(), right, dim=-1).min().item()
        found[name] = float(f"{far:.1e}")
        if not far <= 1e-2:
            raise SystemExit(f"{name}: {far:.1e} from timm's vectors in float32")
    return found


def seconds(run: Callable[[], Any], repeats: int, wait: Callable[[], None]) -> float:
    run()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats


def measure(name: str, batch: int, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    theirs = vision_peers.open_clip_model(name, **(TINY if options.tiny else {}))
    plain = vision_peers.checkpoint(theirs, name, **(TINY if options.tiny else {}))
    timm = vision_peers.timm_model(theirs, name, **({"depth": 2} if options.tiny else {})).to(device)
    pixels = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)).to(device)
    right = torch.cat([timm(part) for part in pixels.split(64)])
    timm = timm.bfloat16()
    if device.type == "cpu":  # packed maps cannot be compiled; a GPU has none
        compute.can_pack = lambda: False
    ours = compute.for_inference(plain, "bfloat16", device).model.encode_image
    runs = candidates(ours, timm, pixels)
    distances = check(runs, pixels, right)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken: dict[str, list[float]] = {run: [] for run in runs}
    for _ in range(options.rounds):
        for run, encode in runs.items():
            taken[run].append(seconds(partial(encode, pixels), options.repeats, wait))
    return {
        "pictures a second, best": {run: round(batch / min(times), 1) for run, times in taken.items()},
        "pictures a second, median": {run: round(batch / statistics.median(t), 1) for run, t in taken.items()},
        "1 - cosine to timm float32": distances,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--batch_size", type=int, nargs="+", help="instead of each model's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="batches in a row in each round")
    parser.add_argument("--tiny", action="store_true", help="two layers, to see that it runs")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU: nothing was measured")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "vision_gpu.json"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for name in options.models:
        for batch in options.batch_size or BATCHES[name]:
            with torch.inference_mode():
                found = measure(name, batch, device, options)
            kept = json.loads(path.read_text()) if path.exists() else {}
            title = f"{machine}, {name}{' tiny' * options.tiny}, batch {batch}"
            kept[title] = {"PyTorch": torch.__version__} | found
            path.write_text(json.dumps(kept, indent=1) + "\n")
            print(json.dumps({title: found}, indent=1), flush=True)


if __name__ == "__main__":
    main()
