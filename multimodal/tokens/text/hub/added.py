"""Tokens that a Hugging Face folder adds to its vocabulary, and settings of tokenizer_config.json that override
tokenizer.json, as transformers 5 reads them."""

import json
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json
from multimodal.tokens.text.hub.pipeline import vocabulary
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.tokens.text.wordpiece import bert_settings

ADDED, DECODER = "added_tokens.json", "added_tokens_decoder"
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
# transformers' classes that build the pipeline themselves, by their names without "Fast"
BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
WORDPIECE = (*BERT, "MPNetTokenizer")
BYTE_LEVEL = ("RobertaTokenizer", "BartTokenizer", "GPT2Tokenizer")
ENDS = {  # what they put around a text
    **dict.fromkeys((*BERT, "AlbertTokenizer", "DebertaV2Tokenizer"), ("BertProcessing", "[CLS]", "[SEP]")),
    **dict.fromkeys(
        ("MPNetTokenizer", "RobertaTokenizer", "BartTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer"),
        ("RobertaProcessing", "<s>", "</s>")),
}  # fmt: skip
STEPS = {"do_lower_case": ("Lowercase", True), "keep_accents": ("StripAccents", False)}
DEFAULTS = {  # of models whose files name no class
    **dict.fromkeys(("bert", "distilbert", "electra", "nomic_bert", "chinese_clip_text_model"), "BertTokenizer"),
    **dict.fromkeys(("roberta", "bart"), "RobertaTokenizer"), **dict.fromkeys(("gpt2", "opt"), "GPT2Tokenizer"),
    "mpnet": "MPNetTokenizer", "xlm-roberta": "XLMRobertaTokenizer", "albert": "AlbertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer", "camembert": "CamembertTokenizer", "pegasus": "PegasusTokenizer",
}  # fmt: skip
MISNAMED = ("modernbert",)  # models whose files name a class that transformers does not use


def added_tokens(folder: Path, special: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Entries as `added_tokens` of a tokenizer.json has them, in the order of ids: those of tokenizer_config.json,
    else of added_tokens.json, which has no flags. `special`: names of special tokens. Raises CheckpointError."""
    path = folder / RECORD
    table: Any = optional_json(path).get(DECODER)
    if not isinstance(table, dict):
        path = folder / ADDED
        table = {
            i: {"content": token, "special": token in special, "normalized": token not in special}
            for token, i in optional_json(path).items()
        }
    try:
        found = [FLAGS | token | {"id": int(i)} for i, token in table.items()]
        wrong = [token for token in found if not isinstance(token["content"], str) or not token["content"]]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: not a table of added tokens ({error!r:.60})") from None
    if wrong:
        raise CheckpointError(f"{path}: an added token must be a text (got {wrong[0]['content']!r:.40})")
    return sorted(found, key=lambda token: token["id"])


def set_flags(tokenizer: Tokenizer, folder: Path) -> None:
    """Set how tokenizer_config.json cuts long texts, and if it cleans decoded ones."""
    record = optional_json(folder / RECORD)
    side = record.get("truncation_side")
    tokenizer.cuts_left = tokenizer.cuts_left if side is None else side == "left"
    tokenizer.cleans = tokenizer.cleanable and record.get("clean_up_tokenization_spaces") is True


def class_name(record: dict[str, Any], config: dict[str, Any]) -> str | None:
    """transformers' class of a tokenizer, without "Fast"."""
    kind = config.get("model_type")
    named = record.get("tokenizer_class") or config.get("tokenizer_class") or DEFAULTS.get(str(kind))
    return named.removesuffix("Fast") if isinstance(named, str) and kind not in MISNAMED else None


def completed(
    pipeline: dict[str, Any], folder: Path, config: dict[str, Any], special: frozenset[str]
) -> dict[str, Any]:
    """The pipeline with the settings and added tokens of the files beside it. `special`: names of special tokens.
    Raises CheckpointError for a setting that contradicts the pipeline."""
    record = optional_json(folder / RECORD)
    made = pipeline | _configured(pipeline, record, class_name(record, config))
    ids = dict(vocabulary(made))
    own = {token["content"]: token for token in made.get("added_tokens") or []}
    more = {token["content"]: token for token in added_tokens(folder, special)}
    both = own | more if isinstance(record.get(DECODER), dict) else more | own
    added = [token | {"id": ids.get(name, token["id"])} for name, token in both.items()]
    return made | {"added_tokens": sorted(added, key=lambda token: token["id"])}


def _configured(pipeline: dict[str, Any], record: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """Parts of the pipeline that the class `kind` makes from its own settings."""
    normal, split, parts = pipeline.get("normalizer") or {}, pipeline.get("pre_tokenizer") or {}, {}
    if kind in WORDPIECE and normal.get("type") == "BertNormalizer":
        settings = bert_settings(record)
        chinese = settings.pop("split_chinese")
        parts["normalizer"] = normal | settings | {"handle_chinese_chars": chinese}
    if kind in BYTE_LEVEL and split.get("type") == "ByteLevel":
        parts["pre_tokenizer"] = split | {"add_prefix_space": bool(record.get("add_prefix_space"))}
    if kind in ("AlbertTokenizer", "DebertaV2Tokenizer"):
        for name, (step, value) in STEPS.items():
            own = record.get(name)
            if type(own) is bool and (own is value) != (f'"{step}"' in json.dumps(normal)):
                raise CheckpointError(f"{name} {own} of {RECORD} contradicts the normalizer")
    if kind in ENDS and not pipeline.get("post_processor"):
        form, first, last = ENDS[kind]
        ids = dict(vocabulary(pipeline))
        if first in ids and last in ids:
            parts["post_processor"] = {"type": form, "cls": [first, ids[first]], "sep": [last, ids[last]]}
    return parts
