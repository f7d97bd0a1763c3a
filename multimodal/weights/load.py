"""One door for every checkpoint: a shipped name, a folder, a .safetensors file, or a hub's repository."""

import difflib
import importlib
import warnings
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.system import memory
from multimodal.system.assets import shipped
from multimodal.system.files import read_json, shown
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.conventions import check_activation, has_quick_gelu, with_preprocessing
from multimodal.weights.family import Family
from multimodal.weights.folder import Checkpoint, load_folder
from multimodal.weights.table import Tensors
from multimodal.weights.tensor_files import read_shards, read_tensors

HUB = "hf-hub:"
OPEN_CLIP = "open_clip:"
MODULES = (
    "vision.clip_openai",
    "vision.clip_hf",
    "vision.siglip",
    "vision.coca",
    "vision.blip",
    "vision.git",
    "vision.vit_timm",
    "speech.whisper",
    "speech.conformer_torchaudio",
    "text.t5",
    "text.bart",
    "text.m2m100",
    "text.marian",
    "text.bert_hf",
    "text.roberta",
    "text.albert",
    "text.distilbert",
    "text.electra",
    "text.gpt2",
    "text.llama",
)
CONFIGS = ("open_clip_config.json", "config.json", "params.json")
WEIGHTS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.safetensors")
UNSAFE = (".pt", ".pth", ".bin", ".ckpt", ".th", ".pkl")


def load(
    name_or_path: str | Path, architecture: str | None = None, preprocessing: str | Path | Preprocessing | None = None
) -> Checkpoint:
    """The model in eval mode with its tokenizer, preprocessing and card.

    `name_or_path`: a shipped name (`multimodal models` lists them), a folder of ours or in the layout of
    OpenCLIP, timm or Hugging Face, a `.safetensors` file, `hf-hub:owner/name`, or `open_clip:MODEL:TAG`.
    `architecture`: the OpenCLIP or timm name of a bare weights file, which does not say it itself.
    `preprocessing`: of pictures, where the file does not say that either: openai, imagenet, inception, siglip, a JSON
    file as `preprocessing.json` of a checkpoint folder, or such a record.
    Raises UsageError for an unknown name, CheckpointError for a file that cannot be used."""
    with memory.naming(name_or_path):
        return with_preprocessing(_load(name_or_path, architecture), preprocessing)


def _load(name_or_path: str | Path, architecture: str | None) -> Checkpoint:
    if not isinstance(name_or_path, str | Path):
        raise UsageError(f"model: expected a name or a path ({shown(name_or_path)})")
    text = str(name_or_path)
    if text.startswith(HUB):
        return _load_path(download(text.removeprefix(HUB)), architecture)
    if text.startswith(OPEN_CLIP):
        record = _open_clip_record(text.removeprefix(OPEN_CLIP))
        found = _load_path(download(record["hf_hub"].rstrip("/")), architecture)
        if record.get("quick_gelu", False) != has_quick_gelu(found.model):
            warnings.warn(f"{text}: OpenCLIP's registry and its configuration differ on quick-GELU", stacklevel=3)
        return found
    path = Path(name_or_path)
    if not _exists(path) and text in shipped():
        return _ours(shipped()[text], architecture)
    if text and _exists(path):
        return _load_path(path, architecture)
    raise UsageError(_unknown(text))


def families() -> dict[str, Family]:
    """Every family of foreign checkpoints by its name."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"multimodal.weights.{name}")
        found |= {value.name: value for value in vars(module).values() if isinstance(value, Family)}
    return found


def recognise(tensors: Tensors, config: dict[str, Any], where: str) -> Family:
    """The one family whose names these are. Raises CheckpointError when there is none, or more than one."""
    fits = [family for family in families().values() if family.recognises(tensors, config)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise CheckpointError(f"{where}: fits several formats ({', '.join(f.name for f in fits)})")
    some = ", ".join(sorted(tensors)[:3])
    kind = config.get("model_type") or config.get("architecture") or "no configuration file"
    raise CheckpointError(f"{where}: no known format ({kind}; {len(tensors)} tensors such as {some})")


def load_foreign(tensors: Tensors, config: dict[str, Any], where: str, folder: Path | None = None) -> Checkpoint:
    return recognise(tensors, config, where).load(tensors, config, where, folder)


def architecture_config(name: str) -> dict[str, Any]:
    """The configuration that OpenCLIP or timm has under this name. Raises UsageError with the near names."""
    from multimodal.weights.vision.clip_openai import open_clip_architecture

    try:
        return open_clip_architecture(name)
    except UsageError as error:
        import timm

        if not timm.is_model(name):
            raise UsageError(f"{error}; timm has none of this name either") from None
        return {"architecture": name}


def download(repository: str) -> Path:
    """A snapshot of a hub repository: configurations, tokenizers and safetensors, never pickled weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.tiktoken"]
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{HUB}{repository}: cannot be fetched ({cause})") from None


