"""Load checkpoints: a shipped name, a folder, a .safetensors file, or a hub repository."""

import importlib
import warnings
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import CheckpointError, UsageError
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.system import memory
from multimodal.system.assets import shipped
from multimodal.system.config import source_of
from multimodal.system.files import read_json, shown
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.card import check_card
from multimodal.weights.conventions import check_activation, has_quick_gelu, with_preprocessing
from multimodal.weights.family import Family, architecture
from multimodal.weights.files.archives import check_archive, read_pickled, unwrapped
from multimodal.weights.files.ctranslate2 import read_ctranslate2
from multimodal.weights.files.formats import (
    CTRANSLATE2,
    CTRANSLATE2_NAME,
    FOREIGN,
    GGML,
    GGUF,
    NEMO,
    PICKLED,
    check_format,
    find_weights,
    foreign_format,
    is_pickled,
)
from multimodal.weights.files.ggml import read_ggml
from multimodal.weights.files.nemo import read_nemo
from multimodal.weights.files.own_parts import check_readable, exported_parts
from multimodal.weights.files.tensor_files import read_shards, read_tensors
from multimodal.weights.fit import check_vocabulary
from multimodal.weights.folder import Checkpoint, load_folder
from multimodal.weights.hub.download import HUB, repository_of, snapshot
from multimodal.weights.hub.registry import near
from multimodal.weights.table import Tensors
from multimodal.weights.text.decoders.gguf_models import gguf_checkpoint
from multimodal.weights.text.sentence import encoder_alone, projected, sentence_card

OPEN_CLIP = "open_clip:"
MODULES = (
    *("vision.clip_openai", "vision.clip_hf", "vision.siglip", "vision.coca", "vision.blip", "vision.git"),
    "vision.open_clip_trunk", "vision.vit_hf", "vision.chinese_clip",
    *("vision.vit_timm", "speech.whisper", "speech.whisper_ct2", "speech.conformer_torchaudio"),
    *("speech.parakeet", "speech.parakeet_nemo", "speech.wav2vec2", "speech.moonshine", "speech.canary"),
    "speech.canary_nemo",
    *(f"text.{name}" for name in (
        "t5", "umt5", "switch", "bart", "pegasus", "m2m100", "marian", "bert_hf", "gpt2", "llama")),
    *(f"text.encoders.{name}" for name in (
        "roberta", "albert", "distilbert", "electra", "modernbert", "mpnet", "nomic", "deberta")),
    *(f"text.decoders.{name}" for name in (
        "mixtral", "llama_kin", "olmo", "gemma", "phi3", "neox", "falcon", "starcoder2", "opt")),
    *("any.llava", "any.idefics3", "any.audio"),
)  # fmt: skip
# formats of other programs; NeMo's weights are pickled
READERS = {GGML: read_ggml, CTRANSLATE2: read_ctranslate2, NEMO: read_nemo}
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)  # of weights and their indices
# configuration files by the first part of tensor names: a folder may hold one model in two layouts; else config.json
CONFIGS = {"visual": "open_clip_config.json", "tok_embeddings": "params.json"}


def load(
    name_or_path: str | Path, architecture: str | None = None,
    preprocessing: str | Path | Preprocessing | None = None, *, task: str | None = None,
) -> Checkpoint:  # fmt: skip
    """Load a model in eval mode with its tokenizer, preprocessing and card.

    `name_or_path`: a shipped or public name (`multimodal models` lists them), a folder of ours or in the layout of
    OpenCLIP, timm, Hugging Face or faster-whisper, a `.safetensors` or `.gguf` file, a ggml file of whisper.cpp, a hub
    repository as `owner/name` or `hf-hub:owner/name@revision`, or `open_clip:MODEL:TAG`; files here go before the hub.
    `architecture`: OpenCLIP or timm name of a bare weights file. `preprocessing`: of images, if the checkpoint states
    none: openai, imagenet, inception, siglip, a JSON file like a checkpoint folder's `preprocessing.json`, or a
    Preprocessing. `task`: whose models an error suggests first for an unknown name, such as "transcribe".
    Raises UsageError for an unknown name, CheckpointError for an unusable file."""
    with torch.inference_mode(False), memory.naming(name_or_path):  # weights of inference mode could not be trained
        return with_preprocessing(open_checkpoint(name_or_path, architecture, task=task), preprocessing)


