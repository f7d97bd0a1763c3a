"""Parts that the families share: the decoder inside a model, and its tokenizer."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.errors import CheckpointError
from multimodal.models.text_config import TextConfig
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.any.chat import media_tokens
from multimodal.weights.table import NameRow, Tensors, under, weight_and_bias
from multimodal.weights.text import llama

# the sizes that LlamaConfig, MistralConfig and Qwen2Config have by default, which files of such models leave out
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "rms_norm_eps": 1e-6},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "rms_norm_eps": 1e-6},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32},
}  # fmt: skip


class Names(NamedTuple):
    """Foreign names of the decoder: prefix of all but the head, and the head."""

    base: str
    head: str


PLAIN = Names("language_model.model.", "language_model.lm_head.weight")


def text_config(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """`text_config` with the defaults of its kind. `kind`: the default kind. Raises CheckpointError."""
    own = {"model_type": kind} | (config.get("text_config") or {})
    if own["model_type"] not in SIZES:
        raise CheckpointError(f"config.json: text_config of kind {own['model_type']!r} is not supported")
    text = llama.DEFAULTS | SIZES[own["model_type"]] | llama.hf_complete(own, {})
    return text | {"tie_word_embeddings": bool(text["tie_word_embeddings"] or config.get("tie_word_embeddings"))}


def decoder_config(config: dict[str, Any], tensors: Tensors, kind: str, names: Names = PLAIN) -> TextConfig:
    return llama.hf_config(text_config(config, kind), tensors, (f"{names.base}embed_tokens.weight", names.head))


def decoder_rows(config: TextConfig, names: Names = PLAIN) -> list[NameRow]:
    rows = llama.hf_rows(config, names.base, names.head)
    return [replace(row, ours=tuple(f"decoder.{ours}" for ours in row.targets)) for row in rows]


def perceptron_rows(foreign: str, ours: str, bias: bool = True) -> list[NameRow]:
    """Rows of `linear_1` and `linear_2`."""
    rows = [*weight_and_bias("linear_1", "up"), *weight_and_bias("linear_2", "out")]
    return under(foreign, ours, [row for row in rows if bias or not row.foreign.endswith("bias")])


def decoder_tokenizer(
    folder: Path | None, config: dict[str, Any], kind: str, markers: Mapping[str, str]
) -> Tokenizer | None:  # fmt: skip
    """`markers`: see `media_tokens`; they are control tokens, whatever the folder says. Texts end at the eos of the
    decoder's configuration and at the whole model's."""
    text, names = text_config(config, kind), media_tokens(folder, markers)
    told = [one if isinstance(one, list) else [one] for one in (text.get("eos_token_id"), config.get("eos_token_id"))]
    text |= {"eos_token_id": [i for ids in told for i in ids if i is not None]}
    return hub_tokenizer(folder, text, context=text["max_position_embeddings"], names=names)
