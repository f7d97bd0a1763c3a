"""Random models of released sizes in transformers' folder layout, and random ids."""

import gzip
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peers.plain_files import TEXTS, rows

SPREAD = 4.0  # factor of the blocks' weights: with a new model's, greedy decoding repeats one token
FAMILIES = {  # transformers' class, and the blocks whose weights are multiplied
    "gpt2": ("GPT2", "LMHeadModel", ".h."),
    "bert": ("Bert", "Model", None),
    "llama": ("Llama", "ForCausalLM", None),
    "smollm2": ("Llama", "ForCausalLM", "layers."),
    "t5": ("T5", "ForConditionalGeneration", "decoder.block."),
}
SIZES = {  # where transformers' default is no released model
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100_000,
                "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}  # fmt: skip
TINY: Mapping[str, Mapping[str, int]] = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000},
    "bert": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256,
             "vocab_size": 1000},
    "t5": {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 128,
           "vocab_size": 1000},
    "smollm2": {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 3,
                "num_key_value_heads": 1, "vocab_size": 1024},
}  # fmt: skip


def made(family: str, tiny: bool = False, sizes: Mapping[str, Any] | None = None) -> nn.Module:
    """transformers' model with random weights, GPT-2 small, BERT base, T5 small or SmolLM2-135M with
    these `sizes`; no token ends a text."""
    import transformers

    torch.manual_seed(0)
    name, kind, blocks = FAMILIES[family]
    start = {"decoder_start_token_id": 0} if family == "t5" else {}
    config = start | SIZES.get(family, {}) | (TINY[family] if tiny else {}) | dict(sizes or {})
    model = getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**config))
    for key, tensor in model.named_parameters():
        if blocks and blocks in key and tensor.ndim == 2:
            tensor.data.mul_(SPREAD)
    if blocks:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def prepare(
    folder: Path, device: str, family: str, lengths: Sequence[int] = (), tiny: bool = False,
    sizes: Mapping[str, Any] | None = None, **_: Any,
) -> None:  # fmt: skip
    """`folder/hub` by `save_pretrained`, and `folder/ids.safetensors`: random rows of these lengths."""
    model = made(family, tiny, sizes)
    model.save_pretrained(folder / "hub")
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, model.config.vocab_size, (length,), generator=draw) for length in lengths]
    if rows:
        save_file({f"{number:03}": row for number, row in enumerate(rows)}, folder / "ids.safetensors")


def ids(folder: Path, device: str = "cpu") -> Tensor:
    """Rows of one length as [B T]."""
    return torch.tensor(rows(folder), device=device)


def sentence_lengths(count: int) -> list[int]:
    """Token counts of sentences, sampled with a seed: words and punctuation of SST-2's dev set plus BERT's two control
    tokens if that file is there, else similar numbers."""
    draw, path = random.Random(0), TEXTS / "sst2" / "dev.tsv.gz"
    if not path.is_file():
        return [max(4, round(draw.gauss(21, 9))) for _ in range(count)]
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    texts = draw.sample([line.rsplit("\t", 1)[0] for line in lines], count)
    return [2 + len(re.findall(r"\w+|[^\w\s]", text)) for text in texts]