def open_checkpoint(
    name_or_path: str | Path, architecture: str | None = None, config: Path | None = None, pickled: bool = False,
    task: str | None = None,
) -> Checkpoint:  # fmt: skip
    """`load` without `preprocessing`. `config`: a foreign configuration, in place of the one beside the weights.
    `pickled`: read pickled weights too, as `convert` does."""
    if not isinstance(name_or_path, str | Path):
        raise UsageError(f"model: expected a name or a path ({shown(name_or_path)})")
    text = str(name_or_path)
    if text.startswith(HUB):
        return _load_path(_snapshot(*repository_of(text), pickled), architecture, config, pickled)
    if text.startswith(OPEN_CLIP):
        record = _open_clip_record(text.removeprefix(OPEN_CLIP))
        made = _load_path(_snapshot(record["hf_hub"].rstrip("/"), "main", pickled), architecture, config, pickled)
        if record.get("quick_gelu", False) != has_quick_gelu(made.model):
            warnings.warn(f"{text}: OpenCLIP's registry and its configuration differ on quick-GELU", stacklevel=3)
        return made
    path = Path(name_or_path)
    if not _exists(path) and text in shipped():
        return _ours(shipped()[text], architecture)
    if text and _exists(path):
        return _load_path(path, architecture, config, pickled)
    if path.suffix in (".safetensors", *PICKLED, *FOREIGN):
        raise CheckpointError(f"{shown(text)}: no such file")
    if isinstance(name_or_path, str) and (source := repository_of(text)):
        return _load_path(_snapshot(*source, pickled), architecture, config, pickled)
    raise UsageError(unknown(text, task))


def families() -> dict[str, Family]:
    """All families of foreign checkpoints by name."""
    modules = [importlib.import_module(f"multimodal.weights.{name}") for name in MODULES]
    values = [value for module in modules for value in vars(module).values()]
    made = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    return {value.name: value for value in made if isinstance(value, Family)}


