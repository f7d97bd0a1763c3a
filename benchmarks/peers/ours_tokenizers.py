"""Our tokenizers, of the same vocabularies."""

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.text_tokenizers import text_of
from multimodal.tokens.text.vocabulary import GPT2Tokenizer, Tokenizer, WordPieceTokenizer, hub_tokenizer


def made(folder: Path, name: str) -> Tokenizer:
    if name == "gpt2":
        return GPT2Tokenizer()
    config = json.loads((folder / name / "config.json").read_text())
    if name == "bpe":
        return hub_tokenizer(folder / name, config)
    return WordPieceTokenizer.from_bert(folder / name, config["vocab_size"], "[CLS]", "[SEP]", 512)


def tokenizer(folder: Path, device: str, name: str, seen: bool = False) -> Callable[[], list[int]]:
    """`seen`: with the chunks that it has kept from the run before; otherwise each run is the tokenizer's first."""
    ours, text = made(folder, name), text_of(folder)
    kept = getattr(ours, "_chunks", {})

    def run() -> list[int]:
        if not seen:
            kept.clear()
        return ours.encode(text)

    return run
