"""FT-Transformer training and prediction on tables, and a gradient boosting baseline."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.datasets.tables import Columns, TableData
from multimodal.models.tabular import FTTransformer
from multimodal.tasks.evaluate.classification import table_figures
from multimodal.train.objective import Summed

MOST_KINDS = 255  # categories of a column in scikit-learn's boosting


def fit_scales(model: FTTransformer, rows: TableData, regression: bool) -> None:
    """Set the quantiles of each column and the target's mean and deviation from training rows."""
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
    """Training rows as the loader's source."""

    def __init__(self, rows: TableData):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.numbers)

    def name(self, key: int) -> str:
        return f"row {key}"

    def read(self, key: int) -> TableBatch:
        return TableBatch(*(column[key] for column in self.rows))


class Tabular(Summed):
    """Squared error in units of the target's deviation for regression, cross-entropy for classification."""

    def forward(self, batch: TableBatch) -> dict[str, Tensor]:
        outputs = self.model(batch.numbers, batch.categories)
        if batch.targets.is_floating_point():
            return {"loss": ((outputs[:, 0] - batch.targets) / self.model.scale).float().square().sum()}
        return {"loss": F.cross_entropy(outputs.float(), batch.targets, reduction="sum")}

    def counts(self, batch: TableBatch) -> dict[str, int]:
        return {"loss": len(batch.targets)}


def boosting(
    train: TableData, val: TableData, test: TableData, columns: Columns, seed: int, most: int = 1000
) -> dict[str, float]:
    """Score scikit-learn's histogram gradient boosting (learning rate 0.05) on `test`, with the number of `trees`, up
    to `most`, that is best on `val`."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kinds = [len(known) + 1 for known in columns.categories.values()]
    ranks = [_ranks(ids, count) for ids, count in zip(train.categories.T, kinds, strict=True)]

    def matrix(rows: TableData) -> np.ndarray:
        """With categories by rank; the rare ones of a column share the last that scikit-learn allows."""
        ids = [rank[own].clamp(max=MOST_KINDS - 1) for rank, own in zip(ranks, rows.categories.T, strict=True)]
        return np.stack([*rows.numbers.T.numpy(), *(own.numpy() for own in ids)], 1)

    known = [len(columns.numbers) + i for i in range(len(columns.categories))]
    kind = HistGradientBoostingClassifier if columns.labels else HistGradientBoostingRegressor
    trees = kind(learning_rate=0.05, max_iter=most, early_stopping=False, categorical_features=known, random_state=seed)
    trees.fit(matrix(train), train.targets.numpy())

    def staged(rows: TableData) -> list[Float[Tensor, "N O"]]:
        made = trees.staged_predict_proba(matrix(rows)) if columns.labels else trees.staged_predict(matrix(rows))
        return [torch.from_numpy(outputs.reshape(len(outputs), -1)).double() for outputs in made]

    scores = [better(table_figures(outputs, val)) for outputs in staged(val)]
    best = int(np.argmax(scores))
    return table_figures(staged(test)[best], test) | {"trees": best + 1}


def _ranks(ids: Int[Tensor, "N"], kinds: int) -> Int[Tensor, "K"]:
    """Rank of each category by its count."""
    return torch.bincount(ids, minlength=kinds).argsort(descending=True, stable=True).argsort()


def better(figures: Mapping[str, float]) -> float:
    """Return the score to maximize."""
    return -figures["rmse"] if "rmse" in figures else figures["accuracy"]
