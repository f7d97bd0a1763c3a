"""GPT-2's training step by nanoGPT (a checkout) and transformers' GPT2LMHeadModel."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peers.train.step import (
    BETAS,
    EPS,
    RATE,
    WEIGHT_DECAY,
    Run,
    autocast,
    runs,
    tensors,
    weight_decay_groups,
)

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


def made(name: str, vocabulary: int, tiny: bool = False) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    training = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**config(name, vocabulary, tiny), **training))


def prepare(folder: Path, device: str, name: str, batch: int, vocabulary: int, tiny: bool = False) -> None:
    """`weights.safetensors` as transformers initializes them, `batch.safetensors`: ids and targets [B T], noise."""
    torch.manual_seed(0)
    weights = made(name, vocabulary, tiny).state_dict()
    save_file({key: weights[key].clone() for key in weights if key != "lm_head.weight"}, folder / "weights.safetensors")
    rows = torch.randint(vocabulary, (batch, SIZES[name][3] + 1))
    save_file({"ids": rows[:, :-1].clone(), "targets": rows[:, 1:].clone()}, folder / "batch.safetensors")


def stepping(
    model: nn.Module, adam: torch.optim.Optimizer, loss_of: Callable[[], Tensor],
    around: Callable[[], AbstractContextManager], steps: int,
) -> Run:  # fmt: skip
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
    folder: Path, device: str, checkout: str, name: str, vocabulary: int, precision: str = "float32",
    compile: bool = False, steps: int = 1, tiny: bool = False, **_: Any,
) -> Run:  # fmt: skip
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
    called, batch = torch.compile(model) if compile else model, tensors(folder, "batch", device)
    model.train()
    return stepping(model, adam, lambda: called(batch["ids"], batch["targets"])[1],
                    lambda: autocast(device, precision), steps)  # fmt: skip


def transformers(
    folder: Path, device: str, name: str, vocabulary: int, precision: str = "float32", compile: bool = False,
    steps: int = 1, tiny: bool = False, **_: Any,
) -> Run:  # fmt: skip
    """Its model and loss; parameter groups and order of the step are nanoGPT's."""
    model, weights = made(name, vocabulary, tiny), tensors(folder, "weights")
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    model.to(device).train()
    fused = {"fused": True} if device == "cuda" else {}  # as its Trainer
    adam = torch.optim.AdamW(weight_decay_groups(model), lr=RATE, betas=BETAS, eps=EPS, **fused)
    called, batch = torch.compile(model) if compile else model, tensors(folder, "batch", device)
    ids, targets = batch["ids"], batch["targets"]
    return stepping(model, adam, lambda: called(input_ids=ids, labels=targets, shift_labels=targets).loss,
                    lambda: autocast(device, precision), steps)  # fmt: skip
