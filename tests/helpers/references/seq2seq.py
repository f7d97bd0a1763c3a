"""Tiny random transformers encoder-decoders and their outputs, for the tests of weights and translation."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.weights.family import Family
from multimodal.weights.text import bart, m2m100, marian, pegasus, switch, t5, umt5
from tests.helpers.references.vision import randomized

VOCABULARY, CONTEXT = 60, 24
STATIC = "embed_positions.weight"  # Marian's sinusoids are fixed


@dataclass(frozen=True)
class Seq2SeqCase:
    family: Family
    reference: nn.Module
    dropped: tuple[str, ...] = ()  # ends of names that a file may have, and that an export does not

    @property
    def config(self) -> dict[str, Any]:
        """Configuration as in config.json, without the library's defaults."""
        return json.loads(self.reference.config.to_json_string())

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.reference.state_dict().items()}


def _t5(gated: bool = False, own_head: bool = False, prefix: str = "T5", **options: Any) -> Seq2SeqCase:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2,
             "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}  # fmt: skip
    kind = {"feed_forward_proj": "gated-gelu"} if gated else {}
    config = getattr(transformers, f"{prefix}Config")(**sizes | kind | options, tie_word_embeddings=not own_head)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    if own_head:
        model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    return Seq2SeqCase(t5.FAMILY, randomized(model))


def switch_case(**options: Any) -> Seq2SeqCase:
    sizes = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 3, **options}
    return Seq2SeqCase(switch.FAMILY, _t5(prefix="SwitchTransformers", **sizes).reference)


def _t5_encoder() -> Seq2SeqCase:
    from transformers import T5EncoderModel

    return Seq2SeqCase(t5.ENCODER, randomized(T5EncoderModel(_t5(gated=True).reference.config)))


def _sizes(**options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "d_model": 24, "max_position_embeddings": CONTEXT, "encoder_layers": 3,
        "encoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_layers": 2, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 36, **options,
    }  # fmt: skip


def named(family: Family, kind: str, name: str, dropped: tuple[str, ...] = (), **options: Any) -> Seq2SeqCase:
    import transformers

    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**_sizes(**options)))
    kept = {key: value.clone() for key, value in model.state_dict().items() if key.endswith(STATIC)}
    randomized(model)
    if dropped:
        model.load_state_dict(kept, strict=False)
    return Seq2SeqCase(family, model, dropped)


MARIAN = {"decoder_start_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1, "dropped": (STATIC,),
          "activation_function": "swish", "scale_embedding": True}  # fmt: skip
CASES: dict[str, Callable[[], Seq2SeqCase]] = {
    "Hugging Face T5": _t5,
    "Hugging Face T5 v1.1": lambda: _t5(gated=True, own_head=True),
    "Hugging Face T5, dense_act_fn": lambda: _t5(gated=True, dense_act_fn="silu"),
    "Hugging Face mT5": lambda: _t5(prefix="MT5", initializer_factor=0.2, scale_decoder_outputs=True),
    "Hugging Face UMT5": lambda: Seq2SeqCase(
        umt5.FAMILY, _t5(prefix="UMT5", gated=True, scale_decoder_outputs=False).reference),
    "Hugging Face T5, encoder": _t5_encoder,
    "Hugging Face Switch Transformer": switch_case,
    "Hugging Face BART": lambda: named(bart.FAMILY, "Bart", "BartForConditionalGeneration"),
    "Hugging Face BART, body": lambda: named(bart.BODY, "Bart", "BartModel", scale_embedding=True),
    "Hugging Face mBART": lambda: named(bart.FAMILY, "MBart", "MBartForConditionalGeneration", scale_embedding=True),
    "Hugging Face M2M100": lambda: named(m2m100.FAMILY, "M2M100", "M2M100ForConditionalGeneration"),
    "Hugging Face M2M100, pad 0": lambda: named(
        m2m100.FAMILY, "M2M100", "M2M100ForConditionalGeneration", pad_token_id=0,
    ),
    "Hugging Face Pegasus": lambda: named(pegasus.PEGASUS, "Pegasus", "PegasusForConditionalGeneration", (STATIC,),
                                         scale_embedding=True),
    "Hugging Face Blenderbot": lambda: named(pegasus.BLENDERBOT, "Blenderbot", "BlenderbotForConditionalGeneration"),
    "Hugging Face Marian": lambda: named(marian.FAMILY, "Marian", "MarianMTModel", **MARIAN),
    "Hugging Face Marian, two vocabularies": lambda: named(
        marian.FAMILY, "Marian", "MarianMTModel", **MARIAN | {"decoder_vocab_size": VOCABULARY + 5},
        share_encoder_decoder_embeddings=False,
    ),
}  # fmt: skip
WITH_HEAD = [name for name in CASES if not name.endswith(("encoder", "body"))]


@lru_cache
def case(name: str) -> Seq2SeqCase:
    torch.manual_seed(0)
    return CASES[name]()
