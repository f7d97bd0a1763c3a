"""Tokenizers from the vocabulary in a GGUF file's metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.tokens.text.hub.files import QWEN2_SPLIT
from multimodal.tokens.text.hub.pipeline import HubTokenizer, naming_pipeline
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = GPT4O_SPLIT.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DIGITS = (r"\p{N}", GPT2_SPLIT)
# how words are split, by `tokenizer.ggml.pre` (llama.cpp, `llm_tokenizer_bpe`)
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_SPLIT,), "olmo": (GPT2_SPLIT,), "qwen2": (QWEN2_SPLIT,), "stablelm2": (QWEN2_SPLIT,),
    "llama-bpe": (LLAMA3_SPLIT,), "llama3": (LLAMA3_SPLIT,), "dbrx": (LLAMA3_SPLIT,), "gpt-4o": (GPT4O_SPLIT,),
    "smollm": DIGITS, "starcoder": DIGITS, "refact": DIGITS, "llama-v3": (LLAMA3_SPLIT,), "falcon3": (LLAMA3_SPLIT,),
    "smaug-bpe": (LLAMA3_SPLIT,), "deepseek-r1-qwen": (QWEN2_SPLIT,), "tekken": (TEKKEN_SPLIT,),
}  # fmt: skip
WHOLE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # a word that is a token needs no merges
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
# control tokens that end a text whether the metadata name them or not (llama.cpp, `special_eog_ids`)
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
        "<|end_of_text|>", "<end_of_utterance>")  # fmt: skip


def gguf_tokenizer(path: Path, fields: dict[str, Any], size: int, context: int) -> Tokenizer:
    """`fields`: the metadata. `size`: rows of the embedding. Raises CheckpointError for another kind of vocabulary."""
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    tokens, kinds = own.get("tokens"), own.get("token_type")
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(tokens) != len(kinds):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens and token_type: expected two lists of one length")
    kinds = [CONTROL if token in ENDS else kind for token, kind in zip(tokens, kinds, strict=True)]
    if (kind := own.get("model")) == "llama":
        return _pieces(path, own, tokens, kinds, size, context)
    if kind != "gpt2":
        raise CheckpointError(f"{path}: tokenizer.ggml.model {kind!r:.40} is not supported (one of llama, gpt2)")
    if (split := own.get("pre", "default")) not in SPLITS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre {split!r:.40} is not supported (one of {', '.join(SPLITS)})")
    with naming_pipeline(path):
        return _bytes(own, split, tokens, kinds, size, context)


def end_ids(own: dict[str, Any], control: Mapping[str, int]) -> list[int]:
    """Ids of control tokens that end a text, by the metadata without `tokenizer.ggml.` and by their names."""
    told = [own.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    every = [*told, *(control[name] for name in ENDS if name in control)]
    return list(dict.fromkeys(i for i in every if i in control.values()))


def _bytes(
    own: dict[str, Any], split: str, tokens: list[str], kinds: list[int], size: int, context: int
) -> HubTokenizer:
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
             for regex in SPLITS[split]]  # fmt: skip
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": tokens[i], "special": kind == CONTROL, **flags}
             for i, kind in enumerate(kinds) if kind in (CONTROL, USER)]  # fmt: skip
    known = (NORMAL, CONTROL, USER)  # added tokens too, which may have any id
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in known}
    pipeline = {
        "version": "1.0", "normalizer": {"type": "NFC"} if split == "qwen2" else None, "decoder": bytes_,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, bytes_]}, "added_tokens": added,
        "post_processor": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": [pair.split(" ", 1) for pair in own.get("merges") or []],
                  "ignore_merges": split in WHOLE},
    }  # fmt: skip
    eos, pad = own.get("eos_token_id"), own.get("padding_token_id")
    control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == CONTROL or i == eos}
    ends = [i for i in end_ids(own, control) if i != eos]
    bos = own.get("bos_token_id") if own.get("add_bos_token", split in WHOLE) else None
    return HubTokenizer(pipeline, control, size, pad_id=next((i for i in (pad, eos) if i is not None), 0), bos_id=bos,
                        eos_id=eos, context=context, end_ids=ends, puts_end=bool(own.get("add_eos_token")))  # fmt: skip


def _pieces(
    path: Path, own: dict[str, Any], tokens: list[str], kinds: list[int], size: int, context: int
) -> SentencePieceTokenizer:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    scores, eos, bos = own.get("scores"), own.get("eos_token_id"), own.get("bos_token_id")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores: expected one for each of {len(tokens)} tokens")
    model = ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    trainer, normal = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = trainer.BPE, len(tokens), BYTE in kinds
    trainer.unk_piece = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), "<unk>")
    for name, i in (("bos_piece", bos), ("eos_piece", eos)):
        if i is not None:
            setattr(trainer, name, tokens[i])
    normal.name, normal.remove_extra_whitespaces, normal.escape_whitespaces = "identity", False, True
    normal.add_dummy_prefix = bool(own.get("add_space_prefix", True))
    # as llama.cpp, which puts the space behind these too
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER and normal.add_dummy_prefix]
    pad = next((i for i in (own.get("padding_token_id"), eos) if i is not None), 0)
    return SentencePieceTokenizer(path, pad_id=pad, add_bos=bool(own.get("add_bos_token", True)), context=context,
                                  vocab_size=size, proto=model.SerializeToString(), added=added,
                                  puts_end=bool(own.get("add_eos_token")))  # fmt: skip
