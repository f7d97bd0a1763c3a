"""Random Whisper weights of a released size, as our checkpoint and as each peer's model: the same numbers in all."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from multimodal.models.seq2seq import SpeechToText
from multimodal.presets import preset
from multimodal.tokens.clip_text import byte_letters
from multimodal.tokens.tiktokens import WhisperTokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.whisper import WHISPER_HF, WHISPER_OPENAI


def checkpoint(size: str, seed: int = 0) -> Checkpoint:
    """Logits of deviation about 3, so that the best token leads by far more than float32's error; what is heard and
    the position matter; no control token is ever likely, so that every decoding runs to its limit."""
    torch.manual_seed(seed)
    model = SpeechToText(preset(f"whisper_{size}")).eval()
    tokenizer = WhisperTokenizer(True, 100 if model.config.decoder.vocabulary == 51866 else 99)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name == "encoder.positions":
                continue
            spread = {"decoder.positions": 1.0, "decoder.embed.weight": 0.15}.get(name, parameter[0].numel() ** -0.5)
            parameter.copy_(torch.randn_like(parameter) * spread)
        for block in model.decoder.stack.blocks:
            block.attention.query.weight *= 4
            block.cross.query.weight *= 4
        model.decoder.embed.weight[tokenizer.eot :] = 0
    model.requires_grad_(False)
    return Checkpoint(model, tokenizer, source=f"random {size}")


def openai_model(made: Checkpoint) -> torch.nn.Module:
    from whisper.model import ModelDimensions, Whisper

    config = made.model.config
    encoder, decoder = config.encoder.stack, config.decoder.stack
    sizes = [config.encoder.bands, config.encoder.context, config.encoder.width]
    sizes += [encoder.block.attention.heads, encoder.layers]
    sizes += [config.decoder.vocabulary, config.decoder.context, config.decoder.width]
    model = Whisper(ModelDimensions(*sizes, decoder.block.attention.heads, decoder.layers)).eval()
    model.load_state_dict(WHISPER_OPENAI.export(made.model))
    return model


def transformers_model(made: Checkpoint) -> torch.nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config, t = made.model.config, made.tokenizer
    encoder, decoder = config.encoder.stack, config.decoder.stack
    settings = WhisperConfig(
        vocab_size=config.decoder.vocabulary, num_mel_bins=config.encoder.bands, d_model=config.encoder.width,
        encoder_layers=encoder.layers, encoder_attention_heads=encoder.block.attention.heads,
        encoder_ffn_dim=encoder.block.hidden, decoder_layers=decoder.layers,
        decoder_attention_heads=decoder.block.attention.heads, decoder_ffn_dim=decoder.block.hidden,
        pad_token_id=t.eot, bos_token_id=t.eot, eos_token_id=t.eot, decoder_start_token_id=t.sot,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(settings).eval()
    model.load_state_dict(WHISPER_HF.export(made.model))
    return model


def save_ctranslate2(made: Checkpoint, folder: Path) -> None:
    """What CTranslate2's and faster-whisper's loaders read: float32 weights, vocabulary and tokenizer."""
    from ctranslate2.converters.transformers import WhisperLoader

    t = made.tokenizer
    spec = WhisperLoader().get_model_spec(transformers_model(made))
    names = _token_names(t)
    spec.register_vocabulary(names)
    spec.config.lang_ids = list(t.language_tokens)
    spec.config.suppress_ids, spec.config.suppress_ids_begin = [], []
    layers, heads = made.model.config.decoder.stack.layers, made.model.config.decoder.stack.block.attention.heads
    spec.config.alignment_heads = [(i, j) for i in range(layers // 2, layers) for j in range(heads)]
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir(parents=True)
    spec.save(str(folder))
    _tokenizer_json(t, names, folder / "tokenizer.json")
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": made.model.config.encoder.bands}))


def _token_names(tokenizer: WhisperTokenizer) -> list[str]:
    letters = byte_letters()
    plain = [
        "".join(letters[byte] for byte in tokenizer._encoding.decode_single_token_bytes(i))
        for i in range(tokenizer.plain_size)
    ]
    return plain + list(tokenizer.control_ids)


def _tokenizer_json(tokenizer: WhisperTokenizer, names: list[str], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = byte_letters()
    ranks = {tokenizer._encoding.decode_single_token_bytes(i): i for i in range(tokenizer.plain_size)}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            pair = _last_merge(token, rank, ranks)
            merges.append(tuple("".join(letters[byte] for byte in half) for half in pair))
    vocabulary = {name: i for i, name in enumerate(names[: tokenizer.plain_size])}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in tokenizer.control_ids])
    made.save(str(path))


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that byte pair encoding holds just before it makes this token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts))]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
