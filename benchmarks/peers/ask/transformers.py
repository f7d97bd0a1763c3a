"""transformers' model and `generate` with an image."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.ask.random_models import Answer, Inputs, inputs


def loaded(folder: Path, device: str, kind: str) -> tuple[torch.nn.Module, Inputs]:
    import transformers

    made = transformers.Idefics3ForConditionalGeneration
    model = made.from_pretrained(folder / "hub", dtype=getattr(torch, kind)).to(device).eval().requires_grad_(False)
    given = inputs(folder, device)
    return model, given._replace(pixels=given.pixels[None].to(model.dtype))


def first(folder: Path, device: str, kind: str = "float32") -> Callable[[], Tensor]:
    """Encode the image; logits after the question, with keys and values cached."""
    model, (ids, pixels, _) = loaded(folder, device, kind)
    return torch.inference_mode()(
        lambda: model(ids, pixel_values=pixels, use_cache=True, logits_to_keep=1).logits[:, -1]
    )


def answerer(folder: Path, device: str, tokens: int, again: bool = False, kind: str = "float32") -> Answer:
    """Encode the image and generate `tokens`. `again`: about a second question after the first, whose keys and values
    are kept."""
    model, (ids, pixels, second) = loaded(folder, device, kind)
    options = {"max_new_tokens": tokens, "do_sample": False}
    if not again:
        options |= {"attention_mask": torch.ones_like(ids), "pixel_values": pixels}
        return torch.inference_mode()(lambda: model.generate(ids, **options)[:, -tokens:].tolist())
    with torch.inference_mode():
        cache = model(ids, pixel_values=pixels, use_cache=True, logits_to_keep=1).past_key_values
    whole = torch.cat([ids, second], 1)

    @torch.inference_mode()
    def run() -> list[list[int]]:
        if extra := cache.get_seq_length() - ids.shape[1]:
            cache.crop(-extra)
        found = model.generate(whole, attention_mask=torch.ones_like(whole), past_key_values=cache, **options)
        return found[:, -tokens:].tolist()

    return run
