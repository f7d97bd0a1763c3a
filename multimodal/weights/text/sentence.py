"""Settings of a sentence-transformers folder: pooling, projections, normalisation, prompts and the longest text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.errors import CheckpointError
from multimodal.models.text import Projection, TextTransformer
from multimodal.models.text_config import ProjectionConfig
from multimodal.system.files import inside, optional_json, read_json, read_json_value
from multimodal.system.records import checked
from multimodal.weights.files.tensor_files import read_tensors
from multimodal.weights.table import Tensors, check_finite

# names of its Pooling module (flags before version 5), and those of `embed`
POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last",
            "max": "max", "max_tokens": "max"}  # fmt: skip
KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
# classes of torch.nn that a Dense module names, read as names alone
FUNCTIONS = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}


def sentence_card(folder: Path | None) -> dict[str, Any]:
    """`pooling`, `normalize`, `prompts` and `prompt` for the card; {} for other folders. Unsupported ones keep their
    foreign name, such as "weightedmean_tokens" or "mean, LSTM", which `embed` refuses. Raises CheckpointError for a
    prompt that is left out of the mean."""
    if folder is None or not (path := folder / "1_Pooling" / "config.json").exists():
        return {}
    record = read_json(path)
    if record.get("include_prompt", True) is not True:
        raise CheckpointError(f"{path}: include_prompt {record['include_prompt']!r:.40} is not supported")
    modes = [name.removeprefix("pooling_mode_") for name, value in record.items()
             if name.startswith("pooling_mode_") and value is True]  # fmt: skip
    modes = [record["pooling_mode"]] if isinstance(record.get("pooling_mode"), str) else modes
    kinds = [kind for kind, _ in _modules(folder)]
    steps = [*(POOLINGS.get(mode, mode) for mode in modes), *(kind for kind in kinds if kind not in KNOWN)]
    known = [kind for kind in kinds if kind in KNOWN]
    if known != sorted(known, key=KNOWN.index):  # such as a Dense after Normalize
        steps += known
    return {"pooling": ", ".join(steps), "normalize": "Normalize" in kinds} | _prompts(folder)


def _prompts(folder: Path) -> dict[str, Any]:
    path = folder / "config_sentence_transformers.json"
    record = optional_json(path)
    prompts = checked(dict[str, str | None], record.get("prompts") or {}, f"{path}: prompts")
    prompts = {name: text for name, text in prompts.items() if text}
    default = record.get("default_prompt_name")
    if not prompts:
        return {}
    return {"prompts": prompts} | ({"prompt": default} if default in prompts else {})


def sentence_length(folder: Path, context: int) -> int:
    """Longest text in tokens, at most `context`."""
    length = optional_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return min(context, length) if type(length) is int and length > 2 else context


def projected(model: nn.Module, folder: Path | None) -> nn.Module:
    """The model with the folder's Dense modules, if it has any. Raises CheckpointError for an unusable one."""
    places = [place for kind, place in _modules(folder) if kind == "Dense"] if folder is not None else []
    if not places or not isinstance(model, TextTransformer):
        return model
    configs: list[ProjectionConfig] = []
    maps: list[Tensors] = []
    for place in places:
        path = inside(folder, place, f"{folder / 'modules.json'}: path") / "config.json"
        record, width = read_json(path), configs[-1].width if configs else model.config.width
        name = str(record.get("activation_function")).rsplit(".", 1)[-1]
        if name not in FUNCTIONS or record.get("in_features") != width:
            raise CheckpointError(
                f"{path}: activation_function {name!r}, in_features {record.get('in_features')!r}: expected one of "
                f"{', '.join(FUNCTIONS)} and {width}"
            )
        out = checked(int, record.get("out_features"), f"{path}: out_features")
        configs.append(ProjectionConfig(out, FUNCTIONS[name], bool(record.get("bias", True))))
        maps.append(_map(path.with_name("model.safetensors"), configs[-1], width))
    project = Projection(model.config.width, tuple(configs))
    project.load_state_dict({f"maps.{i}.{name}": t for i, own in enumerate(maps) for name, t in own.items()})
    model.config, model.project = replace(model.config, projections=tuple(configs)), project
    return model.eval()


def _map(path: Path, config: ProjectionConfig, width: int) -> Tensors:
    shapes = {"weight": [config.width, width]} | ({"bias": [config.width]} if config.bias else {})
    tensors = {name.removeprefix("linear."): tensor for name, tensor in read_tensors(path).items()}
    if (found := {name: list(tensor.shape) for name, tensor in tensors.items()}) != shapes:
        raise CheckpointError(f"{path}: expected linear maps of shapes {shapes}, got {str(found)[:120]}")
    check_finite(tensors, str(path))
    return {name: tensor.float() for name, tensor in tensors.items()}


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    modules = checked(list[dict[str, Any]], read_json_value(path), str(path))
    return [
        (checked(str, one.get("type"), f"{path}: type").rsplit(".", 1)[-1],
         checked(str, one.get("path", ""), f"{path}: path"))
        for one in modules
    ]  # fmt: skip
