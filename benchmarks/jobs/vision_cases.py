"""CLIP: encoding, preprocessing, tokenization and zero-shot evaluation, beside open_clip, timm, OpenVINO, ONNX Runtime,
tokenizers and CLIP_benchmark."""

from benchmarks.suite.cases import Candidate, Case, Options, in_kinds

PEERS = "benchmarks.peers.vision."
CHECKS = {"float32": ("unit", 1e-5), "bfloat16": ("cosine", 1e-2), "int8": ("cosine", 1e-2)}
KINDS = ("float32", "bfloat16", "int8")
OPERATIONS = {"ViT-B-16": 35.1e9}  # multiply-adds × 2 an image
PROMPTS = 128  # open_clip encodes them in 10 s on one core
SIZES = {"long side 400": (400, 300), "short side 400": (533, 400)}


def cases(options: Options) -> list[Case]:
    batches, sizes = ((1,), list(SIZES)[:1]) if options.tiny else ((1, 8), SIZES)
    return [
        *(images("ViT-B-16", batch, options) for batch in batches),
        texts("ViT-B-32", options),
        tokenizing(options),
        *(reading(name, options) for name in sizes),
        zeroshot("ViT-B-32", options),
    ]


def images(name: str, batch: int, options: Options) -> Case:
    settings = {"name": name, "batch": batch, "tiny": options.tiny}
    return Case(
        "vision", f"{name}, {batch} image{'s' * (batch > 1)}", "image", batch,
        (
            *in_kinds("ours", PEERS + "ours:encoder", settings, kinds=KINDS),
            Candidate("open_clip float32", PEERS + "openclip:encoder", settings, "open_clip_torch"),
            *in_kinds("timm", PEERS + "timm_vit:encoder", settings, "timm"),
            *in_kinds("OpenVINO", PEERS + "graph_vit:openvino", settings, "openvino"),
            Candidate("ONNX Runtime float32", PEERS + "graph_vit:onnx", settings, "onnxruntime"),
        ),
        reference="open_clip float32", checks=CHECKS, prepare=PEERS + "openclip:prepare", settings=settings,
        operations=OPERATIONS[name] * batch,
    )  # fmt: skip


def texts(name: str, options: Options) -> Case:
    count = 20 if options.tiny else PROMPTS
    settings = {"name": name, "count": count, "tiny": options.tiny}
    return Case(
        "vision", f"{name}, {count} prompts, strings to vectors", "prompt", count,
        (
            *in_kinds("ours", PEERS + "ours:texts", settings, kinds=KINDS),
            Candidate("open_clip float32", PEERS + "openclip:texts", settings, "open_clip_torch"),
        ),
        reference="open_clip float32", checks=CHECKS, prepare=PEERS + "openclip:prepare_prompts",
        settings=settings, rounds=2,
    )  # fmt: skip


def tokenizing(options: Options) -> Case:
    count = 500 if options.tiny else 10_000
    return Case(
        "vision", f"CLIP's tokens of {count:,} captions", "caption", count,
        (
            Candidate("ours", PEERS + "ours:tokenizing", kind="ids"),
            Candidate("tokenizers encode_batch_fast", PEERS + "clip_captions:tokenizers", {}, "tokenizers", "ids"),
            Candidate("open_clip", PEERS + "clip_captions:open_clip", {}, "open_clip_torch", "ids"),
        ),
        reference="open_clip", checks={"ids": ("differing", 0.0)}, prepare=PEERS + "clip_captions:prepare",
        settings={"count": count} | _data(options),
    )  # fmt: skip


def reading(name: str, options: Options) -> Case:
    count = 8 if options.tiny else 96
    return Case(
        "vision", f"{count} JPEGs, {name}, to pixels", "image", count,
        (
            Candidate("ours", PEERS + "ours:reading", kind="pixels"),
            Candidate("open_clip", PEERS + "clip_jpegs:open_clip", {}, "open_clip_torch", "pixels"),
            Candidate("Pillow's decoder alone", PEERS + "clip_jpegs:decoder", {}, "pillow", "decoder", floor=True),
        ),
        reference="open_clip", checks={"pixels": ("near", 0.0)}, prepare=PEERS + "clip_jpegs:prepare",
        settings={"count": count, "size": SIZES[name]} | _data(options), threads=(1,),
    )  # fmt: skip


def zeroshot(name: str, options: Options) -> Case:
    """CLIP_benchmark in float32: its default, autocast to bfloat16, takes more than twice as long on a CPU. Our
    bfloat16 may change some predictions of a random model."""
    settings = {"name": name, "each": 1 if options.tiny else 2, "tiny": options.tiny}
    count, load = 20 * settings["each"], PEERS + "clip_benchmark"
    return Case(
        "vision", f"{name}, zero-shot evaluation of {count} images", "image", count,
        (
            *in_kinds("ours", PEERS + "ours:zeroshot", settings),
            Candidate("CLIP_benchmark float32", f"{load}:evaluate", settings, "clip-benchmark"),
        ),
        reference="CLIP_benchmark float32", checks={"float32": ("near", 1e-6), "bfloat16": ("near", 0.5)},
        prepare=f"{load}:prepare_folder", settings=settings, rounds=1,
    )  # fmt: skip


def _data(options: Options) -> dict[str, str]:
    return {"data": str(options.data)} if options.data else {}
