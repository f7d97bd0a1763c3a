"""Our any-to-text model, from the same folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.ask.random_models import Answer, Inputs, inputs
from multimodal.decoding.sampling import Step, greedy
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.any_to_text import AnyToText
from multimodal.tasks.ask.writer import answer_step
from multimodal.weights.load import load


def loaded(folder: Path, device: str, kind: str) -> tuple[AnyToText, Inputs]:
    return prepare_for_inference(load(folder / "hub"), kind, device).model, inputs(folder, device)


def first(folder: Path, device: str, kind: str = "float32") -> Callable[[], Tensor]:
    """Encode the image; logits after the question, with keys and values cached."""
    model, (ids, pixels, _) = loaded(folder, device, kind)

    @torch.inference_mode()
    def run() -> Tensor:
        rows = model.encode_images(pixels).flatten(0, 1)
        step, cache = answer_step(model, ids, [rows], None, ids.shape[1])
        return step(ids, cache)[:, -1]

    return run


def answerer(folder: Path, device: str, tokens: int, again: bool = False, kind: str = "float32") -> Answer:
    """Encode the image and generate `tokens`. `again`: about a second question after the first, whose rows, keys and
    values are kept, as in a `Conversation`."""
    model, (ids, pixels, second) = loaded(folder, device, kind)
    encode = torch.inference_mode()(lambda: model.encode_images(pixels).flatten(0, 1))
    room = ids.shape[1] + second.shape[1] + tokens

    @torch.inference_mode()
    def run() -> list[list[int]]:
        step, cache = answer_step(model, ids, [encode()], None, room)
        return greedy(step, ids, cache, eos=-1, max_new=tokens).ids

    if not again:
        return run
    rows, cache, whole = encode(), model.decoder.new_cache(capacity=room), torch.cat([ids, second], 1)
    with torch.inference_mode():
        model.decoder(ids, cache=cache, last=1, embedded=model.embed(ids, [rows]))

    @torch.inference_mode()
    def continued() -> list[list[int]]:
        cache.cut(ids.shape[1])
        step: Step = answer_step(model, whole, [rows], None, room, cache)[0]
        return greedy(step, whole, cache, eos=-1, max_new=tokens).ids

    return continued
