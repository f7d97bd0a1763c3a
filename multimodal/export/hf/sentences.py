"""Files of sentence-transformers, from a checkpoint's card: modules, prompts and the longest text."""

from pathlib import Path

from multimodal.errors import UsageError
from multimodal.export.hf.files import longest_text, write_json
from multimodal.weights.folder import Checkpoint
from multimodal.weights.text.sentence import MODULES, PACKAGE, POOLING, PROMPTS, SETTINGS

FLAGS = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken", "max": "max_tokens"}


def check_sentences(checkpoint: Checkpoint) -> None:
    """Raise UsageError for vectors that the files below do not describe."""
    cause = ""
    if getattr(checkpoint.model.config, "projections", ()):
        cause = "Dense modules have"
    elif (pooling := checkpoint.card.get("pooling") or "mean") not in FLAGS:
        cause = f"pooling {pooling!r:.40} has"
    if cause:
        raise UsageError(f"model {checkpoint.source}: {cause} no place in a model of transformers; export the folder "
                         "of sentence-transformers that it came from")  # fmt: skip


def write_sentences(checkpoint: Checkpoint, folder: Path) -> None:
    card = checkpoint.card
    places = {"Transformer": "", "Pooling": POOLING} | ({"Normalize": "2_Normalize"} if card.get("normalize") else {})
    modules = [{"idx": i, "name": str(i), "path": place, "type": f"{PACKAGE}models.{kind}"}
               for i, (kind, place) in enumerate(places.items())]  # fmt: skip
    write_json(folder / MODULES, modules)
    flags = {f"pooling_mode_{flag}": own == card["pooling"] for own, flag in FLAGS.items()}
    (folder / POOLING).mkdir()
    write_json(folder / POOLING / "config.json", {"word_embedding_dimension": checkpoint.model.config.width} | flags)
    write_json(folder / SETTINGS[0], {"max_seq_length": longest_text(checkpoint), "do_lower_case": False})
    prompts = {"prompts": card.get("prompts") or {}, "default_prompt_name": card.get("prompt")}
    similarity = {"similarity_fn_name": card["similarity"]} if card.get("similarity") else {}
    write_json(folder / PROMPTS, prompts | similarity)
