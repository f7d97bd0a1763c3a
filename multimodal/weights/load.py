"""Load checkpoints: a shipped name, a folder, a .safetensors file, or a hub repository."""

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
from multimodal.weights.formats import FOREIGN, PICKLED, check_format, find_weights, is_pickled
from multimodal.weights.pytorch.archives import read_pickled
from multimodal.weights.table import Tensors
from multimodal.weights.tensor_files import read_shards, read_tensors

HUB = "hf-hub:"
OPEN_CLIP = "open_clip:"
MODULES = (
    *("vision.clip_openai", "vision.clip_hf", "vision.siglip", "vision.coca", "vision.blip", "vision.git"),
    *("vision.vit_timm", "speech.whisper", "speech.conformer_torchaudio", "text.t5", "text.bart", "text.m2m100"),
    *("text.marian", "text.bert_hf", "text.roberta", "text.albert", "text.distilbert", "text.electra"),
    *("text.gpt2", "text.llama"),
)
CONFIGS = ("open_clip_config.json", "config.json", "params.json")


def load(
    name_or_path: str | Path, architecture: str | None = None, preprocessing: str | Path | Preprocessing | None = None
) -> Checkpoint:
    """Load a model in eval mode with its tokenizer, preprocessing and card.

    `name_or_path`: a shipped name (`multimodal models` lists them), a folder of ours or in the layout of OpenCLIP, timm
    or Hugging Face, a `.safetensors` file, `hf-hub:owner/name`, or `open_clip:MODEL:TAG`. `architecture`: OpenCLIP or
    timm name of a bare weights file. `preprocessing`: of images, if the checkpoint states none: openai, imagenet,
    inception, siglip, a JSON file like a checkpoint folder's `preprocessing.json`, or a Preprocessing.
    Raises UsageError for an unknown name, CheckpointError for an unusable file."""
    with memory.naming(name_or_path):
        return with_preprocessing(open_checkpoint(name_or_path, architecture), preprocessing)


def open_checkpoint(
    name_or_path: str | Path, architecture: str | None = None, config: Path | None = None, pickled: bool = False
) -> Checkpoint:
    """`load` without `preprocessing`. `config`: a foreign configuration, in place of the one beside the weights.
    `pickled`: read pickled weights too, as `convert` does."""
    if not isinstance(name_or_path, str | Path):
        raise UsageError(f"model: expected a name or a path ({shown(name_or_path)})")
    text = str(name_or_path)
    if text.startswith(HUB):
        return _load_path(_snapshot(text.removeprefix(HUB), pickled), architecture, config, pickled)
    if text.startswith(OPEN_CLIP):
        record = _open_clip_record(text.removeprefix(OPEN_CLIP))
        made = _load_path(_snapshot(record["hf_hub"].rstrip("/"), pickled), architecture, config, pickled)
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
    raise UsageError(_unknown(text))


def families() -> dict[str, Family]:
    """All families of foreign checkpoints by name."""
    modules = [importlib.import_module(f"multimodal.weights.{name}") for name in MODULES]
    return {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Family)}


def recognise(tensors: Tensors, config: dict[str, Any], where: str) -> Family:
    """The one family with these tensor names. Raises CheckpointError if none or several match."""
    fits = [family for family in families().values() if family.recognises(tensors, config)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise CheckpointError(f"{where}: matches several formats ({', '.join(f.name for f in fits)})")
    some = ", ".join(sorted(tensors)[:3])
    kind = config.get("model_type") or config.get("architecture") or "no configuration file"
    raise CheckpointError(f"{where}: unknown format ({kind}; {len(tensors)} tensors such as {some})")


def load_foreign(tensors: Tensors, config: dict[str, Any], where: str, folder: Path | None = None) -> Checkpoint:
    return recognise(tensors, config, where).load(tensors, config, where, folder)


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


def _snapshot(repository: str, pickled: bool) -> Path:
    """The folder of a hub repository; with `pickled` its pickled weights where it has no safetensors."""
    folder = download(repository)
    if any(folder.glob("*.safetensors")):
        return folder
    if not pickled:
        raise CheckpointError(
            f"{HUB}{repository}: has no safetensors weights; read pickled ones with multimodal convert "
            f"{HUB}{repository} FOLDER"
        )
    return download(repository, "pytorch_model*.bin", "open_clip_pytorch_model.bin")


def download(repository: str, *weights: str) -> Path:
    """Snapshot of a hub repository: configurations, tokenizers, safetensors, and `weights` (patterns). Raises
    CheckpointError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.tiktoken", *weights]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{HUB}{repository}: download failed ({cause})") from None


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
    config = architecture_config(architecture) if architecture else read_json(config_file) if config_file else {}
    weights = find_weights(path) if path.is_dir() else path
    tensors, own = _read(weights, path, pickled)
    if architecture:
        check_activation(weights, architecture, bool(config.get("quick_gelu", "vision_cfg" not in config)))
    return load_foreign(tensors, config or own or _config_of(folder), str(path), folder)


def _read(weights: Path, source: Path, pickled: bool) -> tuple[Tensors, dict[str, Any]]:
    """Tensors, and the configuration that some pickled files contain."""
    if weights.suffix == ".safetensors":
        return read_tensors(weights), {}
    if weights.is_file():
        check_format(weights)
    if is_pickled(weights) and not pickled:
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


def _config_of(folder: Path) -> dict[str, Any]:
    for name in CONFIGS:
        if (folder / name).is_file():
            return read_json(folder / name)
    return {}


def _unknown(name: str) -> str:
    from multimodal.models.presets import PRESETS

    if name in PRESETS:
        return f"model {name!r}: a preset without weights (see multimodal info); give a folder or a file"
    sizes = difflib.get_close_matches(name, PRESETS, n=2)
    if sizes and not difflib.get_close_matches(name, shipped(), n=1, cutoff=0.4):
        return f"model {name[:80]!r}: neither a path nor a shipped model (similar presets: {', '.join(sizes)})"
    near = difflib.get_close_matches(name, shipped(), n=3, cutoff=0.4) or sorted(shipped()) or ["none is installed"]
    return f"model {name[:80]!r}: neither a path nor a shipped model (near: {', '.join(near)})"


def _exists(path: Path) -> bool:
    """Path.exists, but False for names that are too long or hold a NUL."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
