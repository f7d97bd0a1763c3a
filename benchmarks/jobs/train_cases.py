"""One training step (forward, backward, optimizer) on the same weights and batch, beside the peers' own steps."""

from typing import Any

from benchmarks.suite.cases import OURS, Candidate, Case, Options

PRECISIONS = {"float32": "float32", "autocast": "bfloat16"}  # our precision → kind of arithmetic
CHECKS = {"float32": ("near", 1e-4), "bfloat16": ("near", 2e-2)}  # losses of the first and the third step
PEERS = "benchmarks.peers.train."


def cases(options: Options) -> list[Case]:
    if options.tiny:
        return [
            clip("ViT-S-16", 2, 32, tiny=True), vit("vit_small_patch16_224", 2, 32, tiny=True),
            gpt("baby", 1, 65, options), conformer("conformer_m", 1, 80, 2, tiny=True),
        ]  # fmt: skip
    return [
        clip("ViT-S-16", 8, 112), vit("vit_small_patch16_224", 8, 224), gpt("baby", 4, 50304, options),
        gpt("baby", 8, 65, options), conformer("conformer_m", 4, 400, 4),
    ]  # fmt: skip


def checks(tiny: bool) -> dict[str, tuple[str, float]]:
    """The small loss of two pairs is less exact in bfloat16."""
    return CHECKS | ({"bfloat16": ("near", 0.1)} if tiny else {})


def both(name: str, load: str, settings: dict[str, Any], library: str = OURS) -> list[Candidate]:
    """In float32 and in bfloat16 autocast."""
    return [Candidate(f"{name} {kind}", load, settings | {"precision": precision}, library, kind)
            for precision, kind in PRECISIONS.items()]  # fmt: skip


def clip(name: str, batch: int, image: int, tiny: bool = False) -> Case:
    settings = {"name": name, "batch": batch, "image": image, "tiny": tiny}
    whole = [] if tiny else both("ours, 77 tokens", PEERS + "ours:clip", settings | {"trimmed": False})
    return Case(
        "train", f"CLIP {name} of {image} pixels, {batch} pairs a step", "pair", batch,
        (*both("ours", PEERS + "ours:clip", settings), *whole,
         *both("open_clip", PEERS + "openclip:step", settings, "open_clip_torch")),
        reference="open_clip float32", checks=checks(tiny), prepare=PEERS + "openclip:prepare", settings=settings,
    )  # fmt: skip


def vit(name: str, batch: int, image: int, tiny: bool = False) -> Case:
    settings = {"name": name, "batch": batch, "image": image, "tiny": tiny}
    return Case(
        "train", f"{name} supervised, {batch} images a step", "image", batch,
        (*both("ours", PEERS + "ours:vit", settings), *both("timm", PEERS + "timm:step", settings, "timm")),
        reference="timm float32", checks=checks(tiny), prepare=PEERS + "timm:prepare", settings=settings,
    )  # fmt: skip


def gpt(name: str, batch: int, vocabulary: int, options: Options) -> Case:
    """With nanoGPT if --nanogpt is given."""
    tiny = options.tiny
    settings = {"name": name, "batch": batch, "vocabulary": vocabulary, "tiny": tiny}
    checkout = settings | {"checkout": str(options.nanogpt)}
    nano = both("nanoGPT", PEERS + "gpt:nanogpt", checkout, "nanoGPT") if options.nanogpt else []
    return Case(
        "train", f"GPT {name} of {vocabulary} tokens, {batch} rows a step", "token", batch * CONTEXTS[name],
        (*both("ours", PEERS + "ours:gpt", settings), *nano,
         *both("transformers", PEERS + "gpt:transformers", settings, "transformers")),
        reference="transformers float32", checks=checks(tiny), prepare=PEERS + "gpt:prepare", settings=settings,
    )  # fmt: skip


CONTEXTS = {"baby": 256, "gpt2": 1024}  # tokens a row


def conformer(name: str, batch: int, frames: int, layers: int, tiny: bool = False) -> Case:
    settings = {"name": name, "batch": batch, "frames": frames, "layers": layers, "tiny": tiny}
    return Case(
        "train", f"{name} with CTC, {layers} layers, {batch} rows of {frames} frames a step", "frame", batch * frames,
        (*both("ours", PEERS + "ours:conformer", settings),
         *both("torchaudio", PEERS + "torchaudio:step", settings, "torchaudio")),
        reference="torchaudio float32", checks=checks(tiny), prepare=PEERS + "torchaudio:prepare", settings=settings,
    )  # fmt: skip
