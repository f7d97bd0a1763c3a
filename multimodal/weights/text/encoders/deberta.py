"""DeBERTa-v3 in the names of transformers' DebertaV2 (He et al. 2023): DebertaV2ForMaskedLM,
DebertaV2ForSequenceClassification, its classifiers of tokens and answers, DebertaV2Model.

Traps: positions are in the scores alone: a table of log-spaced distances, normed, goes through each layer's own query
and key maps, and all scores are divided by √(3E). Microsoft's files hold two heads of the pretraining, unread."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.system.files import optional_json
from multimodal.tokens.text.hub.build import BERT_NAMES, METASPACE, unigram_tokenizer
from multimodal.tokens.text.hub.pipeline import FILE as PIPELINE
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.weights.family import activation
from multimodal.weights.table import NameRow, Tensors, linears, under, weight_and_bias
from multimodal.weights.text import bert, bert_hf
from multimodal.weights.text.decoders.common import changed
from multimodal.weights.text.sentence import lowers, sentence_length

# DebertaV2Config's defaults
DEFAULTS = {"vocab_size": 128100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24,
            "intermediate_size": 6144, "type_vocab_size": 0, "layer_norm_eps": 1e-7, "max_relative_positions": -1,
            "position_buckets": -1, "norm_rel_ebd": "none", "pooler_hidden_act": "gelu"}  # fmt: skip
ONLY = {"relative_attention": True, "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0,
        "legacy": True}  # fmt: skip
ABSENT = {"relative_attention": False, "share_att_key": False, "position_biased_input": True}  # transformers' defaults
BLOCK = {f"attention.self.{part}_proj": f"attention.{part}" for part in ("query", "key", "value")} | bert.FEED | {
    "attention.output.dense": "attention.out", "attention.output.LayerNorm": "attention_branch.norm"}  # fmt: skip
PRETRAINING = ("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "mask_predictions.dense",
               "mask_predictions.LayerNorm", "mask_predictions.classifier")  # fmt: skip

PIECES = "spm.model"
BLANKS = [
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
]


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError for unsupported options, by name and value."""
    for key, value in ONLY.items():
        if (own := config.get(key, ABSENT.get(key, value))) != value:
            raise CheckpointError(f"config.json: {key} {own!r} is not supported")
    kinds = config.get("pos_att_type") or ()
    if set(kinds.split("|") if isinstance(kinds, str) else kinds) != {"p2c", "c2p"}:
        raise CheckpointError(f"config.json: pos_att_type {kinds!r:.40} is not supported")
    norm, inner = config["norm_rel_ebd"], config.get("embedding_size") or config["hidden_size"]
    if config.get("conv_kernel_size") or norm not in ("none", "layer_norm") or inner != config["hidden_size"]:
        raise CheckpointError(
            f"config.json: conv_kernel_size {config.get('conv_kernel_size')!r}, norm_rel_ebd {norm!r}, embedding_size "
            f"{inner!r} is not supported"
        )
    furthest = config["max_relative_positions"]
    furthest = config["max_position_embeddings"] if furthest < 1 else furthest
    if (buckets := config["position_buckets"]) < 2:
        raise CheckpointError(f"config.json: position_buckets {buckets!r} is not supported")
    positions = PositionConfig("disentangled", buckets=buckets, furthest=furthest, table_norm=norm == "layer_norm")
    made = replace(bert.encoder_config(config | bert.ENCODER, tensors, prefix, bert_hf.HEAD), positions=positions)
    own = made.stack.block.attention
    made = changed(made, scale=(3 * own.width // own.heads) ** -0.5)
    pools = {"pooler.dense": activation(config, "pooler_hidden_act")} if "pooler.dense.weight" in tensors else {}
    return bert.with_classes(made, tensors, config, pools, bert.TAGS)


def rows(config: TextConfig, prefix: str) -> list[NameRow]:
    table = [NameRow("rel_embeddings.weight", "relative.weight"), *weight_and_bias("LayerNorm", "relative_norm")]
    made = [
        NameRow("embeddings.word_embeddings.weight", "embed.weight"), *weight_and_bias("embeddings.LayerNorm", "norm"),
        *under("encoder.", "", table), *under("encoder.layer.{}.", "stack.blocks.{}.", linears(BLOCK)),
    ]  # fmt: skip
    own = bert.names_of(config)
    unread = [NameRow(f"{name}.{part}", reason="of the pretraining", optional=True)
              for name in PRETRAINING for part in ("weight", "bias")]  # fmt: skip
    return [
        *under(prefix, "", [row for row in made if row.targets[0] in own]),
        NameRow(f"{prefix}embeddings.position_ids", reason="0, 1, 2, …", optional=True),
        *bert_hf.HEAD.rows(prefix + bert.WORD, config),
        *(linears({"pooler.dense": "pool.linear"}) if config.pool else []),
        *(linears({bert.TAGS: "classes"}) if config.classes else []), *bert.token_heads(config),
        *unread, NameRow("lm_predictions.lm_head.bias", reason="of the pretraining", optional=True),
    ]  # fmt: skip


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """From tokenizer.json, or else Microsoft's SentencePiece model, which lacks the mask."""
    if folder is None or (folder / PIPELINE).exists() or not (path := folder / PIECES).exists():
        return bert.encoder_tokenizer(folder, config)
    record = optional_json(folder / RECORD)
    if name := next((name for name in ("do_lower_case", "split_by_punct") if record.get(name)), None):
        raise CheckpointError(f"{folder / RECORD}: {name} is not supported without {PIPELINE}")
    size, length = config["vocab_size"], sentence_length(folder, config["max_position_embeddings"])
    made = {"steps": BLANKS, "more": ["[MASK]"], "lowercase": lowers(folder)}
    return unigram_tokenizer(path, METASPACE, BERT_NAMES, config, size, length, **made)


_HEADS, _MODEL = bert.families(("deberta",), config_from, rows, DEFAULTS, tokenizer=tokenizer)
FAMILY = replace(_HEADS, types=("deberta-v2",))
MODEL = replace(_MODEL, types=("deberta-v2",))
