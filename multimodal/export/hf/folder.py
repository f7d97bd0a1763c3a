"""A folder that transformers loads: config.json, weights, tokenizer, preprocessing."""

import shutil
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.export.hf.configs import described
from multimodal.export.hf.files import (
    begin_id,
    image_processor,
    write_generation,
    write_json,
    write_tokenizer,
    write_whisper,
)
from multimodal.export.hf.sentences import check_sentences, write_sentences
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import Whisper
from multimodal.system.files import inside, optional_json
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.weights.conventions import GIVEN
from multimodal.weights.files.store_options import Store
from multimodal.weights.files.stored import to_stored
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families
from multimodal.weights.table import Tensors, export_tensors
from multimodal.weights.text.bert import HEAD_FACTS
from multimodal.weights.text.sentence import MODULES, PROMPTS, SETTINGS, sentence_modules

BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model", "source.spm",
    "target.spm", "target_vocab.json", "normalizer.json", "preprocessor_config.json", "processor_config.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
WORDS = ("tokenizer.json", "vocab.json")
GENERATING = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "MTModel")
MODULE_FILES = ("config.json", "model.safetensors")
Parts = tuple[dict[str, Any], Tensors, Path | None]


def parts_of(checkpoint: Checkpoint) -> Parts:
    """config.json, tensors, and the folder of transformers that the model came from, if it did. Raises
    UsageError for a model that transformers lacks."""
    source, model = Path(checkpoint.source), checkpoint.original()
    own, config = families().get(checkpoint.card.get("format", "")), {}
    if source.is_dir() and not (source / "manifest.json").exists():
        config = optional_json(source / "config.json")
    if own is not None and own.types and config.get("model_type") in own.types:
        maps = "project." if getattr(model.config, "projections", ()) else None  # Dense modules have files of their own
        state = {name: one for name, one in model.state_dict().items() if not (maps and name.startswith(maps))}
        try:
            return config, export_tensors(own.rows(model.config), state), source
        except CheckpointError as error:
            raise UsageError(f"model {checkpoint.source}: {error}") from None
    check_sentences(checkpoint)
    return *described(checkpoint), None


def write_folder(checkpoint: Checkpoint, parts: Parts, folder: Path, store: Store = "float32") -> list[str]:
    """Write the files; return what is left out. Raises CheckpointError for weights beyond the range of `store`."""
    from safetensors.torch import save

    config, tensors, source = parts
    left: list[str] = []
    config = {key: value for key, value in config.items() if key not in ("auto_map", "torch_dtype")}
    if source is not None:
        for name in (*BESIDE, *_modules(source)):
            if (path := source / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)
        if isinstance(checkpoint.tokenizer, WhisperTokenizer) and not any((source / name).is_file() for name in WORDS):
            write_tokenizer(checkpoint, folder)  # which readers would take from another model
        if GIVEN in checkpoint.card:  # in place of the folder's
            left = _write_images(checkpoint, config, folder)
    else:
        config = _completed(config, checkpoint)
        left = _write_beside(checkpoint, config, folder)
    write_json(folder / "config.json", config | {"dtype": store})
    # clones, since safetensors refuses tied tensors
    held = {name: tensor.clone() for name, tensor in to_stored(tensors, store, checkpoint.source).items()}
    (folder / "model.safetensors").write_bytes(save(held, metadata={"format": "pt"}))
    return left


def _modules(source: Path) -> list[str]:
    """Files of sentence-transformers: its list, and those of the folders in it, such as 1_Pooling and 2_Dense."""
    places = [inside(source, place, f"{source / MODULES}: path") for _, place in sentence_modules(source) if place]
    files = [str((place / name).relative_to(source)) for place in places for name in MODULE_FILES]
    return [MODULES, *SETTINGS, PROMPTS, *files]


def _completed(config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json with the class, labels and ids of tokens."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    made = dict(config)
    count = getattr(model.config, "tags", 0) or getattr(model.config, "classes", 0)
    if count and not config["architectures"][0].endswith("ForMultipleChoice"):
        names = checkpoint.card.get("names") or checkpoint.card.get("labels") or ()
        names = list(names) if len(names) == count else [f"LABEL_{i}" for i in range(count)]
        made |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        made |= {name: checkpoint.card[name] for name in HEAD_FACTS if name in checkpoint.card}
        if checkpoint.card.get("scores") == "sigmoid":
            made["problem_type"] = "multi_label_classification"
    if isinstance(model, TextTransformer | EncoderDecoder | Whisper):
        pad = config.get("decoder_start_token_id", 0)
        ids = {"pad_token_id": pad}
        if tokenizer is not None:
            ids = {"pad_token_id": tokenizer.pad_id, "bos_token_id": begin_id(checkpoint),
                   "eos_token_id": tokenizer.eos_id}  # fmt: skip
        if isinstance(model, Whisper) and tokenizer is not None:
            ids |= {"bos_token_id": tokenizer.eos_id, "decoder_start_token_id": tokenizer.bos_id}
        made = ids | made
    return made


def _write_beside(checkpoint: Checkpoint, config: dict[str, Any], folder: Path) -> list[str]:
    """Write preprocessing, tokenizer and generation; return the names of those that transformers lacks."""
    left = [] if checkpoint.preprocessing is None else _write_images(checkpoint, config, folder)
    if checkpoint.tokenizer is not None and not write_tokenizer(checkpoint, folder):
        left.append("tokenizer")
    if "pooling" in checkpoint.card and checkpoint.tokenizer is not None:
        write_sentences(checkpoint, folder)
    if isinstance(checkpoint.model, Whisper):
        write_whisper(checkpoint, folder)
    elif checkpoint.tokenizer is not None and config["architectures"][0].endswith(GENERATING):
        write_generation(checkpoint, config, folder)
    return left


def _write_images(checkpoint: Checkpoint, config: dict[str, Any], folder: Path) -> list[str]:
    """Write the image processor, in place of a copied one; return its name if transformers lacks it."""
    record = image_processor(checkpoint.preprocessing, config["model_type"])
    own, both = folder / "preprocessor_config.json", folder / "processor_config.json"
    if "image_processor" in (held := optional_json(both)):  # which goes before the other file
        write_json(both, {name: part for name, part in held.items() if name != "image_processor"})
    if record is None:
        own.unlink(missing_ok=True)
        return ["preprocessing"]
    write_json(own, record)
    return []
