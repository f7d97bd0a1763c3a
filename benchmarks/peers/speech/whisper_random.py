"""Random Whisper weights of a released size, written as each library reads them: the same numbers in all.

`prepare` writes into its folder
    ours/                 our checkpoint
    openai.pt             OpenAI's {"dims", "model_state_dict"}
    transformers/         config, weights, generation, features, tokenizer
    ctranslate2/          CTranslate2's and faster-whisper's, float32, and the tokenizer
    KIND.ggml             whisper.cpp's, for each of `ggml`
    inputs.safetensors    mel [B M 3000], frames [B 1500 D] of the float32 encoder
    about.json            {"prompt", "bands", "vocabulary": its size}
    speech.wav            16 kHz, mono, 16 bits, where `seconds` asks for it

A peer reads them with `whisper_files`, which needs nothing of ours.
"""

import json
import wave
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.peers.speech.random_ggml import save_ggml
from benchmarks.suite.process import ROOT
from multimodal.models.presets import preset, whisper
from multimodal.models.whisper import Whisper, WhisperConfig
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.clip import byte_letters
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.speech.whisper import DIMENSIONS, WHISPER_HF, WHISPER_OPENAI

RATE = 16000
SPEECH = ROOT / "assets" / "sample" / "speech.flac"
LIBRARIES = ("openai", "transformers", "ctranslate2")


def prepare(
    folder: Path, device: str, size: str, tiny: bool = False, libraries: Sequence[str] = LIBRARIES, batch: int = 1,
    seconds: float = 0.0, tokenizer: bool = True, ggml: Sequence[str] = (), **other: Any,
) -> None:  # fmt: skip
    """`tiny`: a model of one layer with the real vocabulary. `batch`: windows in `mel` and `frames`. `seconds`: of
    audio, the sample's sentences again and again. `tokenizer`: whether to write it for libraries that read it from the
    folder. `other`: settings of the candidates alone."""
    made = checkpoint(sizes(size, tiny), device)
    bands = made.model.config.encoder.bands
    chance = torch.Generator().manual_seed(1)
    mel = torch.randn(batch, bands, 3000, generator=chance)
    with torch.inference_mode():
        frames = made.model.encoder(mel.to(device)).cpu()
    made = Checkpoint(made.model.to("cpu"), made.tokenizer, source=made.source)
    save_file({"mel": mel, "frames": frames.clone()}, folder / "inputs.safetensors")
    prompt = list(made.tokenizer.sot_sequence("en", timestamps=False))
    about = {"prompt": prompt, "bands": bands, "vocabulary": made.model.config.decoder.vocabulary}
    (folder / "about.json").write_text(json.dumps(about))
    save_folder(made, folder / "ours")
    writers = {"openai": save_openai, "transformers": save_transformers, "ctranslate2": save_ctranslate2}
    libraries = [name for name in libraries if name == "openai" or find_spec(name)]  # the others' candidates say so
    for name in libraries:
        writers[name](made, folder)
    for kind in ggml:
        save_ggml(made, dimensions(made), folder / f"{kind}.ggml", kind)
    if seconds:
        save_wave(folder / "speech.wav", speech(seconds))
    for name in libraries if tokenizer else ():
        if name != "openai":
            save_tokenizer(made.tokenizer, folder / name / "tokenizer.json")


def sizes(size: str, tiny: bool = False) -> WhisperConfig:
    return whisper(64, 1, 1, 51865) if tiny else preset(f"whisper_{size}")


def checkpoint(config: WhisperConfig, device: str = "cpu", seed: int = 0) -> Checkpoint:
    """Logits of deviation about 3, so that the best token leads by far more than float32's error; audio and position
    matter; control tokens are unlikely, so that decoding runs to its limit."""
    torch.manual_seed(seed)
    model = Whisper(config).eval()
    tokenizer = WhisperTokenizer(True, 100 if config.decoder.vocabulary == 51866 else 99)
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
    return Checkpoint(model.to(device), tokenizer, source="random Whisper")


def save_wave(path: Path, samples: Tensor) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).round().to(torch.int16).numpy().tobytes())


