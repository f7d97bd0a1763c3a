"""GPT-2's training step by nanoGPT (a checkout) and transformers' GPT2LMHeadModel."""

import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peers.train.step import BETAS, EPS, RATE, WEIGHT_DECAY, autocast, runs, tensors

SIZES = {  # width, layers, heads, context
    "baby": (384, 6, 6, 256),  # nanoGPT's for characters
    "gpt2": (768, 12, 12, 1024),
}
CLIP = 1.0  # gradient clipping of both scripts
TURNED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # x @ W in GPT-2's files


def config(name: str, vocabulary: int, tiny: bool = False) -> dict[str, Any]:
    """Content of transformers' config.json."""
    width, layers, heads, context = SIZES[name]
    return {
        "model_type": "gpt2", "vocab_size": vocabulary, "n_positions": context, "n_embd": width,
        "n_layer": 2 if tiny else layers, "n_head": heads, "activation_function": "gelu",
    }  # fmt: skip


def prepare(folder: Path, device: str, name: str, batch: int, vocabulary: int, tiny: bool = False) -> None:
    """`weights.safetensors` in GPT-2's names and with its standard deviations, `batch.safetensors`: ids and targets
    [B T], noise."""
    torch.manual_seed(0)
    shape = config(name, vocabulary, tiny)
    width, layers, context = (shape[key] for key in ("n_embd", "n_layer", "n_positions"))
    weights = {"wte.weight": torch.randn(vocabulary, width) * 0.02, "wpe.weight": torch.randn(context, width) * 0.02}
    last = 0.02 / math.sqrt(2 * layers)
    for layer in range(layers):
        maps = {"attn.c_attn": (width, 3 * width, 0.02), "attn.c_proj": (width, width, last),
                "mlp.c_fc": (width, 4 * width, 0.02), "mlp.c_proj": (4 * width, width, last)}  # fmt: skip
        for part, (wide, to, std) in maps.items():
            weights[f"h.{layer}.{part}.weight"], weights[f"h.{layer}.{part}.bias"] = (
                torch.randn(wide, to) * std, torch.zeros(to)
            )  # fmt: skip
    for part in [f"h.{layer}.ln_{n}" for layer in range(layers) for n in (1, 2)] + ["ln_f"]:
        weights |= {f"{part}.weight": torch.ones(width), f"{part}.bias": torch.zeros(width)}
    save_file({f"transformer.{key}": value for key, value in weights.items()}, folder / "weights.safetensors")
    rows = torch.randint(vocabulary, (batch, context + 1))
    save_file({"ids": rows[:, :-1].clone(), "targets": rows[:, 1:].clone()}, folder / "batch.safetensors")


def stepping(
    model: nn.Module, adam: torch.optim.Optimizer, loss_of: Callable[[], Tensor],
    around: Callable[[], AbstractContextManager], steps: int,
) -> Callable[[], np.ndarray | None]:  # fmt: skip
    """A step in the order of nanoGPT's train.py."""

    def once() -> Tensor:
        with around():
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach()

    return runs(once, steps)


def nanogpt(
    folder: Path, device: str, checkout: str, name: str, batch: int, vocabulary: int, precision: str = "float32",
    compile: bool = False, steps: int = 1, tiny: bool = False,
) -> Callable[[], np.ndarray | None]:  # fmt: skip
    """`checkout`: the folder of its model.py."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = config(name, vocabulary, tiny)
    names = {"block_size": "n_positions", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
             "n_embd": "n_embd"}  # fmt: skip
    model = module.GPT(module.GPTConfig(**{own: shape[key] for own, key in names.items()}, dropout=0.0, bias=True))
    weights = {key: value.T.contiguous() if key.endswith(TURNED) else value
               for key, value in tensors(folder, "weights").items()}  # fmt: skip
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    model.to(device)
    adam = model.configure_optimizers(WEIGHT_DECAY, RATE, BETAS, device)
    called, given = torch.compile(model) if compile else model, tensors(folder, "batch", device)
    model.train()
    return stepping(model, adam, lambda: called(given["ids"], given["targets"])[1],
                    lambda: autocast(device, precision), steps)  # fmt: skip


def transformers(
    folder: Path, device: str, name: str, batch: int, vocabulary: int, precision: str = "float32",
    compile: bool = False, steps: int = 1, tiny: bool = False,
) -> Callable[[], np.ndarray | None]:  # fmt: skip
    """Its model and loss; parameter groups and order of the step are nanoGPT's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**config(name, vocabulary, tiny), **none))
    missing, extra = model.load_state_dict(tensors(folder, "weights"), strict=False)
    if extra or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"GPT2LMHeadModel has other names: {missing} {extra}")
    model.tie_weights()
    model.to(device).train()
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == wide], "weight_decay": decay}
              for wide, decay in ((True, WEIGHT_DECAY), (False, 0.0))]  # fmt: skip
    fused = {"fused": True} if device == "cuda" else {}  # as its Trainer
    adam = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, **fused)
    called, given = torch.compile(model) if compile else model, tensors(folder, "batch", device)
    ids, targets = given["ids"], given["targets"]
    return stepping(model, adam, lambda: called(input_ids=ids, labels=targets, shift_labels=targets).loss,
                    lambda: autocast(device, precision), steps)  # fmt: skip
