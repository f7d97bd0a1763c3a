"""DistilBERT in transformers' names (Sanh et al. 2019): DistilBertForMaskedLM, DistilBertForSequenceClassification,
DistilBertModel, and its classifiers of tokens, answers and choices.

Traps: config.json has its own names for the sizes and lacks the norms' epsilon. No segments. The classifier has a ReLU
where BERT's pooler has tanh. Sinusoids are stored in the file."""

from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.family import renamed
from multimodal.weights.table import NameRow, Tensors, linears, under
from multimodal.weights.text import bert

# DistilBertConfig's names for BERT's, and its defaults
NAMES = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
         "hidden_dim": "intermediate_size", "activation": "hidden_act"}  # fmt: skip
DEFAULTS = {"num_hidden_layers": 6, "type_vocab_size": 0}
HEAD = bert.Head("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")
BLOCK = {
    "attention.q_lin": "attention.query", "attention.k_lin": "attention.key", "attention.v_lin": "attention.value",
    "attention.out_lin": "attention.out", "sa_layer_norm": "attention_branch.norm", "ffn.lin1": "feed.up",
    "ffn.lin2": "feed.down", "output_layer_norm": "feed_branch.norm",
}  # fmt: skip


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError as BERT's does."""
    fixed = {"layer_norm_eps": 1e-12, **bert.ENCODER}  # whatever the file says
    made = bert.encoder_config(config | fixed, tensors, prefix, HEAD)
    return bert.with_classes(made, tensors, config, {"pre_classifier": "relu"}, "classifier")


def rows(config: TextConfig, prefix: str) -> list[NameRow]:
    classifier = linears({"pre_classifier": "pool.linear", "classifier": "classes"})
    return [
        *bert.embedding_rows(prefix, "", config.segments),
        *under(f"{prefix}transformer.layer.{{}}.", "stack.blocks.{}.", linears(BLOCK)),
        *HEAD.rows(prefix + bert.WORD, config),
        *(classifier if config.classes else []),
        *bert.token_heads(config),
    ]


FAMILY, MODEL = bert.families(("distilbert",), config_from, rows, DEFAULTS, complete=renamed(NAMES))
