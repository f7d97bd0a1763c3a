"""Settings of a sentence-transformers folder: pooling, projections, normalization, prompts and the longest text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import Projection, TextTransformer
from multimodal.models.text_config import ProjectionConfig
from multimodal.system.files import inside, optional_json, read_json, read_json_value
from multimodal.system.records import checked
from multimodal.tokens.text.tokenizer import RECORD
from multimodal.weights.files.archives import read_pickled
from multimodal.weights.files.formats import find_weights, is_pickled
from multimodal.weights.files.tensor_files import read_tensors
from multimodal.weights.table import Tensors, check_finite

# names of its Pooling module (flags before version 5), and those of `embed`
POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last",
            "max": "max", "max_tokens": "max"}  # fmt: skip
PACKAGE, MODULES, PROMPTS = "sentence_transformers.", "modules.json", "config_sentence_transformers.json"
POOLING = "1_Pooling"  # in a folder that does not list its modules
# settings of its Transformer module; the first file that says anything counts
SETTINGS = tuple(f"sentence_{kind}_config.json" for kind in
                 ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"))  # fmt: skip
ENCODERS = ("t5", "mt5", "umt5")  # `model_type` of those whose decoder it does not read
# classes of torch.nn that a Dense module names, read as names alone
FUNCTIONS = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}


def sentence_card(folder: Path | None, model: nn.Module) -> dict[str, Any]:
    """`pooling`, `normalize`, `prompts`, `prompt` and `similarity` for the card; {} for other folders. Unsupported
    steps keep their foreign names, such as "weightedmean", "cls, mean" or "LSTM", which `embed` refuses, as it does
    BART's, where the decoder's states are pooled. Raises CheckpointError for a prompt that is left out of the mean, and
    for a default prompt that the folder does not hold."""
    modules = sentence_modules(folder) if folder is not None else []
    kinds = [kind for kind, _ in modules if kind != "Dropout"]  # of training alone
    if kinds in ([], ["Transformer"], ["Transformer", "LogitScore"]):  # the last reads a language model's logits
        return {}
    record = optional_json(folder / PROMPTS)
    prompts = _prompts(folder, record)
    expected = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense"), "Normalize"]
    if kinds in (expected, expected[:-1]):
        steps = _poolings(_config(folder, modules[1][1]), any(prompts.get("prompts", {}).values()))
    else:
        steps = [kind for kind in kinds if kind not in expected] or kinds
    if isinstance(model, EncoderDecoder):
        steps = [*steps, "of the decoder"]
    if (size := record.get("truncate_dim")) is not None:
        steps = [*steps, f"truncate_dim {size!r:.20}"]
    return {"pooling": ", ".join(steps), "normalize": "Normalize" in kinds} | prompts | _similarity(record)


def encoder_alone(tensors: Tensors, config: dict[str, Any], folder: Path | None) -> Tensors:
    """Tensors without the decoder that sentence-transformers does not read."""
    if config.get("model_type") not in ENCODERS or folder is None or len(sentence_modules(folder)) < 2:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(("decoder.", "lm_head."))}


def _similarity(record: dict[str, Any]) -> dict[str, str]:
    """Name of the comparison of vectors, which exports keep; {} for the cosine."""
    name = record.get("similarity_fn_name")
    return {"similarity": name} if isinstance(name, str) and name != "cosine" else {}


def _poolings(path: Path, prompts: bool) -> list[str]:
    record = read_json(path)
    if prompts and record.get("include_prompt", True) is not True:
        raise CheckpointError(f"{path}: include_prompt {record['include_prompt']!r:.40} with prompts is not supported")
    flags = [name.removeprefix("pooling_mode_") for name, value in record.items()
             if name.startswith("pooling_mode_") and value is True]  # fmt: skip
    modes = record.get("pooling_mode", flags or "mean")
    modes = [modes] if isinstance(modes, str) else checked(list[str], modes, f"{path}: pooling_mode")
    return [POOLINGS.get(mode, mode) for mode in modes]


def _prompts(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    where = f"{folder / PROMPTS}: prompts"
    prompts = checked(dict[str, str | None], record.get("prompts") or {}, where)
    default = record.get("default_prompt_name")
    if not prompts and default is None:
        return {}
    if default is not None and default not in prompts:
        held = ", ".join(prompts)[:80] or "none"
        raise CheckpointError(f"{where}: expected default_prompt_name among them ({held}), got {default!r:.40}")
    prompts = {name: text or "" for name, text in prompts.items()}
    return {"prompts": prompts} | ({} if default is None else {"prompt": default})


def sentence_length(folder: Path, context: int) -> int:
    """Longest text in tokens, at most `context`: that of the Transformer module, else of the tokenizer."""
    length = _settings(folder).get("max_seq_length")
    length = optional_json(folder / RECORD).get("model_max_length") if length is None else length
    return min(context, length) if type(length) is int and length > 2 else context


def lowers(folder: Path) -> bool:
    """Return True if texts get lower case before the tokenizer's own normalization."""
    return bool(_settings(folder).get("do_lower_case"))


