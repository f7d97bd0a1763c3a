"""Inference on one GPU: image towers beside timm, Whisper beside transformers, openai-whisper and CTranslate2, a
Conformer beside torchaudio, log-mel, and GPT-2's decoding beside transformers. Inputs are on the device."""

from typing import Any

from benchmarks.jobs.cuda_train_cases import threads
from benchmarks.suite.cases import OURS, Candidate, Case, Options

PEERS = "benchmarks.peers."
SPEECH = PEERS + "speech."
IMAGE = {"ViT-B-16": 35.1e9, "ViT-L-14": 162.0e9}  # multiply-adds × 2
WINDOW = 85e9  # of 30 s in the Conformer: 375 frames of 17 layers, and the stem
TOKENS = 64  # per window
COMPARED = 4  # of them: with random weights all tokens after a different one differ


def cases(options: Options) -> list[Case]:
    if options.tiny:
        return [
            images("ViT-B-16", 2, options), whisper("base", 2, options), recognizer(2, options), log_mel(options),
            gpt2(2, "float32", options),
        ]  # fmt: skip
    return [
        images("ViT-B-16", 512, options), images("ViT-L-14", 256, options), whisper("base", 1, options),
        recognizer(64, options), log_mel(options), whisper("large-v3-turbo", 32, options),
        whisper("base", 32, options), whisper("large-v3-turbo", 1, options), gpt2(1, "bfloat16", options),
        gpt2(8, "float32", options),
    ]  # fmt: skip


def case(title: str, unit: str, units: float, candidates: list[Candidate], options: Options, **more: Any) -> Case:
    """The last candidate is the reference."""
    if options.tiny:
        more.pop("operations", None)
    return Case("cuda_inference", title, unit, units, tuple(candidates), candidates[-1].name, threads=threads(options),
                **more)  # fmt: skip


def images(name: str, batch: int, options: Options) -> Case:
    """Ours eager, as a CUDA graph, with compiled blocks, and both."""
    settings, gpu = {"name": name, "batch": batch, "tiny": options.tiny}, options.device == "cuda"
    amp = settings | {"kind": "bfloat16"}
    ways = {"": {}, ", graph": {"graph": True}, ", compiled": {"compiled": gpu},
            ", compiled, graph": {"compiled": gpu, "graph": True}}  # fmt: skip
    ours = [Candidate(f"ours bfloat16{way}", PEERS + "vision.ours:encoder", amp | flags, kind="bfloat16")
            for way, flags in list(ways.items())[: 2 if options.tiny else None]]  # fmt: skip
    theirs = [Candidate(f"timm bfloat16{way}", PEERS + "vision.timm_vit:encoder", amp | flags, "timm", "bfloat16")
              for way, flags in list(ways.items())[2:]]  # fmt: skip
    # timm's default, the fastest to load
    theirs.append(Candidate("timm float32", PEERS + "vision.timm_vit:encoder", settings | {"kind": "float32"}, "timm"))
    return case(
        f"{name}, {batch} images", "image", batch, [*ours, *(theirs[-1:] if options.tiny else theirs)], options,
        checks={"bfloat16": ("cosine", 1e-2)}, prepare=PEERS + "vision.openclip:prepare", settings=settings,
        operations=IMAGE[name] * batch,
    )  # fmt: skip


def graphs(load: str, settings: dict[str, Any]) -> list[Candidate]:
    """Ours with and without CUDA graphs."""
    return [Candidate(f"ours {settings['kind']}, {title}", load, settings | {"graph": graph}, kind=settings["kind"])
            for title, graph in (("CUDA graphs", True), ("without graphs", False))]  # fmt: skip


def whisper(size: str, batch: int, options: Options) -> Case:
    kind = "float16" if options.device == "cuda" else "float32"
    tokens, libraries = 8 if options.tiny else TOKENS, ["openai", "ctranslate2", "transformers"]
    if size != "base":
        libraries.remove("openai")  # fewer for large models: each writes and reads gigabytes
    settings = {"size": size, "batch": batch, "libraries": libraries, "tiny": options.tiny}
    decoding = {"tokens": tokens, "kind": kind, "source": "mel", "compared": COMPARED}
    packages = {"openai": "openai-whisper", "ctranslate2": "ctranslate2", "transformers": "transformers"}
    theirs = [Candidate(f"{packages[name]} {kind}", f"{SPEECH}{name}_whisper:decoder", decoding, packages[name], kind)
              for name in libraries]  # fmt: skip
    return case(
        f"Whisper {size}, {batch} window{'s' * (batch > 1)}, {tokens} tokens each", "second of audio", 30 * batch,
        [*graphs(SPEECH + "ours:decoder", decoding), *theirs], options, checks={kind: ("differing", 0.75)},
        prepare=SPEECH + "whisper_random:prepare", settings=settings,
    )  # fmt: skip


def recognizer(batch: int, options: Options) -> Case:
    """From samples to the tokens of CTC's best path."""
    settings = {"batch": batch, "seconds": 2.0 if options.tiny else 30.0, "tiny": options.tiny}
    peer, amp = PEERS + "cuda.torchaudio:recognizer", settings | {"kind": "bfloat16"}
    found = [
        Candidate(f"{name} bfloat16, {way}", load, amp | {"compiled": way == "compiled"}, library, "bfloat16")
        for name, load, library in (("ours", PEERS + "cuda.ours:recognizer", OURS), ("torchaudio", peer, "torchaudio"))
        for way in (("compiled", "eager") if options.device == "cuda" else ("eager",))
    ]  # fmt: skip
    found.append(Candidate("torchaudio float32", peer, settings | {"kind": "float32"}, "torchaudio"))
    return case(
        f"Conformer with CTC, 110 M, {batch} windows of {settings['seconds']:g} s", "second of audio",
        settings["seconds"] * batch, found, options, checks={"bfloat16": ("cosine", 2e-2)},
        prepare=PEERS + "cuda.torchaudio:prepare", settings=settings, operations=WINDOW * batch,
    )  # fmt: skip


def log_mel(options: Options) -> Case:
    return case(
        "log-mel of 30 s on the device", "second of audio", 30,
        [Candidate("ours", SPEECH + "ours:log_mel"),
         Candidate("torchaudio", SPEECH + "torchaudio_mel:log_mel", library="torchaudio"),
         Candidate("openai-whisper", SPEECH + "openai_whisper:log_mel", library="openai-whisper")],
        options, checks={"float32": ("near", 1e-4)}, prepare=SPEECH + "whisper_files:noise",
        settings={"seconds": 30.0},
    )  # fmt: skip


def gpt2(batch: int, kind: str, options: Options) -> Case:
    tokens = 8 if options.tiny else 128
    settings = {"family": "gpt2", "lengths": [16] * batch, "tiny": options.tiny}
    decoding = {"tokens": tokens, "kind": kind}
    peer = Candidate(f"transformers {kind}", PEERS + "text.transformers:writer", decoding | {"family": "gpt2"},
                     "transformers", kind)  # fmt: skip
    return case(
        f"GPT-2 small, {tokens} tokens after each of {batch} prompts", "token", tokens * batch,
        [*graphs(PEERS + "text.ours:writer", decoding), peer], options,
        checks={kind: ("differing", 0.0 if kind == "float32" else 0.9)}, prepare=PEERS + "text.random_models:prepare",
        settings=settings,
    )  # fmt: skip
