"""Our training loop's steps, with the recipes' objectives and the peers' initial weights."""

import atexit
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.peers.train import gpt as train_gpt
from benchmarks.peers.train import openclip as train_openclip
from benchmarks.peers.train import torchaudio as train_torchaudio
from benchmarks.peers.train.step import BETAS, RATE, WEIGHT_DECAY, Run, runs, tensors
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig
from multimodal.system.memory import keeping_memory
from multimodal.train.loop import Loop
from multimodal.train.objective import Objective
from multimodal.train.objectives.augment_speech import SpeechBatch
from multimodal.train.objectives.classify import ImageClassBatch, SoftTargets
from multimodal.train.objectives.contrastive import Contrastive, Pairs
from multimodal.train.objectives.recognizer import Recognition
from multimodal.train.objectives.text.language import Language
from multimodal.train.optim import OptimSettings
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint
from multimodal.weights.speech.conformer_torchaudio import CONFORMER
from multimodal.weights.text import gpt2
from multimodal.weights.vision import clip_openai, vit_timm


def stepping(
    folder: Path, device: str, objective: Objective, inputs: Any, *, precision: str = "float32", compile: bool = False,
    graphs: bool = False, steps: int = 1, clip: float = 0.0, **_: Any,
) -> Run:  # fmt: skip
    """A step of `Loop.fit`, on `inputs` on the device, in memory that the process keeps, as there."""
    optim = OptimSettings(rate=RATE, schedule="wsd", warmup=0, weight_decay=WEIGHT_DECAY, betas=BETAS, clip=clip)
    s = LoopSettings(folder / "run", 10**9, optim, precision=precision, compile=compile, device=device, graphs=graphs)
    loop = Loop(s, objective, SimpleNamespace(micro=1))
    loop.flops.enabled = False
    if loop.kind == "cpu":
        rest = contextlib.ExitStack()  # of the process
        atexit.register(rest.close)
        rest.enter_context(keeping_memory())

    def step() -> float:
        loop.step([inputs])
        if loop.done <= 3:  # a GPU's metrics come a step late; the first three are compared
            loop.read_metrics()
        return loop.metrics["loss"]

    return runs(step, steps)


def clip(folder: Path, device: str, name: str, image: int, tiny: bool = False, trimmed: bool = True, **how: Any) -> Run:
    """`trimmed`: pad captions to the longest in the batch, as our tokenizers do, instead of to 77."""
    config = train_openclip.config(name, image, tiny)
    model = clip_openai.FAMILY.load(tensors(folder, "weights"), config, f"random {name}").model
    pairs = tensors(folder, "batch", device)
    ids = pairs["ids"][:, : train_openclip.LONGEST].contiguous() if trimmed else pairs["ids"]
    return stepping(folder, device, Contrastive(model), Pairs(pairs["images"], ids), **how)


def load_vit(folder: Path, name: str, image: int, tiny: bool = False, **_: Any) -> Checkpoint:
    config = {"architecture": name, "model_args": {"img_size": image} | ({"depth": 2} if tiny else {})}
    return vit_timm.FAMILY.load(tensors(folder, "weights"), config, f"random {name}")


def vit(folder: Path, device: str, name: str, image: int, tiny: bool = False, **how: Any) -> Run:
    objective = SoftTargets(load_vit(folder, name, image, tiny).model)
    return stepping(folder, device, objective, ImageClassBatch(**tensors(folder, "batch", device)), **how)


def gpt(folder: Path, device: str, name: str, vocabulary: int, tiny: bool = False, **how: Any) -> Run:
    from multimodal.data.datasets.text import TokenBatch

    config = train_gpt.config(name, vocabulary, tiny)
    model = gpt2.FAMILY.load(tensors(folder, "weights"), config, f"random {name}").model
    rows = TokenBatch(**tensors(folder, "batch", device))
    return stepping(folder, device, Language(model), rows, clip=train_gpt.CLIP, **how)


def conformer(folder: Path, device: str, name: str, **how: Any) -> Run:
    weights = tensors(folder, "weights")
    inner = {key.removeprefix("encoder."): value for key, value in weights.items() if key.startswith("encoder.")}
    config = {"num_heads": train_torchaudio.SIZES[name][2], "convolution_first": False}
    encoder = CONFORMER.load(inner, config, f"random {name}").model
    model = ConformerCTC(ConformerCTCConfig(encoder.config, train_torchaudio.VOCABULARY, None))
    model.encoder.load_state_dict(encoder.state_dict())
    model.ctc.load_state_dict({part: weights[f"head.{part}"] for part in ("weight", "bias")})
    nothing = SimpleNamespace(bos_id=None, eos_id=None)
    objective = Recognition(model, nothing, terms="ctc", middle=0.0)
    batch = tensors(folder, "batch", device)
    sizes = {"sizes": batch["lengths"].tolist(), "id_sizes": batch["id_lengths"].tolist()}
    return stepping(folder, device, objective, SpeechBatch(**batch, **sizes), **how)
