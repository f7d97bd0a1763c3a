"""CTranslate2 folders, by its own converter from a folder for transformers."""

import tempfile
import warnings
from pathlib import Path

from multimodal.errors import UsageError
from multimodal.export.hf.folder import Parts, write_folder
from multimodal.models.whisper import Whisper
from multimodal.weights.folder import Checkpoint

NEEDS = ("ctranslate2", "transformers")
# of `model_type`: what its converter reads, as far as we write it
TYPES = (
    "bart", "mbart", "marian", "m2m_100", "pegasus", "opt", "gpt2", "gpt_neox", "whisper", "t5", "mt5", "umt5", "bloom",
    "gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "phi3", "falcon", "distilbert", "bert",
    "xlm-roberta", "roberta", "camembert",
)  # fmt: skip
BESIDE = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json")


def check_type(checkpoint: Checkpoint, parts: Parts) -> None:
    """Raise UsageError for a model that CTranslate2 does not hold."""
    if (kind := parts[0].get("model_type")) not in TYPES:
        raise UsageError(f"model {checkpoint.source}: CTranslate2's converter does not read {kind!r}")


def write_ctranslate2(checkpoint: Checkpoint, parts: Parts, folder: Path, store: str) -> None:
    """Write `model.bin` and what belongs to it. Raises UsageError for a model that the converter refuses."""
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        write_folder(checkpoint, parts, Path(place))
        names = [name for name in BESIDE if (Path(place) / name).exists()]
        names = [name for name in names if isinstance(checkpoint.model, Whisper) or name != "generation_config.json"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers'
                TransformersConverter(place, copy_files=names).convert(str(folder), quantization=store, force=True)
        except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
            cause = " ".join(str(error).split())[:200]
            raise UsageError(f"model {checkpoint.source}: CTranslate2's converter refuses it ({cause})") from None
