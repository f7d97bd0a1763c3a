"""Text towers in BERT's names: the configuration, tables and vocabulary that BERT, its descendants and the decoders of
BLIP and GIT share.

Traps: norms follow each residual sum, with an epsilon of 1e-12, and one precedes the blocks. The map to logits is the
embedding (stored once or twice) or a map of its own under the same name; likewise its bias."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.system.files import optional_json
from multimodal.tokens.text.hub.build import words_tokenizer
from multimodal.tokens.text.hub.fairseq import pieces_tokenizer
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.weights.family import Family, activation
from multimodal.weights.folder import build
from multimodal.weights.table import NameRow, Tensors, linears, repeat, under, weight_and_bias
from multimodal.weights.text.sentence import PROMPTS, lowers, sentence_length

WORD = "embeddings.word_embeddings.weight"
TAGS, SPANS = "classifier", "qa_outputs"
# of a config.json: kept for an export; the two others hold the activation of sentence-transformers' cross-encoders
HEAD_FACTS = ("problem_type", "sentence_transformers", "sbert_ce_default_activation_function")
UNNAMED = ("ForMultipleChoice", "ForNextSentencePrediction")  # ends of classes whose outputs have no names
MOST_CLASSES = 1_000_000  # whose names are made up from num_labels
SELF = {f"self.{part}": part for part in ("query", "key", "value")} | {"output.dense": "out"}
FEED = {"intermediate.dense": "feed.up", "output.dense": "feed.down", "output.LayerNorm": "feed_branch.norm"}
ENCODER = {"is_decoder": False, "add_cross_attention": False}  # of classes that ignore what their files say of it
SIZES = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, **ENCODER,
}  # fmt: skip


class Head(NamedTuple):
    """Names of the language-model head: linear map, norm, map to the vocabulary, and its bias, which may also be stored
    as `decoder`.bias."""

    dense: str
    norm: str
    decoder: str
    bias: str

    def tied(self, tensors: Tensors, embedding: str, config: dict[str, Any]) -> bool | None:
        """None: no such head in the file. Raises CheckpointError if the two names of the bias differ."""
        if f"{self.dense}.weight" not in tensors:
            return None
        if not same(tensors, twin := f"{self.decoder}.bias", self.bias, absent=True):
            raise CheckpointError(f"tensor {twin!r} differs from {self.bias!r}, which it must repeat")
        return same(tensors, f"{self.decoder}.weight", embedding, absent=config.get("tie_word_embeddings", True))

    def rows(self, embedding: str, config: TextConfig, ours: str = "") -> list[NameRow]:
        if config.tied is None:
            return []
        weight = f"{self.decoder}.weight"
        return [
            *weight_and_bias(self.dense, f"{ours}transform.linear"),
            *weight_and_bias(self.norm, f"{ours}transform.norm"),
            NameRow(self.bias, f"{ours}tied_bias" if config.tied else f"{ours}head.bias"),
            repeat(weight, embedding) if config.tied else NameRow(weight, f"{ours}head.weight"),
            *([repeat(f"{self.decoder}.bias", self.bias)] if self.bias != f"{self.decoder}.bias" else []),
        ]  # fmt: skip


def decoder_config(
    text: dict[str, Any], tied: bool | None, transform: bool, source_width: int | None = None
) -> TextConfig:
    """Raises CheckpointError for an unknown activation or positions that are not absolute."""
    if (kind := text.get("position_embedding_type", "absolute")) != "absolute":
        raise CheckpointError(f"config.json: position_embedding_type {kind!r} is not supported")
    stack = transformer(
        text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"], text["intermediate_size"],
        activation=activation(text, "hidden_act"), norm_eps=text["layer_norm_eps"], final_norm=False,
        source_width=source_width,
    )  # fmt: skip
    stack = replace(stack, block=replace(stack.block, post_norm=True))
    return TextConfig(
        text["vocab_size"], text["max_position_embeddings"], stack, causal=True, tied=tied, stem_norm=True,
        transform=transform, head_bias=True,
    )  # fmt: skip


def encoder_config(
    text: dict[str, Any], tensors: Tensors, prefix: str, head: Head, gelu_head: bool = False
) -> TextConfig:
    """The tower and its head. `gelu_head`: the head has GELU whatever the blocks have. Raises CheckpointError."""
    if text["add_cross_attention"]:
        raise CheckpointError("config.json: add_cross_attention (a decoder over another model) is not supported")
    tied = head.tied(tensors, prefix + WORD, text)
    tower = decoder_config(text, tied, transform=tied is not None)
    if gelu_head and tied is not None and tower.stack.block.activation != "gelu":
        raise CheckpointError(f"config.json: hidden_act {text['hidden_act']!r} with a gelu head is not supported")
    segments = text["type_vocab_size"]
    return replace(tower, causal=bool(text["is_decoder"]), head_bias=tied is not None, segments=segments)


def with_classes(
    config: TextConfig, tensors: Tensors, text: dict[str, Any], pools: dict[str, str], *names: str
) -> TextConfig:
    """Add the classifier called one of `names`, after one of `pools` (linear map: activation), the classifier of tokens
    (`TAGS` without a pooler, or beside an unused one if the configuration names its class) and that of answers. Raises
    CheckpointError for a decoder with a pooler, which would pool its last token, and for a head of another size."""
    pool = next((activation for name, activation in pools.items() if f"{name}.weight" in tensors), None)
    classes = next((len(tensors[f"{name}.weight"]) for name in names if f"{name}.weight" in tensors), 0)
    tags = 0
    if f"{TAGS}.weight" in tensors and (pool is None or is_tagger(text)):
        tags, classes = len(tensors[f"{TAGS}.weight"]), 0
    if classes and pool is None:
        raise CheckpointError(f"a classifier of {classes} classes without a pooler is not supported")
    if pool and config.causal:
        raise CheckpointError("config.json: is_decoder True with a pooler (of the first token) is not supported")
    spans = f"{SPANS}.weight" in tensors
    if spans and (size := len(tensors[f"{SPANS}.weight"])) != 2:
        raise CheckpointError(
            f"tensor '{SPANS}.weight': expected 2 rows, the start and the end of an answer, got {size}"
        )
    return replace(config, pool=pool, classes=classes, tags=tags, spans=spans)


def is_tagger(config: dict[str, Any]) -> bool:
    """Return True if a foreign configuration names a classifier of tokens."""
    return any(str(name).endswith("ForTokenClassification") for name in config.get("architectures") or ())


def token_heads(config: TextConfig) -> list[NameRow]:
    """Rows of the classifiers of tokens and of answers."""
    return linears(({TAGS: "tags"} if config.tags else {}) | ({SPANS: "spans"} if config.spans else {}))


def same(tensors: Tensors, name: str, other: str, absent: bool) -> bool:
    """Return True if two names hold one tensor; `absent`: the answer if there is no `name`."""
    return absent if name not in tensors else other in tensors and torch.equal(tensors[name], tensors[other])


def tower_rows(prefix: str, ours: str = "", cross: bool = False, segments: int = 0) -> list[NameRow]:
    """Rows of embeddings and blocks."""
    block = [
        *attention_rows("attention", "attention"),
        *(attention_rows("crossattention", "cross") if cross else []),
        *linears(FEED),
    ]
    blocks = under(f"{prefix}encoder.layer.{{}}.", f"{ours}stack.blocks.{{}}.", block)
    return [*embedding_rows(prefix, ours, segments), *blocks]


def embedding_rows(prefix: str, ours: str, segments: int) -> list[NameRow]:
    rows = [
        NameRow("word_embeddings.weight", "embed.weight"),
        NameRow("position_embeddings.weight", "positions"),
        *([NameRow("token_type_embeddings.weight", "segments.weight")] if segments else []),
        *weight_and_bias("LayerNorm", "norm"),
        NameRow("position_ids", reason="0, 1, 2, …", optional=True),
    ]
    return under(f"{prefix}embeddings.", ours, rows)


def attention_rows(foreign: str, ours: str) -> list[NameRow]:
    rows = under(f"{foreign}.", f"{ours}.", linears(SELF))
    return [*rows, *weight_and_bias(f"{foreign}.output.LayerNorm", f"{ours}_branch.norm")]


def names_of(config: TextConfig) -> frozenset[str]:
    """Names of the model's tensors with `{}` for the layer; two layers have them all."""
    short = replace(config, stack=replace(config.stack, layers=min(2, config.stack.layers)))
    return frozenset(re.sub(r"\.\d+\.", ".{}.", name) for name in build(TextTransformer, short).state_dict())


