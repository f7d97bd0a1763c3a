"""Training an FT-Transformer on a table, using it, and gradient boosting beside it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.datasets.tables import Columns, Rows, Table, encode
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.tabular import FTTransformer
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint


def fit_scales(model: FTTransformer, rows: Rows, regression: bool) -> None:
    """The quantiles of each column, and the mean and deviation of what is predicted, of training rows."""
    shares = torch.linspace(0, 1, model.config.quantiles, dtype=torch.float64)
    for own, column in zip(model.quantiles, rows.numbers.T, strict=True):
        own.copy_(torch.quantile(column[~column.isnan()].double(), shares))
    if regression:
        model.shift.copy_(rows.targets.mean())
        model.scale.copy_(rows.targets.std())


class TableBatch(NamedTuple):
    numbers: Float[Tensor, "B F"]
    categories: Int[Tensor, "B C"]
    targets: Tensor


class TableRows:
    """Training rows as the loader's source; items are ready as they are."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.numbers)

    def name(self, key: int) -> str:
        return f"row {key}"

    def read(self, key: int) -> TableBatch:
        return TableBatch(*(column[key] for column in self.rows))


def as_they_are(item: TableBatch, random: torch.Generator) -> TableBatch:
    return item


def collate(items: Sequence[TableBatch]) -> TableBatch:
    return TableBatch(*map(torch.stack, zip(*items, strict=True)))


class Tabular(Summed):
    """Squared error in units of the deviation where a number is predicted, else cross-entropy."""

    def forward(self, batch: TableBatch) -> dict[str, Tensor]:
        found = self.model(batch.numbers, batch.categories).float()
        if batch.targets.is_floating_point():
            return {"loss": ((found[:, 0] - batch.targets) / self.model.scale).square().sum()}
        return {"loss": F.cross_entropy(found, batch.targets, reduction="sum")}

    def counts(self, batch: TableBatch) -> dict[str, int]:
        return {"loss": len(batch.targets)}


@torch.inference_mode()
def outputs(model: FTTransformer, rows: Rows, batch: int = 1024) -> Float[Tensor, "N O"]:
    """Numbers, or the probabilities of the classes."""
    device = model.class_token.device
    parts = zip(rows.numbers.split(batch), rows.categories.split(batch), strict=True)
    found = torch.cat([model(numbers.to(device), ids.to(device)).float().cpu() for numbers, ids in parts])
    return found.softmax(-1) if model.config.outputs > 1 else found


def table_figures(found: Float[Tensor, "N O"], rows: Rows) -> dict[str, float]:
    """RMSE and mean absolute error in the target's unit; or accuracy and, of two classes, the area under the ROC
    curve."""
    if rows.targets.is_floating_point():
        errors = (found[:, 0] - rows.targets).double()
        return {"rmse": float(errors.square().mean().sqrt()), "mae": float(errors.abs().mean())}
    figures = {"accuracy": float((found.argmax(-1) == rows.targets).double().mean())}
    if found.shape[1] == 2 and 0 < rows.targets.sum() < len(rows.targets):
        from sklearn.metrics import roc_auc_score

        figures["auc"] = float(roc_auc_score(rows.targets.numpy(), found[:, 1].numpy()))
    return figures


def boosting(train: Rows, val: Rows, test: Rows, columns: Columns, seed: int, most: int = 1000) -> dict[str, float]:
    """Figures on `test` of scikit-learn's histogram gradient boosting (learning rate 0.05), with as many trees, of
    `most`, as are best on `val`; `trees` says how many."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    matrix = lambda rows: np.concatenate([rows.numbers.numpy(), rows.categories.numpy()], 1)
    known = [len(columns.numbers) + i for i in range(len(columns.categories))]
    kind = HistGradientBoostingClassifier if columns.labels else HistGradientBoostingRegressor
    trees = kind(learning_rate=0.05, max_iter=most, early_stopping=False, categorical_features=known, random_state=seed)
    trees.fit(matrix(train), train.targets.numpy())

    def staged(rows: Rows) -> list[Float[Tensor, "N O"]]:
        made = trees.staged_predict_proba(matrix(rows)) if columns.labels else trees.staged_predict(matrix(rows))
        return [torch.from_numpy(found.reshape(len(found), -1)).float() for found in made]

    scores = [better(table_figures(found, val)) for found in staged(val)]
    best = int(np.argmax(scores))
    return table_figures(staged(test)[best], test) | {"trees": best + 1}


def better(figures: Mapping[str, float]) -> float:
    """What is chosen by: the more, the better."""
    return -figures["rmse"] if "rmse" in figures else figures["accuracy"]


def predictions(checkpoint: Checkpoint, table: Table) -> list[float] | list[dict[str, float]]:
    """Of each row of a table the number, or the probability of each label. Raises CheckpointError for a checkpoint that
    is none of a table, DataError for a table that does not fit."""
    if not isinstance(checkpoint.model, FTTransformer):
        raise CheckpointError(f"{checkpoint.source}: is a {checkpoint.kind}, not of a table")
    columns = Columns.from_card(checkpoint.card, checkpoint.source)
    found = outputs(checkpoint.model, encode(table, columns, "the table")).tolist()
    if not columns.labels:
        return [row[0] for row in found]
    return [dict(zip(columns.labels, row, strict=True)) for row in found]


def check_width(width: int, heads: int) -> None:
    if width % heads:
        raise UsageError(f"--width {width}: is not divisible by --heads {heads}")
