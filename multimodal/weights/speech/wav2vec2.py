"""wav2vec 2.0, HuBERT and WavLM with a CTC head, in Hugging Face's names.

Traps: the blank is the padding token, often the first output; whether samples are normalized stands in
`preprocessor_config.json` alone; WavLM's table of distances is in its first layer, for all layers."""

import warnings
from pathlib import Path
from typing import Any

import torch

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import CheckpointError
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig
from multimodal.models.speech.wave_encoder import WaveEncoderConfig
from multimodal.system.files import optional_json
from multimodal.tokens.text.hub.added import added_tokens, class_name
from multimodal.tokens.text.hub.recognizers import LetterTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Op, Tensors, joined, linears, under, weight_and_bias

ONLY = {
    "feat_extract_activation": "gelu", "conv_pos_batch_norm": False, "add_adapter": False, "adapter_attn_dim": None,
    "hidden_act": "gelu",
}  # fmt: skip
PREPROCESSOR = "preprocessor_config.json"
VOCABULARY, TOKENIZER = "vocab.json", "tokenizer_config.json"
CLASSES = "Wav2Vec2CTCTokenizer", "Wav2Vec2Tokenizer", None  # the second is the first's name of 2021
DELIMITER = "word_delimiter_token"
TRAINING = "fills masked frames in training alone"
GATE = Op(lambda t: [t[0, :, :, 0]], lambda ours: ours[0][None, ..., None])


def _config(config: dict[str, Any], tensors: Tensors) -> ConformerCTCConfig:
    for key, only in ONLY.items():
        if config.get(key, only) != only:
            raise CheckpointError(f"{config.get('model_type')} config: {key} must be {only!r} (got {config[key]!r})")
    norm, blank, size = config["feat_extract_norm"], config["pad_token_id"], config["vocab_size"]
    if norm not in ("group", "layer"):
        raise CheckpointError(f"feat_extract_norm must be group or layer (got {norm!r})")
    if type(blank) is not int or not 0 <= blank < size:
        raise CheckpointError(f"pad_token_id must be a whole number below vocab_size {size} (got {blank!r})")
    wavlm = "num_buckets" in config
    attention = AttentionConfig(config["hidden_size"], config["num_attention_heads"], gate=wavlm)
    stable = config["do_stable_layer_norm"]
    samples = _features(config.get(PREPROCESSOR, {}))
    block = BlockConfig(attention, config["intermediate_size"], norm_eps=config["layer_norm_eps"], post_norm=not stable)
    encoder = WaveEncoderConfig(
        tuple(config["conv_dim"]), tuple(config["conv_kernel"]), tuple(config["conv_stride"]), norm,
        config["conv_bias"], StackConfig(block, config["num_hidden_layers"], final_norm=stable),
        config["num_conv_pos_embeddings"], config["num_conv_pos_embedding_groups"], samples,
        config.get("feat_proj_layer_norm", True), config.get("num_buckets", 0), config.get("max_bucket_distance", 0),
    )  # fmt: skip
    return ConformerCTCConfig(encoder, size - 1, None, blank)


def _features(stated: dict[str, Any]) -> str:
    if "do_normalize" not in stated:
        raise CheckpointError(f"needs {PREPROCESSOR}, which says whether samples are normalized")
    if stated.get("sampling_rate", 16000) != 16000:
        raise CheckpointError(f"{PREPROCESSOR}: sampling_rate must be 16000 (got {stated['sampling_rate']!r})")
    return "normalized_wave" if stated["do_normalize"] else "wave"


def _block(gated: bool) -> list[NameRow]:
    names = {f"attention.{part}_proj": f"attention.{own}"
             for part, own in {"q": "query", "k": "key", "v": "value", "out": "out"}.items()}  # fmt: skip
    names |= {
        "layer_norm": "attention_branch.norm", "final_layer_norm": "feed_branch.norm",
        "feed_forward.intermediate_dense": "feed.up", "feed_forward.output_dense": "feed.down",
    }  # fmt: skip
    gate = [
        NameRow("attention.gru_rel_pos_const", "attention.gate.scale", GATE),
        *weight_and_bias("attention.gru_rel_pos_linear", "attention.gate.project"),
    ]
    return [*linears(names), *(gate if gated else [])]


