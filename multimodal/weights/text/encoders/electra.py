"""ELECTRA in transformers' names (Clark et al. 2020): generator (ElectraForMaskedLM), discriminator
(ElectraForPreTraining), classifiers and ElectraModel.

Traps: if the embedding width differs from the blocks', `embeddings_project` maps to it, and the head maps back.
Generator and classifier have GELU whatever the blocks have."""

from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import TextConfig
from multimodal.weights.table import NameRow, Tensors, linears
from multimodal.weights.text import bert

# ElectraConfig's defaults that differ from BERT's
DEFAULTS = {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
SUMMARY = "sequence_summary.summary"
LOGITS, DETECT = "generator_lm_head", "discriminator_predictions"
HEAD = bert.Head("generator_predictions.dense", "generator_predictions.LayerNorm", LOGITS, f"{LOGITS}.bias")


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError as BERT's does."""
    made = bert.encoder_config(config, tensors, prefix, HEAD, gelu_head=True)
    inner = config["embedding_size"]
    made = replace(made, embed_width=None if inner == made.width else inner, detect=f"{DETECT}.dense.weight" in tensors)
    chooses = any(str(name).endswith("ForMultipleChoice") for name in config.get("architectures") or ())
    if chooses or f"{SUMMARY}.weight" in tensors:
        for key, known in (("summary_type", "first"), ("summary_activation", "gelu"), ("summary_use_proj", True)):
            if config.get(key, known) != known:
                raise CheckpointError(f"config.json: {key} {config[key]!r} is not supported (expected {known!r})")
    pools = {"classifier.dense": "gelu", SUMMARY: "gelu"}
    return bert.with_classes(made, tensors, config, pools, "classifier.out_proj", bert.TAGS)


def rows(config: TextConfig, prefix: str, choice: bool = False) -> list[NameRow]:
    """`choice`: names of the classifier of ElectraForMultipleChoice."""
    detector = {f"{DETECT}.dense": "detect.linear", f"{DETECT}.dense_prediction": "detect.out"}
    pool, classes = (SUMMARY, "classifier") if choice else ("classifier.dense", "classifier.out_proj")
    classifier = {pool: "pool.linear", classes: "classes"}
    names = (detector if config.detect else {}) | (classifier if config.classes else {})
    names |= {f"{prefix}embeddings_project": "widen"} if config.embed_width else {}
    tower = bert.tower_rows(prefix, segments=config.segments)
    return [*tower, *HEAD.rows(prefix + bert.WORD, config), *linears(names), *bert.token_heads(config)]


_HEADS, MODEL = bert.families(("electra",), config_from, rows, DEFAULTS)
FAMILY = replace(_HEADS, lacks=(f"{SUMMARY}.weight",))
CHOICE = replace(
    _HEADS, name="electra-choice", has=(*_HEADS.has, f"{SUMMARY}.weight"),
    rows=partial(rows, prefix="electra.", choice=True),
)  # fmt: skip