def recognize(tensors: Tensors, config: dict[str, Any], where: str) -> Family:
    """The one family with these tensor names. Raises CheckpointError if none or several match, and for quantized
    weights."""
    # beside plain ones they say how to quantize them; the last is MLX's
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.get(key) and any(tensor.dtype not in PLAIN for tensor in tensors.values()):
            raise CheckpointError(f"{where}: config.json: {key} {shown(config[key])} is not supported")
    fits = [family for family in families().values() if family.recognizes(tensors, config)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise CheckpointError(f"{where}: matches several formats ({', '.join(f.name for f in fits)})")
    timm = isinstance(config.get("architecture"), str)
    if timm:
        from multimodal.weights.vision import vit_timm

        with vit_timm.FAMILY.naming(where):
            vit_timm.config_from(config, tensors)  # names the part that differs
    some = ", ".join(sorted(tensors)[:3])
    kind = str(config.get("model_type") or config.get("architecture") or _open_clip_kind(config))
    known = {name: None for family in families().values() for name in family.types if name}
    alike = [] if kind in known else get_close_matches(kind, known, n=3, cutoff=0.75)
    hint = f"; near: {', '.join(alike)}" if alike else ""
    tower = config.get("vision_config")
    head = architecture(config) if kind in known and not tower else ""
    cause = f"{head} is not supported" if head else "unknown format"
    cause = "timm's model with these tensors is not supported" if timm else cause
    if isinstance(tower, dict) and tower.get("model_type"):
        kind = f"{kind} with vision_config of kind {shown(tower['model_type'])}"
    hint += "; auto_map names code, which is never run" if config.get("auto_map") else ""
    raise CheckpointError(f"{where}: {cause} ({kind}; {len(tensors)} tensors such as {some}){hint}")


def _open_clip_kind(config: dict[str, Any]) -> str:
    model = config.get("model_cfg", config)
    vision, text = (model[part] if isinstance(model.get(part), dict) else {} for part in ("vision_cfg", "text_cfg"))
    if text.get("hf_model_name"):
        return f"OpenCLIP with text_cfg.hf_model_name {shown(text['hf_model_name'])}"
    return vision.get("timm_model_name") or ("OpenCLIP" if vision else "no configuration file")


def load_foreign(
    tensors: Tensors, config: dict[str, Any], where: str, folder: Path | None = None, pickled: bool = False
) -> Checkpoint:
    if config.get("model_type") == "timm_wrapper":  # transformers' class around timm's models
        tensors = {name.removeprefix("timm_model."): tensor for name, tensor in tensors.items()}
    tensors = encoder_alone(tensors, config, folder)
    made = recognize(tensors, config, where).load(tensors, config, where, folder)
    if config.get("auto_map"):
        warnings.warn(f"{where}: auto_map of config.json is ignored: code of a model is never run", stacklevel=6)
    card, parts = exported_parts(folder)
    check_vocabulary(parts.get("tokenizer"), made.model.config, where)
    if isinstance(made.model, TextTransformer | EncoderDecoder):
        card |= sentence_card(folder, made.model)
    model = projected(made.model, folder, pickled)
    return replace(made, model=model, card=check_card(card | made.card, where), **parts)


def architecture_config(name: str) -> dict[str, Any]:
    """Configuration of an OpenCLIP or timm architecture. Raises UsageError with similar names."""
    from multimodal.weights.vision.open_clip import open_clip_architecture

    try:
        return open_clip_architecture(name)
    except UsageError as error:
        import timm

        if not timm.is_model(name):
            raise UsageError(f"{error}; nor is it one of timm's") from None
        return {"architecture": name}


def _snapshot(repository: str, revision: str, pickled: bool) -> Path:
    """The folder of a hub repository; with `pickled` its pickled weights where it has no safetensors."""
    folder = snapshot(repository, revision, pickled)
    if not pickled and not any(folder.glob("*.safetensors")) and not (folder / CTRANSLATE2_NAME).is_file():
        raise CheckpointError(
            f"{HUB}{repository}: has no safetensors weights; read pickled ones with multimodal convert "
            f"{HUB}{repository} FOLDER"
        )
    return folder


def _open_clip_record(name: str) -> dict[str, Any]:
    """Entry of OpenCLIP's registry for MODEL:TAG. Raises UsageError, CheckpointError if it has no hub repository."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    model, _, tag = name.partition(":")
    record = get_pretrained_cfg(model, tag)
    if not record:
        tags = ", ".join(list_pretrained_tags_by_model(model)) or "none for this model"
        raise UsageError(f"{OPEN_CLIP}{name}: not in OpenCLIP's registry (tags: {tags})")
    if not record.get("hf_hub"):
        raise CheckpointError(
            f"{OPEN_CLIP}{name}: has no hub repository; download {record['url']} and load that file with "
            f"architecture='{model}'"
        )
    return record


def _load_path(path: Path, architecture: str | None, config_file: Path | None, pickled: bool) -> Checkpoint:
    folder = path if path.is_dir() else path.parent
    if _is_ours(folder) and (path.is_dir() or path.name == "model.safetensors"):
        return _ours(folder, architecture)
    check_readable(folder)
    config = architecture_config(architecture) if architecture else read_json(config_file) if config_file else {}
    weights = find_weights(path) if path.is_dir() else path
    if weights.is_file() and foreign_format(weights) == GGUF:
        return gguf_checkpoint(weights, families)
    tensors, own = _read(weights, path, pickled)
    tensors = unwrapped(tensors)
    if architecture:
        if (family := recognize(tensors, config, str(path))).types:
            raise UsageError(f"architecture {architecture}: expected OpenCLIP's or timm's weights, got {family.name}")
        check_activation(weights, architecture, bool(config.get("quick_gelu", "vision_cfg" not in config)))
    return load_foreign(tensors, config or own or _config_of(folder, tensors), str(path), folder, pickled)


def _read(weights: Path, source: Path, pickled: bool) -> tuple[Tensors, dict[str, Any]]:
    """Tensors, and the configuration that some formats contain."""
    kind = foreign_format(weights) if weights.is_file() else ""
    if kind in READERS and (pickled or kind != NEMO):
        return READERS[kind](weights)
    if weights.suffix == ".safetensors":
        return read_tensors(weights), {}
    if weights.is_file() and kind != NEMO:
        check_format(weights)
    if (is_pickled(weights) or kind == NEMO) and not pickled:
        if weights.suffix in PICKLED:  # a damaged one cannot be converted
            check_archive(weights)
        raise CheckpointError(f"{weights}: pickled weights; run multimodal convert {source} FOLDER, and load FOLDER")
    if weights.name.endswith(".index.json"):
        return read_shards(weights), {}
    if is_pickled(weights):
        return read_pickled(weights)
    raise CheckpointError(f"{weights}: expected .safetensors or pickled PyTorch weights ({', '.join(PICKLED)})")


def _ours(folder: Path, architecture: str | None) -> Checkpoint:
    if architecture:
        warnings.warn(f"architecture {architecture} is ignored: {folder} states its own", stacklevel=5)
    return load_folder(folder)


def _is_ours(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and (folder / "config.json").is_file()


def _config_of(folder: Path, tensors: Tensors) -> dict[str, Any]:
    parts = {name.split(".")[0] for name in tensors}
    for name in (*(file for part, file in CONFIGS.items() if part in parts), "config.json"):
        if (folder / name).exists():
            return read_json(folder / name)
    return {}


def unknown(name: str, task: str | None = None) -> str:
    from multimodal.models.presets import PRESETS

    names = ", ".join(near(name, shipped(), task))
    known = f"near: {names}" if names else "multimodal models lists the known ones"
    if name in PRESETS:
        return f"model {name!r}: a size without weights (see multimodal info); {known}"
    origin = f" of {source}" if (source := source_of(name)) else ""
    return f"model {name[:80]!r}{origin}: neither a path nor a known model ({known})"


def _exists(path: Path) -> bool:
    """Path.exists, but False for names that are too long or hold a NUL."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
