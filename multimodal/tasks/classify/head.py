"""Classification by the head of a ViT, as `recipes/vision/train_vit.py` and `finetune.py --task classify` train it."""

from collections import Counter

from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.vit import ViT
from multimodal.tasks.classify.options import ClassifyOptions
from multimodal.tasks.classify.ranking import ImageClassifier, Pixels
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint


class HeadClassifier(ImageClassifier):
    """ViT with a head, whose labels are the names of its classes. Scores are softmax, or sigmoid where the card's
    `scores` says so, of a model that finds several labels in an image.

    Raises UsageError, CheckpointError."""

    templates, calibration = "none", None

    def __init__(self, checkpoint: Checkpoint, threshold: float | None = None, scores: str | None = None):
        self.checkpoint, self.model = checkpoint, checkpoint.model
        self.preprocessing, self.labels = known_preprocessing(checkpoint), head_labels(checkpoint)
        ClassifyOptions.checked({"threshold": threshold, "scores": scores})
        self.scores = head_scores(checkpoint)
        if scores not in (None, self.scores):
            raise UsageError(f"{scores}: a ViT's head has {self.scores} scores", argument="scores")
        self.check_threshold(threshold, self.scores)
        self.threshold = threshold

    def using(self, threshold: float | None = None, scores: str | None = None) -> "HeadClassifier":
        """A copy with changed settings. Raises UsageError."""
        return HeadClassifier(self.checkpoint, self.threshold if threshold is None else threshold, scores)

    @inference_mode()
    def logits(self, images: Pixels) -> Float[Tensor, "B C"]:
        if not isinstance(images, Tensor):
            raise UsageError("native: is for a CLIP, and the model is a ViT with a head", argument="native")
        return self.model(images.to(self.device, non_blocking=True))

    def scored(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        return logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)


def head_scores(checkpoint: Checkpoint) -> str:
    """Raises CheckpointError."""
    scores = checkpoint.card.get("scores", "softmax")
    if scores not in ("softmax", "sigmoid"):
        raise CheckpointError(
            f"model {checkpoint.source}: its card's scores are neither softmax nor sigmoid ({scores!r})"
        )
    return scores


def has_head(checkpoint: Checkpoint) -> bool:
    return isinstance(checkpoint.model, ViT) and checkpoint.model.head is not None


def own_labels(checkpoint: Checkpoint, argument: str) -> UsageError:
    """The error of an argument that is for a CLIP."""
    classes = checkpoint.model.config.classes
    return UsageError(
        f"is for a CLIP, and {checkpoint.source} is a ViT with a head for its own {classes} labels", argument=argument
    )


def head_labels(checkpoint: Checkpoint) -> list[str]:
    """Names of the classes; a name that several have is followed by the id. Raises CheckpointError."""
    ids = list(map(str, checkpoint.card.get("labels") or ()))
    names = list(map(str, checkpoint.card.get("names") or ids))
    classes = checkpoint.model.config.classes
    if not ids:
        raise CheckpointError(
            f"model {checkpoint.source}: its card does not name the {classes} classes of its head (config.json of "
            f"transformers: id2label, from 0 to {classes - 1})"
        )
    if len({*ids}) != classes or len(names) != classes:
        raise CheckpointError(
            f"model {checkpoint.source}: its card names {len({*ids})} classes, and its head has {classes}"
        )
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({own})" for name, own in zip(names, ids, strict=True)]
