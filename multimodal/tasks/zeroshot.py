"""Zero-shot image classification (Radford et al. 2021, section 3.1)."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.models.clip import CLIP
from multimodal.tasks.pictures import name_of, pixels_of
from multimodal.tasks.texts import text_features
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

DEFAULT_MODEL = "clip-vit-16"
TEMPLATES = {"clip80": "OPENAI_IMAGENET_TEMPLATES", "clip7": "SIMPLE_IMAGENET_TEMPLATES"}


def classify(
    images: Any, labels: Sequence[str], model: str | Path | Checkpoint = DEFAULT_MODEL,
    top: int | None = None, templates: Sequence[str] | str | None = None, batch_size: int = 32,
) -> list[dict[str, Any]]:  # fmt: skip
    """Scores of each label for each picture, best first.

    `images`: one or several of path, bytes or PIL image. `templates`: prompts with `{}`, or `clip80`, `clip7`,
    `none`; by default those that the model was made with, else `clip7`. `top`: how many labels to return.
    Returns `[{"file", "scores": [{"label", "score"}]}]`. Scores are a softmax over the labels (CLIP), or a
    probability for each label by itself (a model trained with the sigmoid loss).
    Raises ImageError, TextError, UsageError, CheckpointError."""
    several = list(images) if isinstance(images, list | tuple) else [images]
    classifier = ZeroShotClassifier(load(model) if not isinstance(model, Checkpoint) else model, labels, templates)
    results = []
    for start in range(0, len(several), batch_size):
        batch = several[start : start + batch_size]
        results += classifier.results(batch, top)
    return results


class ZeroShotClassifier:
    """A CLIP and its label vectors, which are computed once."""

    def __init__(self, checkpoint: Checkpoint, labels: Sequence[str], templates: Sequence[str] | str | None = None):
        model = checkpoint.model
        if not isinstance(model, CLIP):
            raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, classification needs a clip")
        if checkpoint.tokenizer is None or checkpoint.preprocessing is None:
            what = "tokenizer" if checkpoint.tokenizer is None else "preprocessing"
            raise CheckpointError(f"model {checkpoint.source}: its {what} is not known, and is not guessed")
        self.model, self.tokenizer, self.preprocessing = model, checkpoint.tokenizer, checkpoint.preprocessing
        self.labels = checked_labels(labels)
        if templates is None:
            templates = checkpoint.card.get("templates", "clip7")
        self.prompts = prompt_functions(templates)
        self.weights = self._label_vectors()

    @torch.inference_mode()
    def _label_vectors(self) -> Float[Tensor, "C D"]:
        """Normalise, mean over templates, normalise, as CLIP_benchmark does."""
        prompts = [prompt(label) for label in self.labels for prompt in self.prompts]
        vectors = text_features(self.model, self.tokenizer, prompts)
        means = vectors.unflatten(0, (len(self.labels), len(self.prompts))).mean(1)
        return F.normalize(means, dim=-1)

    @torch.inference_mode()
    def probabilities(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B C"]:
        """A row a picture, in the order of the labels."""
        logits = self.model.logits(self.model.encode_image(images), self.weights)
        return logits.sigmoid() if self.model.config.loss == "sigmoid" else logits.softmax(-1)

    def results(self, images: Sequence[Any], top: int | None = None) -> list[dict[str, Any]]:
        """As `classify` returns them."""
        rows = self.probabilities(pixels_of(images, self.preprocessing))
        return [
            {"file": name_of(image), "scores": self.ranked(row, top)} for image, row in zip(images, rows, strict=True)
        ]

    def ranked(self, row: Float[Tensor, "C"], top: int | None) -> list[dict[str, Any]]:
        order = row.argsort(descending=True, stable=True)[:top].tolist()
        return [{"label": self.labels[i], "score": row[i].item()} for i in order]


def checked_labels(labels: Sequence[str]) -> list[str]:
    """Labels without outer spaces. Raises TextError for none, an empty or a repeated one."""
    if isinstance(labels, str):
        raise TextError(f"labels: expected a list of texts, not one text ({labels!r})")
    clean = [label.strip() for label in labels]
    if not clean:
        raise TextError("labels: there are none")
    seen: set[str] = set()
    for number, label in enumerate(clean, 1):
        if not label:
            raise TextError(f"labels: number {number} of {len(clean)} is empty")
        if label in seen:
            raise TextError(f"labels: {label!r} is there twice")
        seen.add(label)
    return clean


def prompt_functions(templates: Sequence[str] | str) -> list[Callable[[str], str]]:
    """Functions from a label to a prompt. Raises UsageError for an unknown set or a template without {}."""
    if isinstance(templates, str):
        if templates == "none":
            return [lambda label: label]
        if templates not in TEMPLATES:
            raise UsageError(f"--templates {templates}: unknown (one of none, {', '.join(TEMPLATES)}, or a file)")
        return list(getattr(_open_clip_templates(), TEMPLATES[templates]))
    for template in templates:
        if template.count("{}") != 1:
            raise UsageError(f"template {template!r}: needs {{}} once, where the label goes")
    if not templates:
        raise UsageError("templates: there are none")
    return [lambda label, t=template: t.replace("{}", label) for template in templates]


def _open_clip_templates() -> Any:
    """OpenCLIP's module of prompts alone: importing the whole package takes seconds."""
    package = importlib.util.find_spec("open_clip")
    path = Path(package.origin).parent / "zero_shot_metadata.py"
    spec = importlib.util.spec_from_file_location("_open_clip_zero_shot_metadata", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