def families(
    types: tuple[str, ...], config_from: Callable[..., TextConfig], rows: Callable[..., list[NameRow]],
    defaults: dict[str, Any], **parts: Any,
) -> tuple[Family, Family]:  # fmt: skip
    """Families of models with heads, whose names begin with the first of `types`, and of encoders alone, which must
    state their type.

    `config_from` and `rows` also get that `prefix`. `parts`: further fields of both."""

    def made(name: str, prefix: str, types: tuple[str, ...]) -> Family:
        own = (partial(function, prefix=prefix) for function in (config_from, rows))
        common = {"tokenizer": encoder_tokenizer, "card": encoder_card, "needs": "config.json"}
        return Family(
            name, TextTransformer, (prefix + WORD,), *own, **common | parts, defaults=SIZES | defaults, types=types
        )

    return made(types[0], f"{types[0]}.", ("", *types)), made(f"{types[0]}-model", "", types)


def encoder_card(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Names of the classes, and what their logits are for."""
    names = class_names(config)
    several = {"scores": "sigmoid"} if config.get("problem_type") == "multi_label_classification" else {}
    own = optional_json(folder / PROMPTS).get("activation_fn") if folder else None  # sentence-transformers from 6 on
    config = {"sentence_transformers": own and {"activation_fn": own}} | config
    told = {name: config[name] for name in HEAD_FACTS if config.get(name)}
    return {"labels": names} | several | told if names else {}


def class_names(config: dict[str, Any]) -> list[str]:
    """`id2label` in the order of the numbers; [] if it is incomplete, or of no classifier. A classifier without it has
    transformers' names, two if `num_labels` states no other count."""
    names, count = config.get("id2label"), config.get("num_labels", 2)
    classes = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(UNNAMED) for name in classes):
        return []
    if names is None and any("Classification" in name for name in classes):
        names = {str(n): f"LABEL_{n}" for n in range(count)} if type(count) is int and count <= MOST_CLASSES else None
    if not isinstance(names, dict) or sorted(map(str, names)) != sorted(map(str, range(len(names)))):
        return []
    return [str(names[number]) for number in sorted(names, key=int)]


def tokenizer(folder: Path | None, size: int, bos: Any, eos: Any, context: int) -> Tokenizer | None:
    """BERT's tokenizer if tokenizer_config.json names it, else None. Raises CheckpointError if it does not fit."""
    kind = optional_json(folder / RECORD).get("tokenizer_class") if folder else None
    known = kind in ("BertTokenizer", "BertTokenizerFast")
    return WordPieceTokenizer.from_bert(folder, size, bos, eos, context) if known else None


def encoder_tokenizer(folder: Path | None, config: dict[str, Any], first: int = 0) -> Tokenizer | None:
    """Tokenizer of a Hugging Face folder. `first`: row of the first position. Raises CheckpointError."""
    if folder is None:
        return None
    size, context = config["vocab_size"], sentence_length(folder, config["max_position_embeddings"] - first)
    if (folder / "vocab.txt").exists() and not (folder / "tokenizer.json").exists():
        return words_tokenizer(folder, config, size, context, lowers(folder))
    if made := pieces_tokenizer(folder, config, size, context, lowers(folder)):
        return made
    return hub_tokenizer(folder, config, size, context, lowers(folder), named_end=False)
