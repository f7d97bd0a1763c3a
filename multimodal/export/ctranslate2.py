"""CTranslate2 folders, by its own converter from a folder for transformers."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multimodal.errors import UsageError, one_line
from multimodal.export.hf.decoders import rope
from multimodal.export.hf.files import write_json
from multimodal.export.hf.folder import BESIDE, Parts, write_folder
from multimodal.export.refusals import short_window
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.whisper import Whisper
from multimodal.system.files import optional_json, read_json, read_json_value
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.tokens.text.tokenizer import RECORD
from multimodal.tokens.text.translation import PiecesTokenizer
from multimodal.weights.fit import vocabulary_of
from multimodal.weights.folder import Checkpoint

NEEDS = ("ctranslate2", "transformers")
# of `model_type`: what its converter reads, as far as we write it
TYPES = (
    "bart", "mbart", "marian", "m2m_100", "pegasus", "opt", "gpt2", "gpt_neox", "whisper", "t5", "mt5", "umt5", "bloom",
    "gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "falcon", "distilbert", "bert",
    "xlm-roberta", "roberta", "camembert",
)  # fmt: skip
PROBE = 12  # tokens that are computed again
FASTER_WHISPER = 1500  # states of a window
NEAR, ROUNDED = 1e-3, 0.1
SCALINGS = ("default", "linear", "llama3")
WINDOWED = ("mistral", "gemma3_text")  # others have no window there
# what the tokenizers of its converter read
NEEDED = {"marian": ("source.spm", "target.spm", "vocab.json"), "m2m_100": ("sentencepiece.bpe.model", "vocab.json"),
          "umt5": ("tokenizer.json",)}  # fmt: skip


def check_type(checkpoint: Checkpoint, parts: Parts) -> None:
    """Raise UsageError for a model that CTranslate2 does not hold."""
    if (kind := parts[0].get("model_type")) not in TYPES:
        raise UsageError(f"model {checkpoint.source}: a {kind}; CTranslate2 export takes {', '.join(TYPES)} alone")
    if getattr(checkpoint.tokenizer, "target_vocab", None) is not None:
        raise UsageError(f"model {checkpoint.source}: CTranslate2 export does not support separate_vocabs")
    if not isinstance(checkpoint.model, TextTransformer):
        return
    if kind == "falcon" and parts[0].get("new_decoder_architecture"):
        raise UsageError(f"model {checkpoint.source}: CTranslate2 export does not support Falcon's "
                         "new_decoder_architecture")  # fmt: skip
    config = checkpoint.model.config
    for positions in (config.positions, *([config.pattern.positions] if config.pattern else [])):
        if positions.kind == "rotary" and (scaling := rope(positions, 1)["rope_type"]) not in SCALINGS:
            raise UsageError(f"model {checkpoint.source}: CTranslate2 export does not support {scaling} scaling")
    if (window := short_window(config)) and (kind not in WINDOWED or (kind == "mistral" and config.pattern)):
        raise UsageError(
            f"model {checkpoint.source}: CTranslate2 has no windows of a {kind} (got one of {window} tokens)"
        )


def write_ctranslate2(checkpoint: Checkpoint, parts: Parts, folder: Path, store: str) -> None:
    """Write `model.bin` and what belongs to it. Raises UsageError for a model that the converter refuses."""
    from ctranslate2.converters import TransformersConverter

    class RestoringConverter(TransformersConverter):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(*args, **kwargs)
            _restore(model)
            return model

        def _load(self) -> Any:
            spec = super()._load()
            for name in ("unk_token", "bos_token"):
                if getattr(spec.config, name, "") is None:  # which the library does not read
                    setattr(spec.config, name, "")  # as the converter itself writes for Llama
            config = checkpoint.model.config
            if isinstance(checkpoint.model, TextTransformer) and config.causal:
                _set_scaling(spec.decoder.layer, config)
                spec.register_vocabulary(_filled(spec._vocabulary, spec.get_vocabulary_size()))
            elif isinstance(checkpoint.model, EncoderDecoder):  # the converter takes the encoder's
                spec.decoder.num_heads = np.int16(config.decoder.stack.block.attention.heads)
                sizes = {"source": spec.get_source_vocabulary_size(), "target": [spec.get_target_vocabulary_size()]}
                spec._vocabularies |= {side: [*map(_filled, spec._vocabularies[side], sizes[side])] for side in sizes}
            elif isinstance(checkpoint.tokenizer, WhisperTokenizer):  # a folder of 2022 does not list its languages
                spec.config.lang_ids = spec.config.lang_ids or sorted(checkpoint.tokenizer.language_tokens)
            return spec

    with tempfile.TemporaryDirectory(dir=folder.parent) as place, _quiet():
        source, whole = (Path(place) / name for name in ("source", "whole"))
        source.mkdir()
        write_folder(checkpoint, parts, source)
        if parts[0]["model_type"] == "m2m_100" and isinstance(tokenizer := checkpoint.tokenizer, PiecesTokenizer):
            languages = {"additional_special_tokens": [*tokenizer.languages]}  # which transformers 5 does not save
            write_json(source / RECORD, optional_json(source / RECORD) | languages)
        names = [name for name in BESIDE if (source / name).exists()]
        names = [name for name in names if isinstance(checkpoint.model, Whisper) or name != "generation_config.json"]
        converter = RestoringConverter(str(source), copy_files=names)
        # rounded numbers hide an option that is lost
        for target, kind in ((whole, "float32"), (folder, store))[store == "float32" :]:
            try:
                converter.convert(str(target), quantization=kind, force=True)
            except (ValueError, KeyError, AttributeError, NotImplementedError, TypeError) as error:
                lacks = [name for name in NEEDED.get(parts[0]["model_type"], ()) if not (source / name).exists()]
                cause = f"CTranslate2's converter refuses it ({one_line(error, 200)})"
                cause = f"CTranslate2 export needs {', '.join(lacks)}, which it lacks" if lacks else cause
                raise UsageError(f"model {checkpoint.source}: {cause}") from None
            _correct(checkpoint.model, parts[0].get("decoder_start_token_id"), target)
            _check_numbers(checkpoint, target, NEAR if kind == "float32" else ROUNDED)


def _filled(tokens: list[str], size: int) -> list[str]:
    """The tokens of a vocabulary, with names for rows of the embedding that have none."""
    return [*tokens, *(f"<extra_id_{i}>" for i in range(size - len(tokens)))]


def _check_numbers(checkpoint: Checkpoint, folder: Path, near: float) -> None:
    """Raise UsageError if the folder computes something else."""
    own = getattr(checkpoint.model, "decoder", checkpoint.model).config.stack.block.attention
    usual = own.head_width in (None, own.width // own.heads)
    cause = "" if usual else f": head_dim is {own.head_width}, which it may take to be width / heads"
    try:
        away = _difference(checkpoint, folder)
    except (ValueError, RuntimeError) as error:
        cause = cause or f" ({one_line(error, 200)})"
        raise UsageError(f"model {checkpoint.source}: CTranslate2 cannot compute it{cause}") from None
    if away > near:
        cause = cause or ("; it lacks some option" if near == NEAR else ": its rounding is too coarse for this model")
        raise UsageError(f"model {checkpoint.source}: CTranslate2's numbers are {away:.1%} off{cause}")


def left_out(model: nn.Module) -> list[str]:
    """Limits of the folder, for its reader."""
    notes, config = [], model.config
    if window := short_window(config):
        notes.append(f"CTranslate2 computes prompts of up to {window} tokens alone, which is the model's window; "
                     "longer ones give another text")  # fmt: skip
    if isinstance(model, Whisper) and config.encoder.context != FASTER_WHISPER:
        seconds = config.encoder.context / FASTER_WHISPER * 30
        notes.append(f"faster-whisper takes windows of 30 s alone, not of {seconds:g} s; transcribe reads the folder")
    elif isinstance(model, TextTransformer) and not config.causal and _has_head(config):
        notes.append("CTranslate2 holds an encoder's states alone; its heads are left out")
    return notes


def _has_head(config: TextConfig) -> bool:
    return config.tied is not None or bool(config.classes or config.tags or config.spans or config.projections)


def _restore(model: Any) -> None:
    """Set what the converter reads of a model, and transformers 5 renamed."""
    config = model.config
    rotary = getattr(config, "rope_parameters", None) or {}
    full, local = (rotary.get(f"{kind}_attention", rotary) for kind in ("full", "sliding"))
    if rotary:
        config.rope_theta, config.rope_local_base_freq = full["rope_theta"], local["rope_theta"]
        config.rotary_pct = full.get("partial_rotary_factor", 1.0)
    lost = {"position_embedding_type": "absolute", "normalize_before": config.model_type != "bart",
            "normalize_embedding": config.model_type in ("bart", "mbart")}  # fmt: skip
    for name, value in lost.items():
        if not hasattr(config, name):
            setattr(config, name, value)
    if config.model_type in ("t5", "mt5"):  # it takes the one for the other
        config.tie_word_embeddings = getattr(config, "scale_decoder_outputs", False)
    if config.model_type == "gpt_neox":
        model.embed_out = model.lm_head


def _set_scaling(layers: list[Any], config: TextConfig) -> None:
    """Scale the positions of each layer: the converter leaves out Llama 3.1's factor and Gemma 3's scaling."""
    from ctranslate2.specs.attention_spec import RotaryScalingType

    for number, layer in enumerate(layers):
        own = config.pattern.positions if config.pattern and number in config.pattern.layers else config.positions
        if own.kind != "rotary" or own.scale == 1:
            continue
        made = {"rotary_scaling_type": np.int8(RotaryScalingType.Linear),
                "rotary_scaling_factor": np.float32(1 / own.scale)}  # fmt: skip
        if own.turns:
            low, high, trained = own.turns
            made |= {"rotary_scaling_type": np.int8(RotaryScalingType.Llama3),
                     "rotary_low_freq_factor": np.float32(low), "rotary_high_freq_factor": np.float32(high),
                     "original_max_position_embeddings": np.int32(trained)}  # fmt: skip
        vars(layer.self_attention).update(made)  # setattr takes the attributes of its own loaders alone


def _correct(model: nn.Module, start: int | None, folder: Path) -> None:
    """Set what the converter leaves out of config.json: T5's epsilon, and the decoder's first token, `start` of a
    checkpoint that says one: it takes <pad> for every Pegasus, and none for an mBART without a tokenizer's name. A
    removed <pad> (`_difference`) stays the converter's."""
    if isinstance(model, Whisper):
        return
    path, config = folder / "config.json", read_json(folder / "config.json")
    tower = model.config.decoder if isinstance(model, EncoderDecoder) else model.config
    config["layer_norm_epsilon"] = tower.stack.block.norm_eps
    if isinstance(model, EncoderDecoder) and (start is not None or config["decoder_start_token"]):
        names = _names(folder)[1]
        config["decoder_start_token"] = [*names, config["decoder_start_token"]][min(model.config.start_id, len(names))]
    write_json(path, config)


