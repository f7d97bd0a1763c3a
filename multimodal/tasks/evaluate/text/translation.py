"""BLEU and chrF of translations against references."""

from pathlib import Path
from typing import Any

from multimodal.data.manifests import read_text
from multimodal.errors import DataError
from multimodal.tasks.evaluate.scores import bleu, bleu_tokenizer, chrf
from multimodal.tasks.text.translate import translate
from multimodal.weights.folder import Checkpoint


def evaluate_translation(
    checkpoint: Checkpoint, source: Path, references: Path, from_language: str | None = None,
    to_language: str | None = None, limit: int | None = None, **search: Any,
) -> dict[str, Any]:  # fmt: skip
    """Corpus BLEU and chrF in percent (sacrebleu's defaults) of the translations of each line of `source` against that
    of `references`; both packed or not. `search`: options of `translate`. BLEU's tokenizer is that of `to_language`, or
    of the model's one direction. Raises DataError for files of different lengths or without text; UsageError,
    TextError and CheckpointError as `translate`."""
    texts, targets = (read_text(path).removesuffix("\n").split("\n") for path in (source, references))
    if len(texts) != len(targets):
        raise DataError(f"{references}: expected {len(texts)} lines as in {source} (got {len(targets)})")
    texts, targets = texts[:limit], targets[:limit]
    if not any(map(str.strip, texts)):
        raise DataError(f"{source}: no text to translate")
    hypotheses = translate(texts, checkpoint, from_language, to_language, **search)
    language = to_language or checkpoint.card.get("translation", {}).get("to")
    figures = {"bleu": bleu(targets, hypotheses, language), "bleu_tokenizer": bleu_tokenizer(language)}
    return figures | {"chrf": chrf(targets, hypotheses), "texts": len(texts)}
