"""transformers' `generate` and encoders."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.peers.plain_files import rows
from benchmarks.peers.text.random_models import FAMILIES, ids


def loaded(folder: Path, device: str, family: str, kind: str) -> nn.Module:
    import transformers

    logging.disable(logging.WARNING)  # it warns about missing heads of encoders
    transformers.utils.logging.disable_progress_bar()
    name, suffix, _ = FAMILIES[family]
    model = getattr(transformers, f"{name}{suffix}").from_pretrained(folder / "hub", dtype=getattr(torch, kind))
    return model.to(device).eval().requires_grad_(False)


def writer(
    folder: Path, device: str, family: str, tokens: int, kind: str = "float32", beams: int = 1
) -> Callable[[], list[list[int]]]:
    """Generate `tokens` per row: greedy, or beam search with the default length penalty 1."""
    model, prompts = loaded(folder, device, family, kind), ids(folder, device)
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": tokens, "do_sample": False}
    return torch.inference_mode()(lambda: model.generate(prompts, num_beams=beams, **options)[:, -tokens:].tolist())


def prefill(folder: Path, device: str, family: str, kind: str = "float32") -> Callable[[], Tensor]:
    """Logits after a prompt, with keys and values cached."""
    model, prompt = loaded(folder, device, family, kind), ids(folder, device)
    return torch.inference_mode()(lambda: model(prompt, use_cache=True, logits_to_keep=1).logits[:, -1])


def encoder(folder: Path, device: str, family: str, kind: str = "float32", batch: int = 0) -> Callable[[], Tensor]:
    """States of rows of different lengths, in one padded batch, or in batches of `batch` rows of similar length."""
    model, texts = loaded(folder, device, family, kind), rows(folder)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i])) if batch else list(range(len(texts)))
    count = batch or len(texts)

    @torch.inference_mode()
    def run() -> Tensor:
        found: dict[int, Tensor] = {}
        for first in range(0, len(order), count):
            part = order[first : first + count]
            width = max(len(texts[i]) for i in part)
            padded = torch.tensor([texts[i] + [0] * (width - len(texts[i])) for i in part], device=device)
            lengths = torch.tensor([len(texts[i]) for i in part], device=device)
            real = torch.arange(width, device=device) < lengths[:, None]
            states = model(padded, attention_mask=real.long()).last_hidden_state
            found |= {i: own[: len(texts[i])] for i, own in zip(part, states, strict=True)}
        return torch.cat([found[i] for i in range(len(texts))])

    return run
