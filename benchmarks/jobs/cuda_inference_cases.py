"""Inference on one GPU: image towers beside timm, Whisper beside transformers, openai-whisper and CTranslate2, a
Conformer beside torchaudio, log-mel, and GPT-2's decoding beside transformers. Inputs are on the device."""

from typing import Any

from benchmarks.jobs.cuda_train_cases import threads
from benchmarks.suite.cases import Candidate, Case, Options

PEERS = "benchmarks.peers."
OURS = PEERS + "cuda.ours:"
PICTURE = {"ViT-B-16": 35.1e9, "ViT-L-14": 162.0e9}  # multiply-adds × 2
WINDOW = 85e9  # of 30 s in the Conformer: 375 frames of 17 layers, and the stem
TOKENS = 64  # per window


def cases(options: Options) -> list[Case]:
    if options.tiny:
        return [
            pictures("ViT-B-16", 2, options), whisper("base", 2, options), recogniser(2, options), log_mel(options),
            gpt2(2, "float32", options),
        ]  # fmt: skip
    return [
        pictures("ViT-B-16", 512, options), pictures("ViT-L-14", 256, options), whisper("base", 1, options),
        recogniser(64, options), log_mel(options), whisper("large-v3-turbo", 32, options),
        whisper("base", 32, options), whisper("large-v3-turbo", 1, options), gpt2(1, "bfloat16", options),
        gpt2(8, "float32", options),
    ]  # fmt: skip


def case(title: str, unit: str, units: float, candidates: list[Candidate], options: Options, **more: Any) -> Case:
    """The last candidate is the reference."""
    if options.tiny:
        more.pop("operations", None)
    return Case("cuda_inference", title, unit, units, tuple(candidates), candidates[-1].name, threads=threads(options),
                **more)  # fmt: skip


def pictures(name: str, batch: int, options: Options) -> Case:
    """Ours eager, as a CUDA graph, with compiled blocks, and both."""
    settings, gpu = {"name": name, "batch": batch, "tiny": options.tiny}, options.device == "cuda"
    amp = settings | {"kind": "bfloat16"}
    ways = {"": {}, ", graph": {"graph": True}, ", compiled": {"compiled": gpu},
            ", compiled, graph": {"compiled": gpu, "graph": True}}  # fmt: skip
    ours = [Candidate(f"ours bfloat16{way}", OURS + "encoder", amp | given, kind="bfloat16")
            for way, given in list(ways.items())[: 2 if options.tiny else None]]  # fmt: skip
    theirs = [Candidate(f"timm bfloat16{way}", PEERS + "cuda.timm:encoder", amp | given, "timm", "bfloat16")
              for way, given in list(ways.items())[2:]]  # fmt: skip
    # timm's default, the fastest to load
    theirs.append(Candidate("timm float32", PEERS + "vision.timm_vit:encoder", settings | {"kind": "float32"}, "timm"))
    return case(
        f"{name}, {batch} images", "picture", batch, [*ours, *(theirs[-1:] if options.tiny else theirs)], options,
        checks={"bfloat16": ("cosine", 1e-2)}, prepare=PEERS + "vision.openclip:prepare", settings=settings,
        operations=PICTURE[name] * batch,
    )  # fmt: skip


def whisper(size: str, batch: int, options: Options) -> Case:
    kind = "float16" if options.device == "cuda" else "float32"
    tokens, libraries = 8 if options.tiny else TOKENS, ["openai", "ctranslate2", "transformers"]
    if size != "base":
        libraries.remove("openai")  # fewer for large models: each writes and reads gigabytes
    settings = {"size": size, "batch": batch, "libraries": libraries, "tiny": options.tiny}
    given = {"tokens": tokens, "kind": kind}
    packages = {"openai": "openai-whisper", "ctranslate2": "ctranslate2", "transformers": "transformers"}
    ours = [Candidate(f"ours {kind}, {title}", OURS + "whisper", given | {"graph": graph}, kind=kind)
            for title, graph in (("CUDA graphs", True), ("without graphs", False))]  # fmt: skip
    theirs = [Candidate(f"{packages[name]} {kind}", f"{PEERS}cuda.whisper:{name}", given, packages[name], kind)
              for name in libraries]  # fmt: skip
    return case(
        f"Whisper {size}, {batch} window{'s' * (batch > 1)}, {tokens} tokens each", "second of sound", 30 * batch,
        [*ours, *theirs], options, checks={kind: ("differing", 0.75)}, prepare=PEERS + "speech.whisper_random:prepare",
        settings=settings,
    )  # fmt: skip


def recogniser(batch: int, options: Options) -> Case:
    """From samples to the tokens of CTC's best path."""
    settings = {"batch": batch, "seconds": 2.0 if options.tiny else 30.0, "tiny": options.tiny}
    amp, peer = settings | {"kind": "bfloat16"}, PEERS + "cuda.torchaudio:recogniser"
    ways = {"compiled": True, "eager": False}
    gpu = options.device == "cuda"
    ours = [Candidate(f"ours bfloat16, {way}", OURS + "recogniser", amp | {"compiled": on and gpu}, kind="bfloat16")
            for way, on in ways.items() if gpu or not on]  # fmt: skip
    theirs = [
        Candidate(f"torchaudio bfloat16, {way}", peer, amp | {"compiled": on and gpu}, "torchaudio", "bfloat16")
        for way, on in ways.items() if gpu or not on
    ]  # fmt: skip
    theirs.append(Candidate("torchaudio float32", peer, settings | {"kind": "float32"}, "torchaudio"))
    return case(
        f"Conformer with CTC, 110 M, {batch} windows of {settings['seconds']:g} s", "second of sound",
        settings["seconds"] * batch, [*ours, *theirs], options, checks={"bfloat16": ("cosine", 2e-2)},
        prepare=PEERS + "cuda.torchaudio:prepare", settings=settings, operations=WINDOW * batch,
    )  # fmt: skip


def log_mel(options: Options) -> Case:
    return case(
        "log-mel of 30 s on the device", "second of sound", 30,
        [Candidate("ours", PEERS + "speech.ours:log_mel"),
         Candidate("torchaudio", PEERS + "speech.torchaudio_mel:log_mel", library="torchaudio"),
         Candidate("openai-whisper", PEERS + "speech.openai_whisper:log_mel", library="openai-whisper")],
        options, checks={"float32": ("near", 1e-4)}, prepare=PEERS + "speech.whisper_files:noise",
        settings={"seconds": 30.0},
    )  # fmt: skip


def gpt2(batch: int, kind: str, options: Options) -> Case:
    tokens = 8 if options.tiny else 128
    settings = {"family": "gpt2", "lengths": [16] * batch, "tiny": options.tiny}
    given = {"tokens": tokens, "kind": kind}
    ours = [Candidate(f"ours {kind}, {title}", OURS + "writer", given | {"graph": graph}, kind=kind)
            for title, graph in (("CUDA graphs", True), ("without graphs", False))]  # fmt: skip
    peer = Candidate(f"transformers {kind}", PEERS + "text.transformers:writer", given | {"family": "gpt2"},
                     "transformers", kind)  # fmt: skip
    return case(
        f"GPT-2 small, {tokens} tokens after each of {batch} prompts", "token", tokens * batch, [*ours, peer], options,
        checks={kind: ("differing", 0.0 if kind == "float32" else 0.9)}, prepare=PEERS + "text.random_models:prepare",
        settings=settings,
    )  # fmt: skip
