"""Cost as work grows: time and memory per image, label, second of audio or token, as their number or the model grows.
Each series is a curve; its points ascend, so that candidates that become too slow skip the rest."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.jobs import growth_costs as costs
from benchmarks.suite.cases import Candidate, Case, Options, in_kinds

PEERS = "benchmarks.peers."
SPEECH = PEERS + "speech."
OURS = PEERS + "growth.ours:"
EXACT, HALF = ("near", 1e-4), ("cosine", 1e-2)
CHECKS = {"float32": ("unit", 1e-5), "bfloat16": HALF}
# transformers resizes images slightly differently; softmax scores of ten similar labels are compared
SCORES = {"float32": ("near", 2e-3), "bfloat16": ("near", 5e-2)}
CLIP = "ViT-B-32"
TEXT = {"width": 512, "layers": 12}
LABEL_TOKENS = 9.5  # of "a photo of a {}." with a name of ImageNet, and its two ends
VITS = {"tiny": (192, 12, 5.7), "small": (384, 12, 22.1), "base": (768, 12, 86.6), "large": (1024, 24, 304.3)}
WHISPERS = {"tiny": (384, 4, 8.2), "base": (512, 6, 20.6), "small": (768, 12, 88.2)}  # millions in the encoder
GPT2 = {"width": 768, "layers": 12, "vocabulary": 50257}
LLAMA = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 2048,
         "vocab_size": 32000}  # fmt: skip
TOKENS = 24  # a window of audio


def cases(options: Options) -> list[Case]:
    """`tiny`: float32 only, without series whose candidates run elsewhere."""
    series = (images, labels, audio, batches, prompts, long_prompts, models, encoders)
    small = (images, audio, long_prompts, models)
    return [case for each in (small if options.tiny else series) for case in each(options)]


def case(series: str, at: float, name: str, unit: str, units: float, cost: costs.Cost, options: Options,
         candidates: Sequence[Candidate], rounds: int = 3, **more: Any) -> Case:  # fmt: skip
    known = {} if options.tiny else {"operations": cost.operations, "bytes": cost.bytes}
    chosen = tuple(made for made in candidates if made.kind == "float32" or not options.tiny)
    return Case("growth", f"{series}: {name}", unit, units, chosen, series=series, at=at, threads=(1,), rounds=rounds,
                **known, **more)  # fmt: skip


def points(options: Options, tiny: Sequence[Any], real: Sequence[Any]) -> Sequence[Any]:
    return tiny if options.tiny else real


def scored(count: int, names: int, options: Options) -> dict[str, Any]:
    """Images against labels, from files to scores."""
    settings = {"name": CLIP, "images": count, "labels": names, "tiny": options.tiny}
    return {
        "candidates": (
            *in_kinds("ours", OURS + "scores", settings),
            Candidate("open_clip float32", PEERS + "growth.scores:open_clip", settings, "open_clip_torch"),
            Candidate("transformers float32", PEERS + "growth.scores:transformers", settings, "transformers"),
        ),
        "reference": "open_clip float32", "checks": SCORES, "settings": settings,
        "prepare": PEERS + "growth.random_clip:prepare",
    }  # fmt: skip


def texts(count: int) -> costs.Cost:
    one = costs.stack(**TEXT, positions=LABEL_TOKENS, causal=True)
    return one.times(count)


def images(options: Options) -> Iterator[Case]:
    for count in points(options, (1, 2), (1, 16, 64, 256, 1024)):
        cost = costs.vit(768, 12, 32, 512).times(count) + texts(10)
        rounds = 1 if count > 256 else 3
        yield case("images", count, f"{count} files, 10 labels", "image", count, cost, options, rounds=rounds,
                   **scored(count, 10, options))  # fmt: skip


def labels(options: Options) -> Iterator[Case]:
    for count in points(options, (10, 20), (10, 100, 1000, 10000)):
        cost = costs.vit(768, 12, 32, 512) + texts(count)
        rounds = 1 if count > 100 else 3
        yield case("labels", count, f"{count} of one image", "label", count, cost, options, rounds=rounds,
                   **scored(1, count, options))  # fmt: skip


def audio(options: Options) -> Iterator[Case]:
    for seconds in points(options, (10,), (10, 60, 600, 3600, 10800)):
        settings = {"tokens": TOKENS, "file": "speech.mp3"}
        kinds = ("float32", "int8")
        yield case(
            "audio", seconds, f"{seconds} s, Whisper tiny's sizes", "second", seconds,
            costs.whisper(seconds, TOKENS, 384, 4, 51865), options, rounds=1 if seconds > 60 else 3,
            candidates=(
                *in_kinds("ours", SPEECH + "ours:end_to_end", settings, kinds=kinds),
                Candidate("ours asr-conformer-en", SPEECH + "ours:conformer", settings, kind="shipped"),
                Candidate("openai-whisper float32", SPEECH + "openai_whisper:end_to_end", settings, "openai-whisper"),
                *in_kinds("faster-whisper", SPEECH + "faster_whisper:end_to_end", settings, "faster-whisper", kinds),
            ),
            reference="openai-whisper float32", checks={"float32": ("differing", 0.05)},
            settings={"size": "tiny", "seconds": seconds, "tiny": options.tiny}, prepare=PEERS + "growth.audio:prepare",
        )  # fmt: skip


def batches(options: Options) -> Iterator[Case]:
    for batch in points(options, (1, 2), (1, 2, 4, 8, 16, 32)):
        settings = {"name": "ViT-B-16", "batch": batch, "tiny": options.tiny}
        yield case(
            "batch", batch, f"ViT-B-16, {batch}", "image", batch, costs.vit(768, 12, 16, 512).times(batch), options,
            candidates=(
                *in_kinds("ours", PEERS + "vision.ours:encoder", settings),
                *in_kinds("timm", PEERS + "vision.timm_vit:encoder", settings, "timm"),
                *in_kinds("OpenVINO", PEERS + "vision.graph_vit:openvino", settings, "openvino"),
            ),
            reference="timm float32", checks=CHECKS, prepare=PEERS + "vision.openclip:prepare", settings=settings,
        )  # fmt: skip


def prompt(series: str, length: int, cost: costs.Cost, options: Options, settings: dict[str, Any],
           checks: dict[str, tuple[str, float]]) -> Case:  # fmt: skip
    family = {"family": settings["family"]}
    return case(
        series, length, f"{length} tokens", "token", length, cost, options, rounds=1 if length > 2048 else 3,
        candidates=(
            *in_kinds("ours", PEERS + "text.ours:prefill", {}),
            *in_kinds("transformers", PEERS + "text.transformers:prefill", family, "transformers"),
        ),
        reference="transformers float32", checks=checks, prepare=PEERS + "text.random_models:prepare",
        settings=settings | {"lengths": [length]},
    )  # fmt: skip


def prompts(options: Options) -> Iterator[Case]:
    for length in points(options, (16, 64), (16, 64, 256, 1024)):
        settings = {"family": "gpt2", "tiny": options.tiny}
        yield prompt("prompt of GPT-2", length, costs.gpt2(length, **GPT2), options, settings, {"float32": EXACT})


def long_prompts(options: Options) -> Iterator[Case]:
    tiny = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 1000}
    sizes = LLAMA | (tiny if options.tiny else {})
    for length in points(options, (16,), (64, 256, 1024, 4096, 8192)):
        settings = {"family": "llama", "sizes": sizes | {"max_position_embeddings": length}}
        cost = costs.llama(length, 768, 2048, 4, 32000)
        yield prompt("prompt of 4 Llama layers", length, cost, options, settings, {"float32": EXACT, "bfloat16": HALF})


def models(options: Options) -> Iterator[Case]:
    for size in points(options, ("tiny",), tuple(VITS)):
        width, layers, millions = VITS[size]
        settings = {"name": f"vit_{size}_patch16_224", "batch": 1, "image": 224, "tiny": options.tiny}
        yield case(
            "model", millions, f"ViT {size}, 1 image", "image", 1, costs.vit(width, layers, 16, 1000), options,
            candidates=(
                *in_kinds("ours", OURS + "vit", settings),
                *in_kinds("timm", PEERS + "train.timm:encoder", settings, "timm"),
            ),
            reference="timm float32", checks=CHECKS, prepare=PEERS + "train.timm:prepare", settings=settings,
        )  # fmt: skip


def encoders(options: Options) -> Iterator[Case]:
    for size in points(options, ("tiny",), tuple(WHISPERS)):
        width, layers, millions = WHISPERS[size]
        settings = {"size": size, "tiny": options.tiny, "libraries": ["openai", "ctranslate2"]}
        yield case(
            "Whisper encoder", millions, f"{size}, 30 s", "window", 1, costs.whisper_encoder(width, layers), options,
            candidates=(
                *in_kinds("ours", SPEECH + "ours:encoder", settings),
                Candidate("openai-whisper float32", SPEECH + "openai_whisper:encoder", settings, "openai-whisper"),
                Candidate("CTranslate2 float32", SPEECH + "ctranslate2_whisper:encoder", settings | {"kind": "float32"},
                          "ctranslate2"),
            ),
            reference="openai-whisper float32", checks={"float32": ("near", 1e-3), "bfloat16": HALF},
            prepare=SPEECH + "whisper_random:prepare", settings=settings,
        )  # fmt: skip
