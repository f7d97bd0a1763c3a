"""Whisper in CTranslate2's names, as faster-whisper has (ctranslate2/specs/whisper_spec.py).

Traps: queries, keys and values are one map, with zeros as the keys' bias; numbers of heads are scalars in the file."""

from pathlib import Path
from typing import Any

from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.models.whisper import Whisper, WhisperConfig
from multimodal.weights.family import Family
from multimodal.weights.speech.whisper import PREPROCESSOR, check_features, never_first, whisper_config
from multimodal.weights.speech.whisper_vocabulary import released_tokenizer
from multimodal.weights.table import HALVES, THIRDS, NameRow, Op, Tensors, joined, qkv, repeat, under

ONLY = {
    "spec": "WhisperSpec", "decoder/pre_norm": 1, "decoder/activation": 3, "decoder/scale_embeddings": 0,
    "decoder/alibi": 0, "decoder/start_from_zero_embedding": 0,
}  # fmt: skip
EMBEDDING, HEAD = "decoder/embeddings/weight", "decoder/projection/weight"
HEADS = ("encoder/num_heads", "decoder/num_heads")


def _without_key(bias: Tensor, parts: int, key: int) -> list[Tensor]:
    chunks = list(bias.chunk(parts))
    if chunks.pop(key).any():
        raise CheckpointError("whisper: the keys' part of a bias is not zero")
    return chunks


def _zeros(bias: Tensor) -> Tensor:
    return bias.new_zeros(bias.shape)  # torch.zeros_like imports sympy for meta tensors


QUERY_VALUE = Op(lambda t: _without_key(t, 3, 1), lambda ours: joined([ours[0], _zeros(ours[0]), ours[1]]))
VALUE = Op(lambda t: _without_key(t, 2, 0), lambda ours: joined([_zeros(ours[0]), ours[0]]))


def _layers(tensors: Tensors, part: str) -> int:
    return len({name.split("/")[1] for name in tensors if name.startswith(f"{part}/layer_") and name.count("/") > 2})


def _config(config: dict[str, Any], tensors: Tensors) -> WhisperConfig:
    for key, only in ONLY.items():
        if config.get(key, only) != only:
            raise CheckpointError(f"whisper: {key} must be {only!r} (got {config[key]!r})")
    sizes = []
    for part, heads in zip(("encoder", "decoder"), HEADS, strict=True):
        hidden, width = tensors[f"{part}/layer_0/ffn/linear_0/weight"].shape
        if config[heads] < 1 or width % config[heads]:
            raise CheckpointError(f"whisper: {heads} {config[heads]} does not divide the width {width} of its weights")
        positions = len(tensors[f"{part}/position_encodings/encodings"])
        sizes.append((positions, width, _layers(tensors, part), config[heads], hidden))
    bands = tensors["encoder/conv1/weight"].shape[1]
    check_features(config, bands)
    head = tensors.get(HEAD)
    tied = head is None or head.equal(tensors[EMBEDDING])
    return whisper_config(len(tensors[EMBEDDING]), bands, *sizes, tied=tied)


def _norm(foreign: str, ours: str) -> list[NameRow]:
    return [NameRow(f"{foreign}/gamma", f"{ours}.weight"), NameRow(f"{foreign}/beta", f"{ours}.bias")]


def _map(foreign: str, ours: str) -> list[NameRow]:
    return [NameRow(f"{foreign}/{part}", f"{ours}.{part}") for part in ("weight", "bias")]


def _block(cross: bool) -> list[NameRow]:
    rows = [
        *_norm("self_attention/layer_norm", "attention_branch.norm"),
        NameRow("self_attention/linear_0/weight", tuple(f"{name}.weight" for name in qkv("attention")), THIRDS),
        NameRow("self_attention/linear_0/bias", ("attention.query.bias", "attention.value.bias"), QUERY_VALUE),
        *_map("self_attention/linear_1", "attention.out"),
        *_norm("ffn/layer_norm", "feed_branch.norm"),
        *_map("ffn/linear_0", "feed.up"),
        *_map("ffn/linear_1", "feed.down"),
    ]
    crossed = [
        *_norm("attention/layer_norm", "cross_branch.norm"),
        *_map("attention/linear_0", "cross.query"),
        NameRow("attention/linear_1/weight", ("cross.key.weight", "cross.value.weight"), HALVES),
        NameRow("attention/linear_1/bias", "cross.value.bias", VALUE),
        *_map("attention/linear_2", "cross.out"),
    ]
    return rows + (crossed if cross else [])


def _rows(config: WhisperConfig) -> list[NameRow]:
    tied = repeat(HEAD, EMBEDDING) if config.decoder.tied else NameRow(HEAD, "decoder.head.weight")
    return [
        *_map("encoder/conv1", "encoder.stem.first"),
        *_map("encoder/conv2", "encoder.stem.second"),
        NameRow("encoder/position_encodings/encodings", "encoder.positions"),
        *under("encoder/layer_{}/", "encoder.stack.blocks.{}.", _block(cross=False)),
        *_norm("encoder/layer_norm", "encoder.stack.norm"),
        NameRow(EMBEDDING, "decoder.embed.weight"),
        NameRow("decoder/position_encodings/encodings", "decoder.positions"),
        *under("decoder/layer_{}/", "decoder.stack.blocks.{}.", _block(cross=True)),
        *_norm("decoder/layer_norm", "decoder.stack.norm"),
        tied,
    ]


def _card(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Heads for the times of words, and the tokens that no text begins with."""
    heads, tokenizer = config.get("alignment_heads"), released_tokenizer(config["vocabulary"])
    card = {} if heads is None else {"alignment_heads": heads}
    asked = tokenizer and never_first(config.get("suppress_ids_begin"), tokenizer, "config.json: suppress_ids_begin")
    return card | ({"transcribe": asked} if asked else {})


def _embedded(folder: Path | None, config: dict[str, Any]) -> Any:
    return released_tokenizer(config["vocabulary"], folder)


WHISPER_CT2 = Family(
    "whisper-ctranslate2", Whisper, (EMBEDDING, "encoder/conv1/weight"), _config, _rows, _embedded,
    complete=lambda config, tensors: config | {"vocabulary": len(tensors[EMBEDDING])}, card=_card,
    beside=PREPROCESSOR,
)  # fmt: skip
