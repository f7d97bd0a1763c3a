"""Tiny vocabularies in the files of the `tokenizers` library, one for each kind of pipeline, as references."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The cat sat on the mat, and it's 1999 days ago; they're not there.", "a photo of a dog  with\n\ttabs and blanks",
    "Wörter über Öl, naïve façades", "日本語の文章 и русский текст", "“quotes” — dashes… 😀 <b>tags</b>",
] * 20  # fmt: skip
LETTERS = pre_tokenizers.ByteLevel.alphabet()
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _learn(made: Tokenizer, trainer: Any, **options: Any) -> Tokenizer:
    made.train_from_iterator(CORPUS, trainer(show_progress=False, **options))
    return made


def _around(made: Tokenizer, before: str | None = None, after: str | None = None) -> Tokenizer:
    single = " ".join(part for part in (before, "$A", after) if part)
    ids = [(name, made.token_to_id(name)) for name in (before, after) if name]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return made


def _byte_level() -> Tokenizer:
    """RoBERTa's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    _learn(made, trainers.BpeTrainer, vocab_size=420, special_tokens=ROBERTA, initial_alphabet=LETTERS)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


def _llama3() -> Tokenizer:
    """Control tokens beyond the vocabulary, an ordinary added token, and whole-word matches before merges."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    _learn(made, trainers.BpeTrainer, vocab_size=420, initial_alphabet=LETTERS)
    made.add_special_tokens(["<|begin|>", "<|end|>", "<|eot|>"])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    made.add_special_tokens(["<|last|>"])
    _around(made, "<|begin|>")
    made.post_processor = processors.Sequence([processors.ByteLevel(), made.post_processor])
    return made


def _llama2() -> Tokenizer:
    """Byte fallback without pre-tokenization: merges run over the whole text."""
    replaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner = Tokenizer(models.BPE())
    learner.normalizer = replaced
    _learn(learner, trainers.BpeTrainer, vocab_size=300, max_token_length=6)
    learnt = json.loads(learner.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learnt["vocab"]]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(pair) for pair in learnt["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = replaced
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _around(made, "<s>")


def _unigram() -> Tokenizer:
    """Unigram as in T5: pieces with scores, control tokens in and beyond the vocabulary."""
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    _learn(made, trainers.UnigramTrainer, vocab_size=220, special_tokens=special, unk_token="<unk>")
    made.add_special_tokens([*special, "<extra_id_0>", "<extra_id_1>"])
    return _around(made, after="</s>")


def _wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    _learn(made, trainers.WordPieceTrainer, vocab_size=300, special_tokens=BERT)
    return _around(made, "[CLS]", "[SEP]")


def _chatml() -> Tokenizer:
    """Qwen's: NFC, words by a pattern, and control tokens of turns."""
    made = _llama3()
    words = pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.normalizer, made.post_processor = normalizers.NFC(), processors.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return made


def _gemma() -> Tokenizer:
    """Byte fallback, blanks as ▁ that end a word, runs of line ends as ordinary tokens, and turns."""
    made = _llama2()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("<table>", normalized=False)])
    made.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    return made


def _neox() -> Tokenizer:
    """Runs of blanks as added tokens that are looked for after normalization."""
    made = Tokenizer(models.BPE())
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|padding|>"]
    _learn(made, trainers.BpeTrainer, vocab_size=400, special_tokens=special, initial_alphabet=LETTERS)
    made.add_tokens([AddedToken(" " * count, normalized=True) for count in (4, 3, 2)])
    return made


def _falcon() -> Tokenizer:
    """Punctuation apart, then bytes, then digits by threes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    special = [">>TITLE<<", "<|endoftext|>"]
    return _learn(made, trainers.BpeTrainer, vocab_size=400, special_tokens=special, initial_alphabet=LETTERS)


def _phi3() -> Tokenizer:
    """Llama's, with control tokens that take the blanks after them."""
    made = _llama2()
    made.add_special_tokens([AddedToken(name, rstrip=True, special=True) for name in ("<|user|>", "<|end|>")])
    return made


# of each pipeline: what tokenizer_config.json and config.json say, and the begin, end, pad and mask that come of it
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PIPELINES = {
    "byte-level": (
        _byte_level, {**NAMED, "pad_token": "<pad>", "mask_token": "<mask>"}, {}, ("<s>", "</s>", "<pad>", "<mask>")
    ),
    "llama3": (
        _llama3, {"bos_token": "<|begin|>", "eos_token": {"content": "<|eot|>"}}, {},
        ("<|begin|>", "<|eot|>", "<|eot|>", None),
    ),
    "llama2": (_llama2, NAMED, {}, ("<s>", "</s>", "</s>", None)),
    "unigram": (_unigram, {}, {"pad_token_id": 0}, (None, "</s>", "<pad>", None)),
    "chatml": (
        _chatml, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, {},
        (None, "<|im_end|>", "<|endoftext|>", None),
    ),
    "gemma": (_gemma, NAMED, {}, ("<s>", "</s>", "</s>", None)),
    "neox": (
        _neox, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, {},
        (None, "<|endoftext|>", "<|endoftext|>", None),
    ),
    "falcon": (_falcon, {"eos_token": "<|endoftext|>"}, {}, (None, "<|endoftext|>", "<|endoftext|>", None)),
    "phi3": (_phi3, NAMED, {}, ("<s>", "</s>", "</s>", None)),
    "wordpiece": (_wordpiece, {}, {"pad_token_id": 0}, ("[CLS]", "[SEP]", "[PAD]", "[MASK]")),
}  # fmt: skip
ROOM = 9  # rows of the model's embedding beyond the tokens


@cache
def pipeline(name: str) -> Tokenizer:
    return PIPELINES[name][0]()


def hub_folder(root: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """The folder, and its config.json."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    pipeline(name).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(PIPELINES[name][1]))
    return folder, {"vocab_size": pipeline(name).get_vocab_size() + ROOM, **PIPELINES[name][2]}


def merges_folder(root: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """`vocab.json` and `merges.txt`, as GPT-2's and RoBERTa's folders have them."""
    folder = root / kind
    folder.mkdir(exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>"] if kind in ("gpt2", "qwen2") else ROBERTA
    _learn(made, trainers.BpeTrainer, vocab_size=400, special_tokens=special, initial_alphabet=LETTERS)
    made.model.save(str(folder))
    return folder, {"vocab_size": 400, "model_type": kind}


def llama_pieces(folder: Path) -> Path:
    """A SentencePiece model as Llama's: byte-pair encoding with bytes, bos 1, eos 2, no pad."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path
