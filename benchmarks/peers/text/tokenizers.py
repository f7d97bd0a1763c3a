"""tiktoken and tokenizers, with GPT-2's vocabulary and two that are trained on the text itself."""

import base64
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.plain_files import TEXTS
from benchmarks.suite.process import ROOT

SIZE = 8000


def english(length: int) -> str:
    """Shakespeare if that file is there, else random words."""
    path = TEXTS / "tinyshakespeare" / "input.txt"
    if path.is_file():
        return path.read_text()[:length]
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(5000)]
    return " ".join(draw.choices(words, k=length // 5))[:length]


def prepare(folder: Path, device: str, length: int) -> None:
    """`text.txt`, and the folders `bpe` and `wordpiece` in the layout of Hugging Face."""
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

    text = english(length)
    (folder / "text.txt").write_text(text)
    ends = {"eos_token_id": 0, "bos_token_id": 0}
    for name, learner, special in (
        ("bpe", ByteLevelBPETokenizer(), ["<|endoftext|>"]),
        ("wordpiece", BertWordPieceTokenizer(), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
    ):
        learner.train_from_iterator(text.splitlines(), SIZE, special_tokens=special, show_progress=False)
        (folder / name).mkdir()
        learner.save(str(folder / name / "tokenizer.json"))
        config = {"vocab_size": learner.get_vocab_size(), "model_type": "gpt2" if name == "bpe" else "bert", **ends}
        (folder / name / "config.json").write_text(json.dumps(config))


def text_of(folder: Path) -> str:
    return (folder / "text.txt").read_text()


def tiktoken(folder: Path, device: str, name: str) -> Callable[[], list[int]]:
    """With tiktoken's own pattern for GPT-2."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    lines = gzip.decompress((ROOT / "assets" / "vocabularies" / f"{name}.tiktoken.gz").read_bytes()).splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    encoding = tiktoken.Encoding(name, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    text = text_of(folder)
    return lambda: encoding.encode_ordinary(text)


def encode(folder: Path, device: str, name: str, batch: bool = False) -> Callable[[], list[int]]:
    """`batch`: its fastest call, without offsets."""
    from tokenizers import Tokenizer

    library, text = Tokenizer.from_file(str(folder / name / "tokenizer.json")), text_of(folder)
    if batch:
        return lambda: library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return lambda: library.encode(text, add_special_tokens=False).ids
