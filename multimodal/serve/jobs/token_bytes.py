"""Tokens as OpenAI writes them: each with its own bytes, also those that hold a part of a character."""

import json
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multimodal.tasks.text.detokenize import HALF
from multimodal.tokens.text.bytepair import byte_letters
from multimodal.tokens.text.hub.pipeline import vocabulary
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer


def spellings(tokenizer: Tokenizer, ids: Sequence[int], texts: Sequence[str]) -> list[bytes]:
    """The bytes of each token; `texts`: what it adds, see `token_texts`."""
    if all(text and HALF not in text for text in texts):
        return [text.encode() for text in texts]
    parts, made, within = _parts(tokenizer), list[bytes](), False
    for token, text in zip(ids, texts, strict=True):
        own = text.rpartition(HALF)[2] if within else text  # after a character that was left incomplete
        within = token in parts
        made.append(parts.get(token, own.encode()))
    return made


def token_score(spelled: bytes, logprob: float | None) -> dict[str, Any]:
    """A token as OpenAI writes it; bytes of no whole character are escaped in its text."""
    return {"token": spelled.decode(errors="backslashreplace"), "logprob": logprob, "bytes": list(spelled)}


def _parts(tokenizer: Tokenizer) -> Mapping[int, bytes]:
    """Bytes of the tokens that are not whole characters, kept as long as the tokenizer."""
    if tokenizer not in _KEPT:
        _KEPT[tokenizer] = _found(tokenizer)
    return _KEPT[tokenizer]


def _found(tokenizer: Tokenizer) -> Mapping[int, bytes]:
    spelled = {i: made for name, i, letters in _names(tokenizer) if (made := _bytes(name, letters)) is not None}
    return {i: made for i, made in spelled.items() if HALF in made.decode(errors="replace")}


def _names(tokenizer: Tokenizer) -> Iterable[tuple[str, int, bool]]:
    """Tokens that stand for bytes, their ids, and whether they are written in GPT-2's letters."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        pieces = ModelProto.FromString(tokenizer.proto()).pieces
        return [(one.piece, i, False) for i, one in enumerate(pieces) if one.type == one.BYTE]
    pipeline = tokenizer.pipeline() or {"model": {"vocab": {}}}
    decoder = json.dumps(pipeline.get("decoder"))
    letters = "ByteLevel" in decoder
    known = vocabulary({"model": pipeline["model"]}) if letters or "ByteFallback" in decoder else ()
    return [(name, i, letters) for name, i in known]


def _bytes(name: str, letters: bool) -> bytes | None:
    if letters:
        return bytes(_LETTERS[c] for c in name) if _LETTERS.keys() >= set(name) else None
    return bytes.fromhex(name[3:5]) if re.fullmatch("<0x[0-9A-F]{2}>", name) else None


_KEPT: weakref.WeakKeyDictionary[Tokenizer, Mapping[int, bytes]] = weakref.WeakKeyDictionary()
_LETTERS = {letter: byte for byte, letter in byte_letters().items()}