def _settings(folder: Path) -> dict[str, Any]:
    return next(filter(None, (optional_json(folder / name) for name in SETTINGS)), {})


def projected(model: nn.Module, folder: Path | None, pickled: bool = False) -> nn.Module:
    """The model with the folder's Dense modules, if it has any. `pickled`: read pickled ones too. Raises
    CheckpointError for an unusable one."""
    places = [place for kind, place in sentence_modules(folder) if kind == "Dense"] if folder is not None else []
    if not places:
        return model
    if not isinstance(model, TextTransformer):
        raise CheckpointError(f"{folder / MODULES}: expected a text encoder before Dense, got {type(model).__name__}")
    configs: list[ProjectionConfig] = []
    maps: list[Tensors] = []
    for place in places:
        path = _config(folder, place)
        record, width = read_json(path), configs[-1].width if configs else model.config.width
        name = str(record.get("activation_function")).rsplit(".", 1)[-1]
        if name not in FUNCTIONS or record.get("in_features") != width:
            raise CheckpointError(
                f"{path}: activation_function {name!r}, in_features {record.get('in_features')!r}: expected one of "
                f"{', '.join(FUNCTIONS)} and {width}"
            )
        if record.get("use_residual"):
            raise CheckpointError(f"{path}: use_residual {record['use_residual']!r:.40} is not supported")
        out = checked(int, record.get("out_features"), f"{path}: out_features")
        configs.append(ProjectionConfig(out, FUNCTIONS[name], bool(record.get("bias", True))))
        maps.append(_map(find_weights(path.parent), configs[-1], width, pickled))
    project = Projection(model.config.width, tuple(configs))
    project.load_state_dict({f"maps.{i}.{name}": t for i, own in enumerate(maps) for name, t in own.items()})
    model.config, model.project = replace(model.config, projections=tuple(configs)), project
    return model.eval()


def _map(path: Path, config: ProjectionConfig, width: int, pickled: bool) -> Tensors:
    if is_pickled(path) and not pickled:
        folder = path.parent.parent
        raise CheckpointError(f"{path}: pickled weights; run multimodal convert {folder} FOLDER, and load FOLDER")
    shapes = {"weight": [config.width, width]} | ({"bias": [config.width]} if config.bias else {})
    found = read_pickled(path)[0] if is_pickled(path) else read_tensors(path)
    tensors = {name.removeprefix("linear."): tensor for name, tensor in found.items()}
    if (sizes := {name: list(tensor.shape) for name, tensor in tensors.items()}) != shapes:
        raise CheckpointError(f"{path}: expected linear maps of shapes {shapes}, got {str(sizes)[:120]}")
    check_finite(tensors, str(path))
    return {name: tensor.float() for name, tensor in tensors.items()}


def _config(folder: Path, place: str) -> Path:
    return inside(folder, place, f"{folder / MODULES}: path") / "config.json"


def sentence_modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order. A class of the repository itself keeps its full name."""
    path = folder / MODULES
    if not path.exists():
        pooled = (folder / POOLING / "config.json").exists()
        return [("Transformer", ""), ("Pooling", POOLING)] if pooled else []
    modules = checked(list[dict[str, Any]], read_json_value(path), str(path))
    kinds = [checked(str, one.get("type"), f"{path}: type") for one in modules]
    kinds = [kind.rsplit(".", 1)[-1] if kind.startswith(PACKAGE) else kind for kind in kinds]
    return [(kind, checked(str, one.get("path"), f"{path}: path")) for kind, one in zip(kinds, modules, strict=True)]