def speech(seconds: float) -> Tensor:
    """[samples]"""
    sample, count = read_audio(SPEECH), round(seconds * RATE)
    return sample.repeat(count // len(sample) + 1)[:count].contiguous()


def dimensions(made: Checkpoint) -> dict[str, int]:
    """OpenAI's `dims`."""
    config = made.model.config
    encoder, decoder = config.encoder.stack, config.decoder.stack
    values = [config.encoder.bands, config.encoder.context, config.encoder.width]
    values += [encoder.block.attention.heads, encoder.layers]
    values += [config.decoder.vocabulary, config.decoder.context, config.decoder.width]
    values += [decoder.block.attention.heads, decoder.layers]
    return dict(zip(DIMENSIONS, values, strict=True))


def save_openai(made: Checkpoint, folder: Path) -> None:
    torch.save({"dims": dimensions(made), "model_state_dict": WHISPER_OPENAI.export(made.model)}, folder / "openai.pt")


def transformers_model(made: Checkpoint) -> torch.nn.Module:
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    config, t = made.model.config, made.tokenizer
    encoder, decoder = config.encoder.stack, config.decoder.stack
    ids = {"pad_token_id": t.eot, "bos_token_id": t.eot, "eos_token_id": t.eot, "decoder_start_token_id": t.sot}
    settings = WhisperConfig(
        vocab_size=config.decoder.vocabulary, num_mel_bins=config.encoder.bands, d_model=config.encoder.width,
        encoder_layers=encoder.layers, encoder_attention_heads=encoder.block.attention.heads,
        encoder_ffn_dim=encoder.block.hidden, decoder_layers=decoder.layers,
        decoder_attention_heads=decoder.block.attention.heads, decoder_ffn_dim=decoder.block.hidden, **ids,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(settings).eval()
    model.load_state_dict(WHISPER_HF.export(made.model))
    model.generation_config = GenerationConfig(
        **ids, is_multilingual=True, no_timestamps_token_id=t.no_timestamps, max_length=config.decoder.context,
        lang_to_id={name: id for name, id in t.control_ids.items() if id in t.language_tokens},
        task_to_id={"transcribe": t.transcribe, "translate": t.translate}, return_timestamps=False,
        suppress_tokens=sorted([*t.non_speech_tokens(), t.transcribe, t.translate, t.sot, t.sot_prev, t.sot_lm,
                                t.no_speech]),
        begin_suppress_tokens=[*t.encode(" "), t.eot],
    )  # fmt: skip
    return model


def save_transformers(made: Checkpoint, folder: Path) -> None:
    from transformers import WhisperFeatureExtractor

    to = folder / "transformers"
    transformers_model(made).save_pretrained(to)
    WhisperFeatureExtractor(feature_size=made.model.config.encoder.bands).save_pretrained(to)


def save_ctranslate2(made: Checkpoint, folder: Path) -> None:
    """Weights (float32) and vocabulary for CTranslate2 and faster-whisper."""
    from ctranslate2.converters.transformers import WhisperLoader

    t, to = made.tokenizer, folder / "ctranslate2"
    spec = WhisperLoader().get_model_spec(transformers_model(made))
    spec.register_vocabulary(_token_names(t))
    spec.config.lang_ids = list(t.language_tokens)
    spec.config.suppress_ids, spec.config.suppress_ids_begin = [], []
    layers, heads = made.model.config.decoder.stack.layers, made.model.config.decoder.stack.block.attention.heads
    spec.config.alignment_heads = [(i, j) for i in range(layers // 2, layers) for j in range(heads)]
    spec.validate()
    spec.optimize(quantization=None)
    to.mkdir()
    spec.save(str(to))
    (to / "preprocessor_config.json").write_text(json.dumps({"feature_size": made.model.config.encoder.bands}))


def _token_names(tokenizer: WhisperTokenizer) -> list[str]:
    letters, decode = byte_letters(), tokenizer._encoding.decode_single_token_bytes
    plain = ["".join(letters[byte] for byte in decode(i)) for i in range(tokenizer.plain_size)]
    return plain + list(tokenizer.control_ids)


def save_tokenizer(tokenizer: WhisperTokenizer, path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {name: i for i, name in enumerate(_token_names(tokenizer)[: tokenizer.plain_size])}
    # tiktoken joins any two tokens that make a third, the one of lowest rank first
    pairs = ((name[:i], name[i:]) for name in ids for i in range(1, len(name)))
    merges = [(left, right) for left, right in pairs if left in ids and right in ids]
    made: Any = Tokenizer(models.BPE(vocab=ids, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in tokenizer.control_ids])
    made.save(str(path))
