"""Classification of images: zero-shot, or by the head of a ViT."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np
import torch

from multimodal.errors import MultimodalError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.files import shown
from multimodal.tasks.classify.classifier import ZeroShotClassifier, check_clip
from multimodal.tasks.classify.classifier_file import load_classifier
from multimodal.tasks.classify.head import HeadClassifier, has_head, own_labels
from multimodal.tasks.classify.options import ClassifyOptions
from multimodal.tasks.classify.ranking import ImageClassifier
from multimodal.tasks.encode.arguments import ClassifierArguments
from multimodal.tasks.encode.columns import Columns
from multimodal.tasks.encode.images import ImageBatch
from multimodal.tasks.encode.loaded import Model, OnError, device_of, loaded
from multimodal.tasks.encode.native import native_limit
from multimodal.tasks.encode.prompts import Templates
from multimodal.tasks.encode.reader import ImageReader, ImageTask
from multimodal.tasks.encode.videos import Clip
from multimodal.tokens.image.arrays import ImageInput, images_of
from multimodal.tokens.video.options import ClipOptions
from multimodal.weights.folder import Checkpoint

Scores = dict[str, Any]


class Classifier(ImageTask):
    """Image classifier: loads a CLIP and encodes the labels once (zero-shot), or loads a ViT with a head, whose classes
    are the labels.

    `templates`: prompts with `{}`, `clip80`, `clip7`, `none`, or a mapping of label to prompts (default: the model's
    own, else `clip7`). `classifier`: a file that `save_classifier` wrote, instead of labels and templates. `threshold`,
    `scores`: see `ZeroShotClassifier`. `top`: number of labels to return. `device`: `auto` is the GPU if there is one.
    `compute_type`: see `prepare_for_inference`. `workers`: threads that decode images (default: one per core). `urls`:
    allow http and https URLs. `every_s`, `max_frames`, `scenes`, `per_clip`: frames of videos, see `ClipOptions`.
    `native`: keep the aspect ratio of images, see `Embedder`. Labels are stripped of blanks at their ends.

    Raises UsageError, TextError, CheckpointError."""

    def __init__(
        self, model: Model | None = None, labels: Sequence[str] | None = None, *, templates: Templates | None = None,
        classifier: str | Path | None = None, threshold: float | None = None, scores: str | None = None,
        top: int | None = None, batch_size: int = 32, workers: int | None = None,
        device: str | torch.device | None = "auto", compute_type: str = "auto", urls: bool = False,
        every_s: float | None = None, max_frames: int | None = None, scenes: float | None = None,
        per_clip: bool = False, native: int | None = None,
    ):  # fmt: skip
        video = ClipOptions(every_s=every_s, max_frames=max_frames, scenes=scenes, per_clip=per_clip)
        ClassifyOptions.checked({"top": top})
        if isinstance(model, list | tuple | set):
            raise UsageError(f"model: expected a name or a path (got {shown(model)}; for labels: labels=[...])")
        checkpoint = loaded(model, "classify")
        made = classifier_of(
            checkpoint, labels, templates, classifier, device=device_of(device, checkpoint), compute_type=compute_type
        )
        self.scorer, self.top = made.using(threshold, scores), top
        if native is not None and has_head(checkpoint):
            raise own_labels(checkpoint, "native")
        record = self.scorer.preprocessing
        own = None if native is None else (self.scorer.model, native_limit(self.scorer.model, native, record))
        self.reader = ImageReader(record, batch_size, workers, urls, video, own)

    @property
    def labels(self) -> list[str]:
        return list(self.scorer.labels)

    @overload
    def __call__(self, images: Columns) -> dict[str, np.ndarray]: ...
    @overload
    def __call__(self, images: ImageInput | Sequence[ImageInput]) -> list[Scores]: ...
    def __call__(self, images: Any) -> Any:
        """Score the labels for one or several images, best first; of a video each sampled frame is an image.

        Returns `[{"file", "scores": [{"label", "score"}]}]`, with a threshold also `"answer"`: the best label, or None
        if its score is below. Scores are softmax over the labels, sigmoid per label (a model trained with the sigmoid
        loss), or calibrated. A frame's result has its `time` in seconds. Raises ImageError.

        A batch of columns (bytes, image or path) gives columns: label, score, error (see `encode/columns.py`); a video
        is one row."""
        if isinstance(images, Mapping) or hasattr(images, "iloc"):  # of columns; pandas' frames are refused there
            return self._columns(images, lambda one: one["scores"][0], {"label": "", "score": math.nan})
        return [result for _, result in self.many(images_of(images), on_error="raise")]  # type: ignore[misc]

    def _results(self, batch: ImageBatch, part: slice) -> list[Scores]:
        return self.scorer.batch_results(batch, part, self.top)

    def _whole(self, clip: Clip) -> Scores:
        return self.scorer.clip_result(clip, self.top)


def classify(
    images: ImageInput | Sequence[ImageInput], labels: Sequence[str] | None = None, model: Model | None = None,
    **options: Unpack[ClassifierArguments],
) -> list[Scores]:  # fmt: skip
    """Classify one or several images with a new `Classifier`, whose options it takes. Each call loads the model and
    encodes the labels."""
    return Classifier(model, labels, **options)(images)


def classify_many(
    items: Iterable[Any], labels: Sequence[str] | None = None, model: Model | None = None, *, keyed: bool = False,
    on_error: OnError = "return", **options: Unpack[ClassifierArguments],
) -> Iterator[tuple[Any, Scores | MultimodalError]]:  # fmt: skip
    """`Classifier.many` of a new `Classifier`."""
    return Classifier(model, labels, **options).many(items, keyed=keyed, on_error=on_error)


def classifier_of(
    checkpoint: Checkpoint, labels: Sequence[str] | None, templates: Templates | None = None,
    file: str | Path | None = None, *, device: str | torch.device | None = None, compute_type: str = "auto",
) -> ImageClassifier:  # fmt: skip
    """The classifier of a ViT's head, or of a CLIP with labels or a file of them, prepared for inference."""
    if has_head(checkpoint):
        for name, given in (("labels", labels), ("templates", templates), ("classifier", file)):
            if given is not None:
                raise own_labels(checkpoint, name)
        return HeadClassifier(prepare_for_inference(checkpoint, compute_type, device))
    if (labels is None) == (file is None):
        raise UsageError("expected either labels or a classifier")
    if file is not None and not isinstance(file, str | Path):
        raise UsageError(f"classifier must be a path (got {shown(file)})")
    if file is not None and templates is not None:
        raise UsageError("templates: not allowed with a classifier, which has its own")
    check_clip(checkpoint)
    if file is None:
        return ZeroShotClassifier(prepare_for_inference(checkpoint, compute_type, device), labels, templates)
    from multimodal.tasks.encode.features import model_digest

    digest = model_digest(checkpoint)
    return load_classifier(Path(file), prepare_for_inference(checkpoint, compute_type, device), digest)
