"""Settings of a sentence-transformers folder: pooling, normalisation and the longest text."""

from pathlib import Path
from typing import Any

from multimodal.system.files import optional_json, read_json, read_json_value
from multimodal.system.records import checked

# names of its Pooling module (flags before version 5), and those of `embed`
POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
KNOWN = ("Transformer", "Pooling", "Normalize")


def sentence_card(folder: Path | None) -> dict[str, Any]:
    """`pooling` and `normalize` for the card; {} for other folders. Unsupported ones keep their foreign name, such as
    "max_tokens" or "mean, Dense", which `embed` refuses."""
    if folder is None or not (path := folder / "1_Pooling" / "config.json").exists():
        return {}
    record = read_json(path)
    modes = [name.removeprefix("pooling_mode_") for name, value in record.items()
             if name.startswith("pooling_mode_") and value is True]  # fmt: skip
    modes = [record["pooling_mode"]] if isinstance(record.get("pooling_mode"), str) else modes
    kinds = [str(value).rsplit(".", 1)[-1] for value in _modules(folder)]
    steps = [*(POOLINGS.get(mode, mode) for mode in modes), *(kind for kind in kinds if kind not in KNOWN)]
    return {"pooling": ", ".join(steps), "normalize": "Normalize" in kinds}


def sentence_length(folder: Path, context: int) -> int:
    """Longest text in tokens, at most `context`."""
    length = optional_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return min(context, length) if type(length) is int and length > 2 else context


def _modules(folder: Path) -> list[str]:
    path = folder / "modules.json"
    if not path.exists():
        return []
    modules = checked(list[dict[str, Any]], read_json_value(path), str(path))
    return [checked(str, module.get("type"), f"{path}: type") for module in modules]
