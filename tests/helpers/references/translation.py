"""Folders of tiny translators in the layout of Hugging Face, with SentencePiece models trained here."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

ENGLISH = ["the cat sat on the mat", "a photo of a dog", "two dogs and 3 cats, at sea!", "the sea is near"] * 8
GERMAN = ["die Katze saß auf der Matte", "ein Foto von einem Hund", "zwei Hunde und 3 Katzen, am Meer!"] * 8
TEXTS = ["the cat sat", "a dog at sea, and 3 cats!", "Two  Dogs ", "naïve café", "die Katze saß", "sea"]
TYPED = ["</s>", "<pad>", "the <extra_id_0> cat", "__de__ sea", ">>deu<< dog", "<s> <unk> </s>", "deu_Latn cat"]


@cache
def pieces(texts: tuple[str, ...], size: int, ids: tuple[tuple[str, int], ...], kind: str = "unigram",
           symbols: tuple[str, ...] = ()) -> bytes:  # fmt: skip
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=size, hard_vocab_limit=False, minloglevel=2,
        model_type=kind, user_defined_symbols=list(symbols), **dict(ids),
    )  # fmt: skip
    return model.getvalue()


def names_of(model: bytes) -> list[str]:
    import sentencepiece

    read = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [read.id_to_piece(i) for i in range(read.vocab_size())]


T5_IDS = (("pad_id", 0), ("eos_id", 1), ("unk_id", 2), ("bos_id", -1))
FAIRSEQ_IDS = (("unk_id", 0), ("bos_id", 1), ("eos_id", 2), ("pad_id", -1))
MARIAN_IDS = (("eos_id", 0), ("unk_id", 1), ("bos_id", -1), ("pad_id", -1))


def t5(folder: Path, symbols: tuple[str, ...] = (), extra: int = 20) -> int:
    """Return the number of pieces."""
    model = pieces(tuple(ENGLISH), 60, T5_IDS, symbols=symbols)
    (folder / "spiece.model").write_bytes(model)
    _record(folder, tokenizer_class="T5Tokenizer", extra_ids=extra)
    return len(names_of(model))


def m2m100(folder: Path) -> int:
    """Return the vocabulary size, including 100 languages and 8 unused ids."""
    model = pieces(tuple(ENGLISH + GERMAN), 150, FAIRSEQ_IDS, "bpe")
    vocab = ["<s>", "<pad>", "</s>", "<unk>", *names_of(model)[3:]]
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(vocab)}))
    _record(folder, tokenizer_class="M2M100Tokenizer")
    return len(vocab) + 108


def mbart50(folder: Path) -> int:
    """Write mBART-50's tokenizer; return the vocabulary size."""
    import sentencepiece
    from transformers import MBart50Tokenizer

    read = sentencepiece.SentencePieceProcessor(model_proto=pieces(tuple(ENGLISH + GERMAN), 120, FAIRSEQ_IDS))
    made = MBart50Tokenizer(vocab=[(read.id_to_piece(i), read.get_score(i)) for i in range(read.vocab_size())],
                            src_lang="de_DE", tgt_lang="fr_XX")  # fmt: skip
    made.save_pretrained(folder)
    return len(made)


def marian(folder: Path, languages: tuple[str, ...] = (), **record: Any) -> int:
    """Return the vocabulary size; the last id is the padding token."""
    models = [pieces(tuple(texts), 60, MARIAN_IDS) for texts in (ENGLISH, GERMAN)]
    found = dict.fromkeys(name for model in models for name in names_of(model)[2:])
    vocab = ["</s>", "<unk>", *languages, *found, "<pad>"]
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(vocab)}))
    _record(folder, tokenizer_class="MarianTokenizer", **record)
    return len(vocab)


def _record(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
