"""Tokenizers of Hugging Face folders that hold a vocabulary without a tokenizer.json: BERT's `vocab.txt` and
SentencePiece models of Unigram."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json
from multimodal.tokens.text.hub.added import BERT, FLAGS, WORDPIECE, added_tokens, class_name
from multimodal.tokens.text.hub.files import folder_tokenizer
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.tokens.text.sentencepiece import pieces_model
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.tokens.text.wordpiece import FILE, WordPieceTokenizer, read_vocabulary

BERT_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}
MPNET_NAMES = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "[UNK]", "mask": "<mask>"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
# transformers' pipeline of T5 and others, which drops blanks around a text
SPLIT = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]}


def words_tokenizer(
    folder: Path, config: dict[str, Any], size: int, context: int, lowercase: bool = False
) -> Tokenizer:
    """BERT's or MPNet's WordPiece of a folder's `vocab.txt`. The arguments as in `hub_tokenizer`. Raises
    CheckpointError, also for another class of tokenizer."""
    path, record = folder / FILE, optional_json(folder / RECORD)
    if (kind := class_name(record, config) or BERT[0]) not in WORDPIECE:
        raise CheckpointError(f"{path}: tokenizer_class {kind!r:.40} is not supported with this file")
    vocab = read_vocabulary(path)
    if kind in BERT and all(token["content"] in vocab for token in added_tokens(folder)):
        made = WordPieceTokenizer.from_bert(folder, size, "[CLS]", "[SEP]", context)
        if made.lowercase or not lowercase:
            return made
        accents = bool(made.strip_accents)  # a cased model's own normalizer keeps them
        return WordPieceTokenizer(vocab, size, made.bos_id, made.eos_id, context, True, accents, made.split_chinese)
    names = BERT_NAMES if kind in BERT else MPNET_NAMES
    pipeline = {
        "version": "1.0", "added_tokens": [], "normalizer": {"type": "BertNormalizer", "clean_text": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": names["unk"], "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {token: i for i, token in enumerate(vocab)}},
    }  # fmt: skip
    return folder_tokenizer(path, pipeline, names, config | {"tokenizer_class": kind}, size, context, lowercase)


def unigram_tokenizer(
    path: Path, split: dict[str, Any], names: dict[str, str], config: dict[str, Any], size: int,
    context: int | None = None, steps: Sequence[dict[str, Any]] = (), more: Sequence[str] = (),
    proto: bytes | None = None, lowercase: bool = False, first: Sequence[str] = (), skipped: int = 0,
    before: Sequence[dict[str, Any]] = (),
) -> HubTokenizer:  # fmt: skip
    """From a SentencePiece model of Unigram, or its content `proto`. `split`: the pre-tokenizer. `names`: of special
    tokens. `before`, `steps`: normalizers before and after the model's own. `first`, `more`: special tokens before and
    after the pieces, without the `skipped` first ones. The others as in `hub_tokenizer`. Raises CheckpointError."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto.FromString(pieces_model(path, proto).serialized_model_proto())
    if model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
        raise CheckpointError(f"{path}: expected a model of Unigram")
    kinds = {model.SentencePiece.CONTROL: True, model.SentencePiece.USER_DEFINED: False}
    pieces = [(piece.piece, piece.score, kinds.get(piece.type)) for piece in model.pieces[skipped:]]
    pieces = [*((name, 0.0, True) for name in first), *pieces, *((name, 0.0, True) for name in more)]
    unknown = names["unk"]
    unk_id = first.index(unknown) if unknown in first else model.trainer_spec.unk_id - skipped + len(first)
    charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    own = [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []
    pipeline = {
        "version": "1.0", "pre_tokenizer": split, "post_processor": None, "decoder": METASPACE,
        "added_tokens": [FLAGS | {"id": i, "content": name, "special": special, "normalized": False}
                         for i, (name, _, special) in enumerate(pieces) if special is not None],
        "normalizer": {"type": "Sequence", "normalizers": [*before, *own, *steps]},
        "model": {"type": "Unigram", "unk_id": unk_id, "byte_fallback": False,
                  "vocab": [[name, score] for name, score, _ in pieces]},
    }  # fmt: skip
    return folder_tokenizer(path, pipeline, names, config, size, context, lowercase)
