"""CLIP's tokenization of captions by the `tokenizers` library and open_clip. Each run returns a function that lists
the ids; listing is not timed."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

START, END = "<|startoftext|>", "<|endoftext|>"
PATTERN = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
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
    _write(folder / "tokenizer.json")


def _write(path: Path) -> None:
    """CLIP's tokenizer in the `tokenizers` library, built as transformers' CLIPTokenizer builds it."""
    from open_clip.tokenizer import SimpleTokenizer
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    known = SimpleTokenizer()
    ids = {{"<start_of_text>": START, "<end_of_text>": END}.get(token, token): i for token, i in known.encoder.items()}
    merges = sorted(known.bpe_ranks, key=known.bpe_ranks.get)
    made = Tokenizer(models.BPE(vocab=ids, merges=merges, continuing_subword_prefix="", end_of_word_suffix="</w>",
                                fuse_unk=False, unk_token=END))  # fmt: skip
    blanks = normalizers.Replace(Regex(r"\s+"), " ")
    made.normalizer = normalizers.Sequence([normalizers.NFC(), blanks, normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.post_processor = processors.RobertaProcessing((END, ids[END]), (START, ids[START]), False, False)
    made.save(str(path))


def captions(folder: Path) -> list[str]:
    return json.loads((folder / "captions.json").read_text())


def tokenizers(folder: Path, device: str) -> Run:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # with RAYON_NUM_THREADS threads
    from tokenizers import Tokenizer

    made, given = Tokenizer.from_file(str(folder / "tokenizer.json")), captions(folder)

    def run() -> Callable[[], Ids]:
        found = made.encode_batch_fast(given)
        return lambda: [one.ids for one in found]

    return run


def open_clip(folder: Path, device: str) -> Run:
    from open_clip.tokenizer import SimpleTokenizer

    made, given = SimpleTokenizer(), captions(folder)

    def run() -> Callable[[], Ids]:
        found = made(given)
        return lambda: [row[: row.argmax() + 1].tolist() for row in found]  # the highest id is the end's

    return run