@torch.no_grad()
def _difference(checkpoint: Checkpoint, folder: Path) -> float:
    """Largest difference of states or log-probabilities from the model's, as a part of the largest value."""
    import ctranslate2

    model, place = checkpoint.model, str(folder)
    if isinstance(model, Whisper):
        made = ctranslate2.models.Whisper(place)
        sound = torch.randn(1, model.config.encoder.bands, 2 * model.config.encoder.context, generator=_drawn())
        found = made.encode(ctranslate2.StorageView.from_array(sound.numpy())).to(ctranslate2.DataType.float32)
        return _apart(found, model.encoder(sound))
    names = _names(folder) if isinstance(model, EncoderDecoder) else []  # without Marian's last <pad>
    rows = min(map(len, names), default=vocabulary_of(model.config) or 1)
    length = min(PROBE, short_window(model.config) or PROBE)
    ids = torch.randint(rows, (1, length), generator=_drawn())
    if names:
        stated = read_json(folder / "config.json")["decoder_start_token"]
        given = [] if stated else [names[1][model.config.start_id]]
        source, target = ([side[i] for i in ids[0]] for side in names)
        found = ctranslate2.Translator(place).score_batch([source], [given + target])[0].log_probs[-length - 1 : -1]
        before = torch.cat([torch.tensor([[model.config.start_id]]), ids[:, :-1]], 1)
        wanted = model(ids, before)[..., : len(names[1])].log_softmax(-1).gather(-1, ids[..., None])
        return _apart(found, wanted.flatten())
    if not model.config.causal:
        return _apart(ctranslate2.Encoder(place).forward_batch(ids.tolist()).last_hidden_state, model.states(ids))
    found = ctranslate2.Generator(place).forward_batch(ids.tolist())
    return _apart(torch.from_numpy(np.array(found)).log_softmax(-1), model(ids).log_softmax(-1))


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _apart(found: Any, wanted: Tensor) -> float:
    found = torch.from_numpy(np.array(found)).reshape(wanted.shape)
    return ((found - wanted).norm() / wanted.norm()).item()


def _names(folder: Path) -> list[list[str]]:
    """Tokens of source and target."""
    shared = folder / "shared_vocabulary.json"
    own = [shared] * 2 if shared.is_file() else [folder / f"{side}_vocabulary.json" for side in ("source", "target")]
    return [read_json_value(path) for path in own]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' warnings, report of tensors and progress bar from the terminal."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