def _encoder_rows(config: WaveEncoderConfig) -> list[NameRow]:
    stem = "feature_extractor.conv_layers"
    norms = range(len(config.channels)) if config.conv_norm == "layer" else range(1)
    names = {f"{stem}.{i}.layer_norm": f"stem.{i}.norm" for i in norms}
    names |= {"feature_projection.projection": "project"}
    names |= {"feature_projection.layer_norm": "project_norm"} if config.project_norm else {}
    names["encoder.layer_norm"] = "norm" if config.stack.block.post_norm else "stack.norm"
    parts = ("weight", "bias") if config.conv_bias else ("weight",)
    position = "encoder.pos_conv_embed.conv"
    lengths = [
        # PyTorch's two names of a weight's length and direction
        NameRow(f"{position}.parametrizations.weight.original{i}", f"positions.{own}", optional=True)
        for i, own in enumerate(("length", "direction"))
    ]
    older = [NameRow(f"{position}.weight_{part}", f"positions.{own}", optional=True)
             for part, own in (("g", "length"), ("v", "direction"))]  # fmt: skip
    table = NameRow("encoder.layers.0.attention.rel_attn_embed.weight", "bias.table.weight")
    return [
        *linears(names),
        *(NameRow(f"{stem}.{{}}.conv.{part}", f"stem.{{}}.conv.{part}") for part in parts),
        *lengths, *older, NameRow(f"{position}.bias", "positions.bias"),
        *under("encoder.layers.{}.", "stack.blocks.{}.", _block(config.stack.block.attention.gate)),
        *([table] if config.buckets else []),
    ]  # fmt: skip


def _blank_last(row: int) -> Op:
    """The blank's row moves to the end."""
    return Op(
        lambda t: [torch.cat([t[:row], t[row + 1 :], t[row : row + 1]])],
        lambda ours: joined([ours[0][:row], ours[0][-1:], ours[0][row:-1]]),
    )


def _tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """Letters of `vocab.json` and tokens added to them that the model has, without the blank; None without that
    file."""
    vocab, size = optional_json(folder / VOCABULARY) if folder else {}, config["vocab_size"]
    if not vocab:
        return None
    if nested := [name for name, one in vocab.items() if isinstance(one, dict)]:
        names = ", ".join(nested[:3])
        raise CheckpointError(f"{folder / VOCABULARY}: expected one vocabulary, got one for each of {names} (MMS)")
    vocab = {token["content"]: token["id"] for token in added_tokens(folder) if token["id"] < size} | vocab
    tokens = sorted(vocab, key=vocab.__getitem__)
    if [vocab[token] for token in tokens] != list(range(size)):
        raise CheckpointError(f"{folder / VOCABULARY}: ids, with added tokens, must be 0 to {size - 1}, each once")
    stated, blank = optional_json(folder / TOKENIZER), tokens[config["pad_token_id"]]
    if (kind := class_name(stated, config)) not in CLASSES:
        raise CheckpointError(f"{folder / TOKENIZER}: {kind} is not supported, expected {CLASSES[0]}")
    for name, only in {"do_lower_case": False, "replace_word_delimiter_char": " "}.items():
        if stated.get(name, only) != only:
            raise CheckpointError(f"{folder / TOKENIZER}: {name} must be {only!r} (got {stated[name]!r})")
    named = {name: stated.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad", "word_delimiter")}
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    if vocab.get(pad := named["pad"] or "<pad>", vocab[blank]) != vocab[blank]:
        told = f"pad_token {pad!r} must be the blank, {blank!r} by config.json's pad_token_id {vocab[blank]}"
        raise CheckpointError(f"{folder / TOKENIZER}: {told}")
    space, unknown = named["word_delimiter"] if DELIMITER in stated else "|", named["unk"] or "<unk>"
    if space not in vocab:
        raise CheckpointError(f"{folder / TOKENIZER}: {DELIMITER} must be in {VOCABULARY} (got {space!r})")
    control = [token for token in (named["bos"] or "<s>", named["eos"] or "</s>") if token in vocab and token != blank]
    tokens.remove(blank)
    clean = bool(stated.get("clean_up_tokenization_spaces"))
    return LetterTokenizer(tokens, space, control, unknown if unknown in tokens else None, clean)


def _without_lm(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Nothing but a warning of the language model of pyctcdecode in the folder (Wav2Vec2ProcessorWithLM)."""
    if folder is not None and (lm := folder / "language_model").is_dir():
        arpa = next(iter(sorted(lm.glob("*.arpa*"))), None)
        use = f"used only with lm={str(arpa)!r}" if arpa else "not used: it has no ARPA file"
        warnings.warn(f"{folder}: its language model is {use}", stacklevel=2)
    return {}


def _family(name: str) -> Family:
    def rows(config: ConformerCTCConfig) -> list[NameRow]:
        return [
            *under(f"{name}.", "encoder.", _encoder_rows(config.encoder)),
            NameRow(f"{name}.masked_spec_embed", reason=TRAINING, optional=True),
            *weight_and_bias("lm_head", "ctc", _blank_last(config.blank_row)),
        ]

    return Family(
        name, ConformerCTC, (f"{name}.feature_projection.projection.weight", "lm_head.weight"), _config, rows,
        _tokenizer, card=_without_lm, needs="config.json", beside=PREPROCESSOR, types=("", name),
    )  # fmt: skip


WAV2VEC2, HUBERT, WAVLM = (_family(name) for name in ("wav2vec2", "hubert", "wavlm"))