def _open_clip_record(name: str) -> dict[str, Any]:
    """What OpenCLIP's registry has for MODEL:TAG, with a hub repository."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    model, _, tag = name.partition(":")
    record = get_pretrained_cfg(model, tag)
    if not record:
        tags = ", ".join(list_pretrained_tags_by_model(model)) or "none for this model"
        raise UsageError(f"{OPEN_CLIP}{name}: unknown to OpenCLIP's registry (tags: {tags})")
    if not record.get("hf_hub"):
        raise CheckpointError(f"{OPEN_CLIP}{name}: has no hub repository; fetch its file and use multimodal convert")
    return record


def _load_path(path: Path, architecture: str | None) -> Checkpoint:
    folder = path if path.is_dir() else path.parent
    if _is_ours(folder) and (path.is_dir() or path.name == "model.safetensors"):
        return _ours(folder, architecture)
    config = architecture_config(architecture) if architecture else _config_of(folder)
    weights = _weights_of(path) if path.is_dir() else path
    if weights.suffix in UNSAFE:
        raise CheckpointError(
            f"{weights}: a {weights.suffix} file can hold code; bring it over with multimodal convert"
        )
    if architecture:
        check_activation(weights, architecture, bool(config.get("quick_gelu", "vision_cfg" not in config)))
    return load_foreign(_all_tensors(weights), config, str(path), folder)


def _ours(folder: Path, architecture: str | None) -> Checkpoint:
    if architecture:
        warnings.warn(f"--architecture {architecture}: is not used, {folder} says its own", stacklevel=5)
    return load_folder(folder)


def _is_ours(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and (folder / "config.json").is_file()


def _config_of(folder: Path) -> dict[str, Any]:
    for name in CONFIGS:
        if (folder / name).is_file():
            return read_json(folder / name)
    return {}


def _weights_of(folder: Path) -> Path:
    """The one weights file of a folder; several that are not shards of one are refused."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    if (index := folder / "model.safetensors.index.json").is_file():
        return index
    found = sorted(folder.glob("*.safetensors")) or sorted(p for p in folder.iterdir() if p.suffix in UNSAFE)
    if len(found) != 1:
        raise CheckpointError(f"{folder}: holds {len(found) or 'no'} weights files, expected one (model.safetensors)")
    return found[0]


def _all_tensors(path: Path) -> Tensors:
    if path.name.endswith(".index.json"):
        return read_shards(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: not a .safetensors file; multimodal convert reads others")
    return read_tensors(path)


def _unknown(name: str) -> str:
    from multimodal.models.presets import PRESETS

    if name in PRESETS:
        return f"model {name!r}: is a size without weights, which multimodal info describes; give a folder or a file"
    sizes = difflib.get_close_matches(name, PRESETS, n=2)
    if sizes and not difflib.get_close_matches(name, shipped(), n=1, cutoff=0.4):
        return f"model {name[:80]!r}: neither a path nor a shipped model (near sizes: {', '.join(sizes)})"
    near = difflib.get_close_matches(name, shipped(), n=3, cutoff=0.4) or sorted(shipped()) or ["none is installed"]
    return f"model {name[:80]!r}: neither a path nor a shipped model (near: {', '.join(near)})"


def _exists(path: Path) -> bool:
    """False too for a name that no file system takes: too long, or with a NUL."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
