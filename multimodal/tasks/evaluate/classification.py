"""Classifiers of images, texts and tables: accuracy, scores by class, regression errors."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.data.batching import map_tensors
from multimodal.data.datasets.class_names import class_labels, evenly
from multimodal.data.datasets.labelled_texts import ClassBatch, CollateClassed, LabelledTexts, read_labelled
from multimodal.data.datasets.tables import Columns, Table, TableData, encode, part, read_table
from multimodal.data.loader import BROKEN, broken_item
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import ListColumns, Source, open_source
from multimodal.errors import CheckpointError, DataError, UsageError, few
from multimodal.inference.modules import inference_mode
from multimodal.inference.options import BatchOptions
from multimodal.models.tabular import FTTransformer
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.tasks.evaluate.class_scores import ClassScores, class_scores
from multimodal.tasks.evaluate.scores import top_shares
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess
from multimodal.tokens.image.reading import read_image
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.weights.encode import evaluating
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)


class ImageAccuracy:
    """Call with a model for its top-1 and top-5 accuracy on a source of labelled images.

    `count`: at most this many images, evenly spread. Broken images are logged and skipped. `examples`: label and
    prediction of a few images of the last call. Raises DataError for a source with classes outside `labels`."""

    def __init__(
        self, source: Source, labels: Sequence[str], record: Preprocessing, where: object, count: int | None = None,
        batch_size: int = 100,
    ):  # fmt: skip
        unknown = sorted(set(class_labels(source, where, 1)) - set(labels))
        if unknown:
            raise DataError(f"{where}: class {unknown[0]!r} is not among the model's {len(labels)} classes")
        self.source, self.record, self.batch_size = source, record, batch_size
        self.index = {label: i for i, label in enumerate(labels)}
        self.keys = evenly(range(len(source)), count)
        self.examples: list[str] = []
        self.read_keys: list[int] = []
        self.broken: list[str] = []

    def read(self, keys: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Pixels and class index of each readable image."""
        for key in keys:
            try:
                sample = self.source.read(key)
                yield preprocess(read_image(sample.media), self.record), self.index[sample.label]
                self.read_keys.append(key)
            except BROKEN as error:
                self.broken.append(broken_item(self.source.name(key), error))
                log.warning("broken item skipped: %s", self.broken[-1])

    @inference_mode()
    def logits(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Logits [N C] and labels [N]. Raises DataError where no image can be read."""
        device, scores, labels = next(model.parameters()).device, [], []
        self.read_keys, self.broken = [], []
        for start in range(0, len(self.keys), self.batch_size):
            if part := list(self.read(self.keys[start : start + self.batch_size])):
                pixels, indices = zip(*part, strict=True)
                with evaluating(model):
                    scores.append(model(torch.stack(pixels).to(device)).float().cpu())
                labels += indices
        if not labels:
            raise DataError(f"{self.source.name(0)}: no image can be read, so there is no accuracy")
        return torch.cat(scores), torch.tensor(labels)

    def __call__(self, model: nn.Module, step: int = 0) -> dict[str, float]:
        scores, labels = self.logits(model)
        names, pairs = list(self.index), list(zip(labels.tolist(), scores.argmax(1).tolist(), strict=True))
        self.examples = [f"{names[label]} | {names[guess]}" for label, guess in evenly(pairs, 10)]
        return top_shares(scores, labels)


def class_logits(model: TextTransformer, batch: ClassBatch) -> Float[Tensor, "B C"]:
    pooled = model.pooled(model.states(batch.ids, valid=batch.valid), batch.valid)
    return model.classes(F.dropout(pooled, model.config.stem_dropout, model.training)).float()


@inference_mode()
def class_figures(model: TextTransformer, batches: Sequence[ClassBatch]) -> dict[str, float]:
    """Accuracy, and mean cross-entropy in nats."""
    right, loss, count = 0, 0.0, sum(len(batch.labels) for batch in batches)
    for batch in batches:
        logits = _logits(model, batch)
        right += int((logits.argmax(-1) == batch.labels).sum())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return {"accuracy": right / count, "loss": loss / count}


def _logits(model: TextTransformer, batch: ClassBatch) -> Float[Tensor, "B C"]:
    with evaluating(model):
        return class_logits(model, map_tensors(batch, lambda tensor: tensor.to(model.device))).cpu()


@inference_mode()
def text_logits(
    model: TextTransformer, source: LabelledTexts, collate: CollateClassed, batch_size: int = 32
) -> Float[Tensor, "N C"]:
    """Logits of each text in the order of the source; batches hold texts of similar length."""
    order = sorted(range(len(source)), key=lambda key: len(source.read(key).ids))
    parts = [
        _logits(model, collate([source.read(key) for key in keys]))
        for keys in (order[i : i + batch_size] for i in range(0, len(order), batch_size))
    ]
    return torch.cat(parts)[torch.tensor(order).argsort()]


@inference_mode()
def outputs(model: FTTransformer, rows: TableData, batch_size: int = 1024) -> Float[Tensor, "N O"]:
    """Predicted numbers [N 1], or class probabilities [N C]."""
    device = model.class_token.device
    parts = zip(rows.numbers.split(batch_size), rows.categories.split(batch_size), strict=True)
    with evaluating(model):
        predicted = torch.cat([model(numbers.to(device), ids.to(device)).cpu() for numbers, ids in parts])
    return predicted.softmax(-1) if model.config.outputs > 1 else predicted


def table_figures(predicted: Float[Tensor, "N O"], rows: TableData) -> dict[str, float]:
    """RMSE and mean absolute error in the target's unit; for classes accuracy, and the area under the ROC curve where
    they are two."""
    if rows.targets.is_floating_point():
        errors = predicted[:, 0].double() - rows.targets
        return {"rmse": float(errors.square().mean().sqrt()), "mae": float(errors.abs().mean())}
    figures = {"accuracy": float((predicted.argmax(-1) == rows.targets).double().mean())}
    if predicted.shape[1] == 2 and 0 < rows.targets.sum() < len(rows.targets):
        from sklearn.metrics import roc_auc_score

        figures["auc"] = float(roc_auc_score(rows.targets.numpy(), predicted[:, 1].numpy()))
    return figures


def predictions(checkpoint: Checkpoint, table: Table) -> list[float] | list[dict[str, float]]:
    """The number, or the probability of each label, predicted for each row. Raises CheckpointError for a model that is
    not of tables, DataError for a table that does not fit."""
    if not isinstance(checkpoint.model, FTTransformer):
        raise CheckpointError(f"{checkpoint.source}: expected a tabular model, got {checkpoint.kind}")
    columns = Columns.from_card(checkpoint.card, checkpoint.source)
    predicted = outputs(checkpoint.model, encode(table, columns, "the table")).tolist()
    if not columns.labels:
        return [row[0] for row in predicted]
    return [dict(zip(columns.labels, row, strict=True)) for row in predicted]


class ImageItems(NamedTuple):
    """Evaluated images by number: `source.read(keys[number])`."""

    source: Source
    keys: Sequence[int]


class ClassifierEvaluation(NamedTuple):
    """Scores by class with their items, or the figures of a tabular model. `broken`: items left out, each with its
    cause."""

    scores: ClassScores | dict[str, float]
    items: ImageItems | Sequence[str] = ()
    broken: Sequence[str] = ()


def evaluate_classifier(
    checkpoint: Checkpoint, data: str, limit: int | None = None, columns: Sequence[str] | None = None,
    batch_size: int = BatchOptions.batch_size.default, trust: Trust = OWN_FOLDER,
) -> ClassifierEvaluation:  # fmt: skip
    """Evaluate a ViT with a head (labelled images), a text classifier (labelled texts) or a tabular model (CSV).

    `columns`: names of path or text and of label in a list; of all columns of a CSV without a header. `limit`: at most
    this many items, evenly spread. Raises CheckpointError where the card lacks the labels, UsageError for a model
    without classes or with several labels an item, DataError for data that does not fit."""
    model = checkpoint.model
    if isinstance(model, FTTransformer):
        table = Columns.from_card(checkpoint.card, checkpoint.source)
        rows = read_table(Path(data), columns or (), table.target)
        rows = part(rows, evenly(range(len(next(iter(rows.values())))), limit))
        encoded = encode(rows, table, data)
        return ClassifierEvaluation(table_figures(outputs(model, encoded), encoded))
    image = isinstance(model, ViT) and model.head is not None
    if not image and not (isinstance(model, TextTransformer) and model.config.classes):
        kinds = "a ViT with a head, a text classifier or a tabular model"
        raise UsageError(f"model {checkpoint.source}: expected {kinds}, got {checkpoint.kind}")
    if columns and len(columns) != 2:
        raise UsageError(f"must be {'path' if image else 'text'} and label (got {few(columns)})", argument="columns")
    labels = checkpoint.card.get("labels")
    if not labels or (checkpoint.preprocessing if image else checkpoint.tokenizer) is None:
        missing = "labels" if not labels else "preprocessing" if image else "tokenizer"
        raise CheckpointError(f"model {checkpoint.source}: checkpoint has no {missing}")
    if checkpoint.card.get("scores") == "sigmoid":
        raise UsageError(f"model {checkpoint.source}: expected a classifier of one label an item, got one of several")
    if image:
        path, label = columns or (None, None)
        source = open_source(data, columns=ListColumns(path, None, label), trust=trust)
        accuracy = ImageAccuracy(source, labels, checkpoint.preprocessing, data, limit, batch_size)
        logits, targets = accuracy.logits(model)
        scores = class_scores(list(labels), targets, logits)
        return ClassifierEvaluation(scores, ImageItems(source, accuracy.read_keys), accuracy.broken)
    texts = list(evenly(read_labelled(Path(data), columns), limit))
    context = checkpoint.tokenizer.length_in(model.config.context)
    source = LabelledTexts(texts, checkpoint.tokenizer, labels, context, data)
    if source.cut:
        message = f"{data}: {source.cut} of {len(texts)} texts are cut to {context} tokens"
        warnings.warn(TextCut(message), stacklevel=2)
    logits = text_logits(model, source, CollateClassed(checkpoint.tokenizer.pad_id, context), batch_size)
    targets = torch.tensor([source.read(key).label for key in range(len(source))])
    return ClassifierEvaluation(
        class_scores(list(labels), targets, logits, items="texts"), [text for text, *_ in texts]
    )
