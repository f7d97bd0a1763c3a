"""Idefics3 of SmolVLM-256M's sizes with random weights in transformers' folder layout, an image and a question."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peers.text.random_models import SPREAD

IMAGE_ID, EDGE, ROWS, SHUFFLE = 49190, 512, 64, 4
# config.json of HuggingFaceTB/SmolVLM-256M-Instruct
TEXT: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280, "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": EDGE, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
TINY_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
TINY_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


class Inputs(NamedTuple):
    """`ids` [1 T] with the rows of an image, its `pixels` [1 3 H W], and ids of a `second` question [1 T]."""

    ids: Tensor
    pixels: Tensor
    second: Tensor


Answer = Callable[[], list[list[int]]]


def prepare(folder: Path, device: str, question: int, tiny: bool = False) -> None:
    """`folder/hub` by `save_pretrained`, and `folder/inputs.safetensors` with questions of so many ids."""
    import transformers

    torch.manual_seed(0)
    text, vision = TEXT | (TINY_TEXT if tiny else {}), VISION | (TINY_VISION if tiny else {})
    model = transformers.Idefics3ForConditionalGeneration(transformers.Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE_ID, scale_factor=SHUFFLE,
        tie_word_embeddings=False,
    ))  # fmt: skip
    for key, tensor in model.named_parameters():
        if "text_model.layers" in key and tensor.ndim == 2:
            tensor.data.mul_(SPREAD)  # with a new model's, greedy decoding repeats one token
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder / "hub")
    draw = torch.Generator().manual_seed(1)
    words, second = torch.randint(3, IMAGE_ID, (2, 1, question), generator=draw)
    ids = torch.cat([words[:, :4], torch.full((1, ROWS), IMAGE_ID), words[:, 4:]], 1)
    pixels = torch.randn(1, 3, EDGE, EDGE, generator=draw)
    save_file({"ids": ids, "pixels": pixels, "second": second.contiguous()}, folder / "inputs.safetensors")


def inputs(folder: Path, device: str) -> Inputs:
    return Inputs(**load_file(folder / "inputs.safetensors", device))
