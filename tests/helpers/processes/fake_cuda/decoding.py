"""Inference and decoding of every family on a pretended GPU, with the function that a CUDA graph captures."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from string import ascii_lowercase
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from multimodal.decoding import logits, sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.decoding.lm_fusion import NeuralScorer, WordStarts
from multimodal.inference import cuda_graphs
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.static_cache import MovingCache
from multimodal.models.presets import whisper
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import Whisper
from multimodal.tasks.transcribe.conformer.decode import Fusion, HybridBeam, hybrid_beam_search
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.weights.folder import Checkpoint

from .device import waits
from .training import KINDS, Marks, Scenario, clip, conformer, encoder_decoder, text, transformer

SETTLED = 3  # replays until only what comes back in each step is counted
RULES = (logits.suppress_first([4], 3), logits.suppress([5, 6]), logits.timestamps(20, 1, 19, 3))


def prepared(model: nn.Module) -> nn.Module:
    return prepare_for_inference(Checkpoint(model.eval()), device="cuda").model


def infer(build: Callable[[], nn.Module], call: Callable[[Any], Any]) -> Scenario:
    """The waits of a second call."""

    def run() -> None:
        model = prepared(build())
        with torch.no_grad():
            call(model)
            waits().found.clear()
            call(model)

    return run


class _Graph:
    replays = 0

    def replay(self) -> None:
        _Graph.replays += 1
        if _Graph.replays == SETTLED:
            waits().found.clear()
            waits().launches = 0


def captured(build: Callable[[], nn.Module], source: int | None = None) -> Scenario:
    """Decode in each way, with a graph that is captured after the prompt."""

    def run() -> None:
        model = prepared(build())
        decoder = getattr(model, "decoder", model)
        kind = next(decoder.parameters()).dtype
        heard = None if source is None else torch.randn(2, 10, source, device="cuda", dtype=kind)
        forbidden: list[str] = []

        def capture(slot: Any, decoder: nn.Module) -> None:
            before = waits().found.copy()
            slot.logits = slot.forward(decoder)
            forbidden.extend(f"captured: {one}" for one in waits().found - before)
            slot.graph = _Graph()

        found = {}
        with torch.no_grad(), mock.patch.object(cuda_graphs._Slot, "capture", capture):
            for name, search in SEARCHES.items():
                decode(decoder, heard, search)
                found |= {f"{name}: {one}": count for one, count in waits().found.items()}
        waits().found.clear()
        waits().found.update(found)
        waits().found.update(forbidden)

    return run


def decode(decoder: nn.Module, heard: Tensor | None, search: Callable[..., Any]) -> None:
    """Leaves the waits of the steps after the first ones."""
    start, prompt = torch.tensor([0, 1], device="cuda"), torch.randint(0, 30, (2, 3), device="cuda")
    step, cache = cuda_graphs.fast_step(decoder, heard, start, 40, last=1)
    assert isinstance(cache, MovingCache), type(cache)
    _Graph.replays = 0
    search(step, prompt, cache, eos=1, max_new=14, processors=RULES)
    waits().found["launches a token"] = round(waits().launches / (_Graph.replays - SETTLED + 1))


SEARCHES: dict[str, Callable[..., Any]] = {
    "greedy": sampling.greedy,
    "beam": lambda *args, **named: beam_search(*args, beams=3, **named),
    "sampled": lambda *args, **named: sampling.sample(
        *args, temperature=1.0, generators=[torch.Generator(), torch.Generator()], **named
    ),
}


def joint_search() -> None:
    """The recognizer's beams with CTC prefix scores and a language model, each step of them."""
    model = prepared(conformer())
    lm = prepared(TextTransformer(replace(model.decoder.config, stack=transformer(64, 2, 2, 128))))
    starts = WordStarts(CharacterTokenizer(ascii_lowercase + " '.,"), torch.device("cuda"))
    options = HybridBeam(4, lm=Fusion(NeuralScorer(lm, Marks.bos_id), starts), lm_bonus=0.5)
    frames, logprobs = torch.randn(2, 12, 64, device="cuda"), torch.randn(2, 12, 32, device="cuda")
    lengths, checkpoint = torch.tensor([12, 9], device="cuda"), Checkpoint(model, Marks())
    with torch.no_grad():
        waits().found.clear()
        hybrid_beam_search(frames, logprobs, lengths, checkpoint, options)


def scenarios() -> Iterator[tuple[str, Scenario]]:
    gpu = {"device": "cuda"}
    images, tokens = lambda: torch.randn(4, 3, 32, 32, **gpu), lambda: torch.randint(6, 99, (4, 16), **gpu)
    frames = lambda: torch.randn(2, 160, 80, **gpu)
    spoken = lambda: Whisper(whisper(128, 2, 2, 51865))
    yield "CLIP images", infer(clip, lambda m: m.encode_image(images()))
    yield "CLIP texts", infer(clip, lambda m: m.encode_text(tokens()))
    yield "Whisper encoder", infer(spoken, lambda m: m.encoder(torch.randn(2, 80, 3000, **gpu)))
    yield (
        "BERT states",
        infer(
            lambda: text(causal=False), lambda m: m.states(tokens(), valid=torch.ones(4, 16, dtype=torch.bool, **gpu))
        ),
    )
    for relative in (True, False):
        name = "relative" if relative else "rotary"
        yield (
            f"Conformer {name}",
            infer(
                lambda relative=relative: conformer(relative, not relative),
                lambda m: m.ctc_logits(m.encode(frames(), torch.full((2,), 99, **gpu))[0]),
            ),
        )
    for kind in KINDS:
        yield f"language model {kind}", captured(lambda kind=kind: text(kind))
    yield "language model window", captured(lambda: text("rotary", window=16))
    yield "Whisper", captured(spoken, 128)
    for name in ("t5", "bart", "m2m100"):
        yield name, captured(lambda name=name: encoder_decoder(name), 64)
    yield "Conformer's joint search", joint_search
    yield "Conformer's decoder", captured(conformer, 64)
