"""Captions for pictures, by a captioner checkpoint."""

import math
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import CheckpointError, UsageError
from multimodal.models.captioner import Captioner
from multimodal.search import beam, greedy, over_source
from multimodal.tasks.pictures import name_of, pixels_of
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


@torch.inference_mode()
def caption(
    images: Any, model: str | Path | Checkpoint, beam_size: int = 1, max_tokens: int = 40
) -> list[dict[str, Any]]:
    """One caption a picture: `[{"file", "caption", "score"}]`, the score being the sum of log-probabilities.

    `images`: one or several of path, bytes or PIL image. Decoding is greedy, or a beam ranked by mean
    log-probability. Raises ImageError, UsageError, CheckpointError."""
    checkpoint = model if isinstance(model, Checkpoint) else load(model)
    network, tokenizer = checkpoint.model, checkpoint.tokenizer
    if not isinstance(network, Captioner):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, captions need a captioner")
    if tokenizer is None or checkpoint.preprocessing is None:
        what = "tokenizer" if tokenizer is None else "preprocessing"
        raise CheckpointError(f"model {checkpoint.source}: its {what} is not known, and is not guessed")
    several = list(images) if isinstance(images, list | tuple) else [images]
    if not several:
        raise UsageError("images: there are none")
    device = next(network.parameters()).device
    source = network.encode(pixels_of(several, checkpoint.preprocessing).to(device))
    step, cache = over_source(network.decoder, source), network.decoder.new_cache()
    prompt = torch.full((len(several), 1), tokenizer.bos_id, device=device)
    limit = min(max_tokens, network.decoder.config.context - 1)
    if beam_size > 1:
        found = beam(step, prompt, cache, eos=tokenizer.eos_id, max_new=limit, beams=beam_size, patience=math.inf)
    else:
        found = greedy(step, prompt, cache, eos=tokenizer.eos_id, max_new=limit)
    return [
        {"file": name_of(image), "caption": tokenizer.decode(ids).strip(), "score": score}
        for image, ids, score in zip(several, found.ids, found.logprobs, strict=True)
    ]
