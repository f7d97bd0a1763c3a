"""Training steps on one GPU: CLIP beside open_clip, GPT-2 124 M beside nanoGPT or transformers, ViT-S/16 beside timm.

The candidates are those of the job `train`; each compiles while loading. All candidates of a case fit into 80 GB."""

from typing import Any

from benchmarks.suite.cases import OURS, Candidate, Case, Options

PEERS = "benchmarks.peers.train."
CHECKS = {"bfloat16": ("near", 0.05)}  # losses of the first and the third step
STEPS = 10  # per run; logging reads some of the losses
# multiply-adds × 2 of one image and its text of 77 tokens, forward and, twice as many, back
CLIP = {"ViT-B-16": 3 * 41.1e9, "ViT-B-32": 3 * 14.8e9}
VIT_S = 3 * 9.2e9
GPT2 = 6 * 124.4e6 + 12 * 12 * 768 * 1024  # per token, as nanoGPT counts: half of its attention is masked


def cases(options: Options) -> list[Case]:
    if options.tiny:
        return [clip("ViT-B-16", 2, options), gpt("baby", 1, options), vit(2, options)]
    return [
        clip("ViT-B-16", 128, options), clip("ViT-B-32", 384, options), gpt("gpt2", 16, options), vit(384, options),
        clip("ViT-B-16", 320, options, most=False),
    ]  # fmt: skip


def candidate(name: str, load: str, settings: dict[str, Any], options: Options, library: str = OURS) -> Candidate:
    """On a GPU compiled, and replayed as a CUDA graph, if the name says so."""
    gpu = options.device == "cuda"
    ways = {way: gpu for way in ("compiled", "graph") if way in name}
    settings = settings | {"compile": ways.get("compiled", False), "steps": steps(options)}
    settings |= {"graphs": True} if ways.get("graph") else {}
    return Candidate(name, "benchmarks.peers.cuda.common:early", {"load": load, "settings": settings}, library,
                     "bfloat16")  # fmt: skip


def steps(options: Options) -> int:
    return 1 if options.tiny else STEPS


def both(load: str, settings: dict[str, Any], options: Options) -> list[Candidate]:
    """Weights and optimizer in float32, and in bfloat16."""
    return [candidate(f"ours {kind}, compiled, graph", f"{PEERS}ours:{load}", settings | {"precision": kind}, options)
            for kind in ("autocast", "bfloat16")]  # fmt: skip


def case(
    title: str, unit: str, units: float, operations: float, candidates: list[Candidate], prepare: str,
    settings: dict[str, Any], options: Options,
) -> Case:  # fmt: skip
    """`units` and `operations` are per step. The first peer is the reference."""
    reference = next(one.name for one in candidates if not one.ours)
    return Case(
        "cuda_train", title, unit, units * steps(options), tuple(candidates), reference, CHECKS, PEERS + prepare,
        settings, operations=None if options.tiny else operations * units * steps(options), threads=threads(options),
    )  # fmt: skip


def threads(options: Options) -> tuple[int]:
    """Threads that launch kernels and compile."""
    return (16 if options.device == "cuda" else 1,)


def clip(name: str, batch: int, options: Options, most: bool = True) -> Case:
    """All read 77 tokens per caption, except one that trims captions as our tokenizers do. `most`: all but two."""
    settings = {"name": name, "batch": batch, "image": 32 if options.tiny else 224, "tiny": options.tiny}
    amp, short = ({**settings, "precision": precision} for precision in ("autocast", "bfloat16"))
    peer = PEERS + "openclip:step"
    found = both("clip", settings | {"trimmed": False}, options)[0 if most else 1 :]
    if most:
        found.append(
            candidate("ours bfloat16, captions of 24 tokens, compiled, graph", PEERS + "ours:clip", short, options)
        )
        found.append(candidate("open_clip amp_bf16", peer, amp, options, "open_clip_torch"))
    if not options.tiny:
        found.append(candidate("open_clip amp_bf16, compiled", peer, amp, options, "open_clip_torch"))
    title = f"CLIP {name} training step, {batch} pairs"
    return case(title, "image", batch, CLIP[name], found, "openclip:prepare", settings, options)


def gpt(name: str, batch: int, options: Options) -> Case:
    settings = {"name": name, "batch": batch, "vocabulary": 512 if options.tiny else 50304, "tiny": options.tiny}
    amp, context = settings | {"precision": "autocast"}, 256 if options.tiny else 1024
    if options.nanogpt:
        checkout = amp | {"checkout": str(options.nanogpt.resolve())}
        peer = candidate("nanoGPT, compiled", PEERS + "gpt:nanogpt", checkout, options, "nanoGPT")
    else:
        peer = candidate("transformers, compiled", PEERS + "gpt:transformers", amp, options, "transformers")
    title = f"GPT-2 124 M training step, {batch} rows of {context}"
    found = [*both("gpt", settings, options), peer]
    return case(title, "token", batch * context, GPT2, found, "gpt:prepare", settings, options)


def vit(batch: int, options: Options) -> Case:
    settings = {"name": "vit_small_patch16_224", "batch": batch, "image": 32 if options.tiny else 224,
                "tiny": options.tiny}  # fmt: skip
    amp, peer = settings | {"precision": "autocast"}, PEERS + "timm:step"
    found = [*both("vit", settings, options), candidate("timm", peer, amp, options, "timm")]
    if not options.tiny:
        found.append(candidate("timm, compiled", peer, amp, options, "timm"))
    title = f"ViT-S/16 supervised training step, {batch} images"
    return case(title, "image", batch, VIT_S, found, "timm:prepare", settings, options)
