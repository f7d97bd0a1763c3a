"""CLIP: encoding, preprocessing, tokenization and zero-shot evaluation, beside open_clip, timm, OpenVINO, ONNX Runtime,
tokenizers and CLIP_benchmark."""

from typing import Any

from benchmarks.suite.cases import Candidate, Case, Options

PEERS, KINDS = "benchmarks.peers", ("float32", "bfloat16")
CHECKS = {"float32": ("unit", 1e-5), "bfloat16": ("cosine", 1e-2)}
OPERATIONS = {"ViT-B-16": 35.1e9}  # multiply-adds × 2 an image
PROMPTS = 128  # open_clip encodes them in 10 s on one core
SIZES = {"long side 400": (400, 300), "short side 400": (533, 400)}


def cases(options: Options) -> list[Case]:
    batches, sizes = ((1,), list(SIZES)[:1]) if options.tiny else ((1, 8), SIZES)
    return [
        *(pictures("ViT-B-16", batch, options) for batch in batches),
        texts("ViT-B-32", options),
        tokenizing(options),
        *(reading(name, options) for name in sizes),
        zeroshot("ViT-B-32", options),
    ]


def both(load: str, name: str, settings: dict[str, Any], library: str = "multimodal") -> tuple[Candidate, ...]:
    """One candidate in each kind of arithmetic."""
    return tuple(Candidate(f"{name} {kind}", f"{PEERS}.{load}", settings | {"kind": kind}, library, kind)
                 for kind in KINDS)  # fmt: skip


def pictures(name: str, batch: int, options: Options) -> Case:
    settings = {"name": name, "batch": batch, "tiny": options.tiny}
    return Case(
        "vision", f"{name}, {batch} image{'s' * (batch > 1)}", "picture", batch,
        (
            *both("vision.ours:encoder", "ours", settings),
            Candidate("open_clip float32", f"{PEERS}.vision.openclip:encoder", settings, "open_clip_torch"),
            *both("vision.timm_vit:encoder", "timm", settings, "timm"),
            *both("vision.openvino_vit:encoder", "OpenVINO", settings, "openvino"),
            Candidate("ONNX Runtime float32", f"{PEERS}.vision.onnx_vit:encoder", settings, "onnxruntime"),
        ),
        reference="open_clip float32", checks=CHECKS, prepare=f"{PEERS}.vision.openclip:prepare", settings=settings,
        operations=OPERATIONS[name] * batch,
    )  # fmt: skip


def texts(name: str, options: Options) -> Case:
    count = 20 if options.tiny else PROMPTS
    settings = {"name": name, "count": count, "tiny": options.tiny}
    return Case(
        "vision", f"{name}, {count} prompts, strings to vectors", "prompt", count,
        (
            *both("vision.ours:texts", "ours", settings),
            Candidate("open_clip float32", f"{PEERS}.vision.openclip:texts", settings, "open_clip_torch"),
        ),
        reference="open_clip float32", checks=CHECKS, prepare=f"{PEERS}.vision.openclip:prepare_prompts",
        settings=settings,
        rounds=2,
    )  # fmt: skip


def tokenizing(options: Options) -> Case:
    count = 500 if options.tiny else 10_000
    return Case(
        "vision", f"CLIP's tokens of {count:,} captions", "caption", count,
        (
            Candidate("ours", f"{PEERS}.vision.ours:tokenizing", kind="ids"),
            Candidate("tokenizers encode_batch_fast", f"{PEERS}.vision.clip_captions:tokenizers", library="tokenizers",
                      kind="ids"),
            Candidate("open_clip", f"{PEERS}.vision.clip_captions:open_clip", library="open_clip_torch", kind="ids"),
        ),
        reference="open_clip", checks={"ids": ("differing", 0.0)}, prepare=f"{PEERS}.vision.clip_captions:prepare",
        settings={"count": count} | _data(options),
    )  # fmt: skip


def reading(name: str, options: Options) -> Case:
    count = 8 if options.tiny else 96
    return Case(
        "vision", f"{count} JPEGs, {name}, to pixels", "picture", count,
        (
            Candidate("ours", f"{PEERS}.vision.ours:reading", kind="pixels"),
            Candidate("open_clip", f"{PEERS}.vision.clip_jpegs:open_clip", library="open_clip_torch", kind="pixels"),
            Candidate("Pillow's decoder alone", f"{PEERS}.vision.clip_jpegs:decoder", library="pillow", kind="decoder",
                      floor=True),
        ),
        reference="open_clip", checks={"pixels": ("near", 0.0)}, prepare=f"{PEERS}.vision.clip_jpegs:prepare",
        settings={"count": count, "size": SIZES[name]} | _data(options), threads=(1,),
    )  # fmt: skip


def zeroshot(name: str, options: Options) -> Case:
    """CLIP_benchmark in float32: its default, autocast to bfloat16, takes more than twice as long on a CPU. Our
    bfloat16 may change some predictions of a random model."""
    settings = {"name": name, "each": 1 if options.tiny else 2, "tiny": options.tiny}
    count, load = 20 * settings["each"], f"{PEERS}.vision.clip_benchmark"
    return Case(
        "vision", f"{name}, zero-shot evaluation of {count} images", "picture", count,
        (
            *both("vision.ours:zeroshot", "ours", settings),
            Candidate("CLIP_benchmark float32", f"{load}:evaluate", settings, "clip-benchmark"),
        ),
        reference="CLIP_benchmark float32", checks={"float32": ("near", 1e-6), "bfloat16": ("near", 0.5)},
        prepare=f"{load}:prepare_folder", settings=settings, rounds=1,
    )  # fmt: skip


def _data(options: Options) -> dict[str, str]:
    return {"data": str(options.data)} if options.data else {}
