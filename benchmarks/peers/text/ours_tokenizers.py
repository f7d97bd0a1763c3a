"""Our tokenizers with the same vocabularies."""

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.text.tokenizers import text_of
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tiktokens import GPT2Tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer


def made(folder: Path, name: str) -> Tokenizer:
    if name == "gpt2":
        return GPT2Tokenizer()
    config = json.loads((folder / name / "config.json").read_text())
    if name == "bpe":
        return hub_tokenizer(folder / name, config)
    return WordPieceTokenizer.from_bert(folder / name, config["vocab_size"], "[CLS]", "[SEP]", 512)


def tokenizer(folder: Path, device: str, name: str, seen: bool = False) -> Callable[[], list[int]]:
    """`seen`: keep the tokenizer's cache between runs; otherwise each run uses a new tokenizer."""
    ours, text = made(folder, name), text_of(folder)
    kept = getattr(ours, "_chunks", {})

    def run() -> list[int]:
        if not seen:
            kept.clear()
        return ours.encode(text)

    return run
