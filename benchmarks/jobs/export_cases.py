"""Our models beside their ONNX exports in ONNX Runtime: random weights of preset sizes."""

from typing import Any

from benchmarks.suite.cases import Case, Options, in_kinds

OURS, RUNTIME = "benchmarks.peers.exports.ours:", "benchmarks.peers.exports.runtime:"
CHECKS = {"float32": ("near", 1e-4), "int8": ("cosine", 5e-2)}
BOTH = ("float32", "int8")


def cases(options: Options) -> list[Case]:
    return [
        _case("ViT-S/16, 8 images", "image", "vit_s16", options, size=2 if options.tiny else 8),
        _case("Conformer S with CTC, 10 s", "second", "conformer_s", options, units=10, length=1000),
        _case("BERT base, 8 texts of 128 tokens", "text", "bert_base", options, size=8, length=128),
        _case("GPT-2 small, 32 tokens", "token", "gpt2", options, units=32, length=64, tokens=32),
    ]


def _case(
    title: str, unit: str, name: str, options: Options, units: int = 0, size: int = 1, length: int = 0, tokens: int = 0,
) -> Case:  # fmt: skip
    settings: dict[str, Any] = {"tokens": tokens}
    checks = {"float32": ("differing", 0.0)} if tokens else CHECKS
    return Case(
        "export", title, unit, units or size,
        (
            *in_kinds("ours", OURS + "call", settings, kinds=BOTH),
            *in_kinds("ONNX Runtime", RUNTIME + "call", settings, "onnxruntime", BOTH),
        ),
        reference="ours float32", checks=checks, prepare=OURS + "prepare",
        settings={"name": name, "tiny": options.tiny, "size": size, "length": length},
    )  # fmt: skip
