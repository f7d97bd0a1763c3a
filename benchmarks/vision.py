"""Features of pictures and texts beside their peers in one run.

    python benchmarks/vision.py                     CPU, one and two threads: pictures, texts, tokenizing, reading
    python benchmarks/vision.py --only image text   some of the parts
    python benchmarks/vision_gpu.py --out FOLDER    what a GPU does

Pictures through ViT-B/16, 1,000 prompts through ViT-B/32's text tower: open_clip's models with random weights, the same
in every library (timm's is its `vit_base_patch16_clip_224`). Each thread count is a process of its own, with every
library held to it. All outputs are compared before anything is timed. The candidates take turns within a round, so
that drift of the machine's speed falls on all alike; times are the least over the rounds, ratios medians of the rounds'
ratios (above 1: ours is faster), and beside them the ratios of the least times. Texts are measured from strings to
vectors, in a third of the rounds. Printed, and kept in `vision.json` beside this file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transcribe import compare, show

HERE = Path(__file__).resolve().parent
PARTS = ("image", "text", "tokenizing", "reading")
BATCHES = (1, 8)
PROMPTS = 1000
NEAR = {"float32": 1e-5, "bfloat16": 1e-2}  # largest difference of a unit vector's numbers; 1 - cosine

Runs = dict[str, Callable[[], Any]]


def errors(runs: Runs, right: Any) -> dict[str, float]:
    """How far the unit vectors of each are from the reference's. Ends the program where one is far."""
    found = {}
    for name, run in runs.items():
        kind = name.split()[-1]
        vectors = run().float()
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
        far = (vectors - right).abs().max() if kind == "float32" else 1 - (vectors * right).sum(-1).min()
        found[name] = float(f"{far.item():.1e}")
        if not found[name] <= NEAR[kind]:
            raise SystemExit(f"{name}: {found[name]} from open_clip's vectors")
    return found


def image(threads: int, rounds: int) -> dict[str, Any]:
    """Vectors of ViT-B/16, a picture at a time and 8 of them."""
    import torch
    import vision_peers

    from multimodal.weights.compute import for_inference

    name = "ViT-B-16"
    theirs = vision_peers.open_clip_model(name)
    plain = vision_peers.checkpoint(theirs, name)
    made = {f"ours {kind}": for_inference(plain, kind).model.encode_image for kind in ("float32", "bfloat16")}
    timm = vision_peers.timm_model(theirs, name)
    timm_bfloat16 = vision_peers.timm_model(theirs, name).bfloat16()
    found = {}
    for batch in BATCHES:
        pixels = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1))
        peers = {
            "open_clip float32": theirs.encode_image, "timm float32": timm,
            "timm bfloat16": lambda x: timm_bfloat16(x.bfloat16()),
            **vision_peers.openvino_models(timm, batch, threads),
        }  # fmt: skip
        ours, others = ({key: partial(run, pixels) for key, run in runs.items()} for runs in (made, peers))
        distances = errors(ours | others, theirs.encode_image(pixels, normalize=True))
        both = {"ours bfloat16": ours["ours bfloat16"]}, {"ours float32": ours["ours float32"]}
        of_ours = compare(*both, rounds, warm=False)  # `errors` has run all of them
        title = f"ViT-B/16, {batch} picture{'s' * (batch > 1)}"
        found[title] = compare(ours, others, rounds, warm=False) | {
            "ours bfloat16 against ours float32": of_ours["times faster"].popitem()[1], "far from open_clip": distances,
        }  # fmt: skip
    return found


def text(threads: int, rounds: int) -> dict[str, Any]:
    """Prompts to vectors of ViT-B/32."""
    import vision_peers

    from multimodal.tasks.texts import text_features
    from multimodal.weights.compute import for_inference

    name, prompts = "ViT-B-32", vision_peers.prompts(PROMPTS)
    theirs = vision_peers.open_clip_model(name)
    plain = vision_peers.checkpoint(theirs, name)
    made = {f"ours {kind}": for_inference(plain, kind).model for kind in ("float32", "bfloat16")}
    ours = {key: partial(text_features, model, plain.tokenizer, prompts) for key, model in made.items()}
    others = {"open_clip float32": partial(vision_peers.open_clip_texts, theirs, prompts)}
    distances = errors(ours, others["open_clip float32"]())  # which warms all of them
    lengths = plain.tokenizer.batch(prompts).mask.sum(1).float()
    found = compare(ours, others, max(1, rounds // 3), warm=False)
    return {f"ViT-B/32, {PROMPTS} prompts": found | {
        "far from open_clip": distances, "tokens a prompt": round(lengths.mean().item(), 2),
    }}  # fmt: skip


def measured(part: str, threads: int, rounds: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    if part in ("tokenizing", "reading"):
        import vision_reading

        return {part: getattr(vision_reading, part)(rounds)}
    with torch.inference_mode():
        return {"image": image, "text": text}[part](threads, rounds)


def in_process(part: str, threads: int, rounds: int) -> dict[str, Any]:
    """One part at one thread count, from a process that has never known another."""
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = os.environ | {name: str(threads) for name in limits}
    command = [sys.executable, __file__, "--rounds", str(rounds), "--only", part, "--child", str(threads)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to measure")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of pictures and texts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.only[0], options.child, options.rounds)))
        return
    path = HERE / "vision.json"
    machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    for part in options.only:
        for threads in options.threads if part in ("image", "text") else [1]:
            name = f"{part}, {threads} thread{'s' * (threads > 1)}"
            found = in_process(part, threads, options.rounds)
            show(name, found)
            kept = json.loads(path.read_text()) if path.exists() else {}  # each part as it comes
            kept[name] = {"machine": machine, "rounds": options.rounds} | found
            path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
