"""CLIP's tokenization of captions by the `tokenizers` library and open_clip. Each run returns a function that lists
the ids; listing is not timed."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

Ids = list[list[int]]
Run = Callable[[], Callable[[], Ids]]


def prepare(folder: Path, device: str, count: int, data: str | None = None) -> None:
    """`captions.json`: Multi30k of `data`, else ImageNet's names in CLIP's templates; and `tokenizer.json`."""
    import open_clip

    if data:
        lines = gzip.decompress((Path(data) / "text/multi30k/train.en.gz").read_bytes()).decode().split("\n")
        found = [line for line in lines if line and "&" not in line]  # `tokenizers` would keep "&amp;"
    else:
        templates = open_clip.OPENAI_IMAGENET_TEMPLATES[:10]
        found = [template(name) for name in open_clip.IMAGENET_CLASSNAMES for template in templates]
    (folder / "captions.json").write_text(json.dumps(found[:count]))
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """`tokenizer.json` by transformers' CLIPTokenizer, with open_clip's vocabulary."""
    from open_clip.tokenizer import SimpleTokenizer
    from transformers import CLIPTokenizer

    known = SimpleTokenizer()
    tokens = [*list(known.encoder)[:-2], "<|startoftext|>", "<|endoftext|>"]
    ids = {token: i for i, token in enumerate(tokens)}
    CLIPTokenizer(vocab=ids, merges=list(known.bpe_ranks)).save_pretrained(folder)


def captions(folder: Path) -> list[str]:
    return json.loads((folder / "captions.json").read_text())


def tokenizers(folder: Path, device: str) -> Run:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # with RAYON_NUM_THREADS threads
    from tokenizers import Tokenizer

    library, texts = Tokenizer.from_file(str(folder / "tokenizer.json")), captions(folder)

    def run() -> Callable[[], Ids]:
        rows = library.encode_batch_fast(texts)
        return lambda: [row.ids for row in rows]

    return run


def open_clip(folder: Path, device: str) -> Run:
    from open_clip.tokenizer import SimpleTokenizer

    library, texts = SimpleTokenizer(), captions(folder)

    def run() -> Callable[[], Ids]:
        rows = library(texts)
        return lambda: [row[: row.argmax() + 1].tolist() for row in rows]  # the highest id is the end's

    return run
