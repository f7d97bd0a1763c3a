"""ModernBERT in transformers' names (Warner et al. 2024): ModernBertForMaskedLM, ModernBertForSequenceClassification,
ModernBertModel.

Traps: the first layer's attention has no norm, as the embeddings are normed. Two of three layers see a window of
`local_attention` tokens, half on each side, with positions of another base. `Wi` holds the gate, then up."""

from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import MEAN, TextConfig
from multimodal.weights.family import Family, activation
from multimodal.weights.table import HALVES, THIRDS, NameRow, Tensors, linears, qkv, repeat, under, weight_and_bias
from multimodal.weights.text import bert
from multimodal.weights.text.decoders.common import changed, windowed
from multimodal.weights.text.decoders.rope import by_kind_of_layer, positions

# ModernBertConfig's defaults
DEFAULTS = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "hidden_activation": "gelu", "classifier_activation": "gelu", "norm_eps": 1e-5,
    "max_position_embeddings": 8192, "norm_bias": False, "attention_bias": False, "mlp_bias": False,
    "decoder_bias": True, "classifier_bias": False, "classifier_pooling": "cls", "local_attention": 128,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
POOLINGS = {"cls": "", "mean": MEAN}
EMBEDDING, DENSE = "embeddings.tok_embeddings.weight", "head.dense.weight"
BLOCK = {"attn_norm": "attention_branch.norm", "mlp_norm": "feed_branch.norm", "attn.Wo": "attention.out",
         "mlp.Wo": "feed.down"}  # fmt: skip


def config_from(text: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError for a head whose activation is not the blocks'."""
    if text["classifier_activation"] != text["hidden_activation"]:
        raise CheckpointError(f"config.json: classifier_activation {text['classifier_activation']!r} is not supported")
    ropes, scaling = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    text = by_kind_of_layer(text)
    far, near = (
        positions(text, (ropes.get(f"{kind}_attention") or {"rope_theta": text[f"{key}_rope_theta"]}) | scaling)
        for kind, key in (("full", "global"), ("sliding", "local"))
    )
    stack = transformer(
        text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"], text["intermediate_size"],
        activation=activation(text, "hidden_activation"), norm_eps=text["norm_eps"],
    )  # fmt: skip
    made = TextConfig(
        text["vocab_size"], text["max_position_embeddings"], replace(stack, first_norm=False), False, stem_norm=True,
        positions=far, head_linear_bias=text["classifier_bias"],
    )  # fmt: skip
    block = {"gated": True, "norm": "layer" if text["norm_bias"] else "layer_unbiased", "feed_bias": text["mlp_bias"]}
    window = text | {"sliding_window": text["local_attention"] // 2 + 1}
    every = text["global_attn_every_n_layers"]
    made = windowed(changed(made, block, bias=text["attention_bias"]), window, lambda layer: layer % every != 0, near)
    return _with_heads(made, text, tensors, prefix)


def _with_heads(made: TextConfig, text: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    classes = len(tensors[f"{bert.TAGS}.weight"]) if f"{bert.TAGS}.weight" in tensors else 0
    if classes and bert.is_tagger(text):
        raise CheckpointError(f"a classifier of tokens ({classes}) after a head is not supported")
    if any(str(name).endswith("ForQuestionAnswering") for name in text.get("architectures") or ()):
        raise CheckpointError("ModernBertForQuestionAnswering, which finds answers after a head, is not supported")
    if classes and text["classifier_pooling"] not in POOLINGS:
        raise CheckpointError(f"config.json: classifier_pooling {text['classifier_pooling']!r} is not supported")
    if classes or DENSE not in tensors:
        pool = POOLINGS[text["classifier_pooling"]] + made.stack.block.activation
        return replace(made, classes=classes, **({"pool": pool, "pool_norm": True} if classes else {}))
    tied = bert.same(tensors, "decoder.weight", prefix + EMBEDDING, absent=text["tie_word_embeddings"])
    return replace(made, tied=tied, transform=True, head_bias=text["decoder_bias"])


def rows(config: TextConfig, prefix: str) -> list[NameRow]:
    block = [*linears(BLOCK), *weight_and_bias("attn.Wqkv", qkv("attention"), THIRDS),
             *weight_and_bias("mlp.Wi", ("feed.gate", "feed.up"), HALVES)]  # fmt: skip
    names = {"embeddings.tok_embeddings": "embed", "embeddings.norm": "norm", "final_norm": "stack.norm"}
    head = "pool" if config.pool else "transform"
    made = [*under(prefix, "", [*linears(names), *under("layers.{}.", "stack.blocks.{}.", block)]),
            *linears({"head.dense": f"{head}.linear", "head.norm": f"{head}.norm", bert.TAGS: "classes"}),
            NameRow("decoder.weight", "head.weight"),
            NameRow("decoder.bias", "tied_bias" if config.tied else "head.bias")]  # fmt: skip
    own = bert.names_of(config)
    kept = [row for row in made if all(target in own for target in row.targets)]
    return [*kept, *([repeat("decoder.weight", prefix + EMBEDDING)] if config.tied else [])]


def _family(name: str, prefix: str) -> Family:
    return Family(
        name, TextTransformer, (prefix + EMBEDDING, f"{prefix}layers.0.attn.Wqkv.weight"),
        partial(config_from, prefix=prefix), partial(rows, prefix=prefix), bert.encoder_tokenizer,
        card=bert.encoder_card, needs="config.json", defaults=DEFAULTS, types=("modernbert",),
    )  # fmt: skip


FAMILY, MODEL = _family("modernbert", "model."), _family("modernbert-model", "")
