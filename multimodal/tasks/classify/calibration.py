"""Scores that mean something: how often a score is right, and the maps that make it so.

Temperature scaling (Guo et al. 2017, On Calibration of Modern Neural Networks, section 4.2): softmax(logits / T), which
changes no order. Platt scaling (Platt 1999, Probabilistic Outputs for Support Vector Machines): each label by itself,
sigmoid(a · log-odds + b), with one a and b for all labels or for each its own, so that all may be low and a picture of
something else can be told. The log-odds are those of the model's own probability: log p / (1 - p) of its softmax (the
cosines alone were calibrated two times worse), or the logit of a model trained with the sigmoid loss. Both minimise the
negative log likelihood by L-BFGS in float64."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.errors import CheckpointError, DataError
from multimodal.system.files import shown

KINDS = ("temperature", "platt", "platt-per-label")
BINS = 15  # of equal width, as in Guo et al. 2017
FOLDS = 5
LEAST = 20  # pictures: below this the figures of a fold are of two or three pictures


@dataclass(frozen=True)
class Calibration:
    """`loss`: which the model was trained with. `scale` and `offset`: one of each, or one a label. `figures`: how it
    was fitted and measured."""

    kind: Literal["temperature", "platt", "platt-per-label"]
    loss: Literal["softmax", "sigmoid"]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    figures: dict[str, Any]

    def __call__(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        scale, offset = (torch.tensor(part, dtype=torch.float64) for part in (self.scale, self.offset))
        return _applied(self.kind, self.loss, scale, offset, logits)

    def unbounded(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        """The scores before their softmax or sigmoid: in the same order, but for those that this rounds to a tie."""
        scale, offset = (torch.tensor(part, dtype=torch.float64) for part in (self.scale, self.offset))
        return _mapped(self.kind, self.loss, scale, offset, logits)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_labels(self, labels: int) -> None:
        """Raises CheckpointError where it is not of so many labels, or its numbers leave float32."""
        count = labels if self.kind == "platt-per-label" else 1
        for name, values in (("scale", self.scale), ("offset", self.offset)):
            if len(values) != count or not max(map(abs, values)) < 1e30:
                raise CheckpointError(f"calibration: {name}: expected {count} numbers below 1e30 ({shown(values)})")


class Figures(NamedTuple):
    """Shares of 0..1, and the mean negative log likelihood in nats: of the label for temperature scaling; of each label
    by itself for Platt's, where also the pictures of none of the labels count, to which every answer is wrong."""

    accuracy: float
    nll: float
    ece: float


def log_odds(loss: str, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """Of the model's own probability of each label, in float64."""
    if loss == "sigmoid":
        return logits.double()
    logs = logits.double().log_softmax(-1).clamp(max=-1e-12)  # finite where the rest is too small to be held
    return logs - (-torch.expm1(logs)).log()


def fitted(kind: str, loss: str, logits: Float[Tensor, "N C"], classes: Int[Tensor, "N"]) -> tuple[Tensor, Tensor]:
    """Scale and offset, each [1] or [C]. `classes`: the label of each picture, -1 for one of none of them, which only
    the Platt kinds learn from."""
    if kind == "temperature":
        known = classes >= 0
        logits, classes = logits[known].double(), classes[known]
        (log_scale,) = _minimise(lambda x: F.cross_entropy(logits * x[0].exp(), classes), torch.zeros(1, 1).double())
        return log_scale.exp(), torch.zeros_like(log_scale)
    odds = log_odds(loss, logits)
    own = classes[:, None] == torch.arange(odds.shape[1])
    targets = _platt_targets(own, kind == "platt-per-label")
    start = torch.tensor([[1.0], [0.0]]).double().expand(2, targets.shape[1] if kind == "platt-per-label" else 1)
    scale, offset = _minimise(lambda x: F.binary_cross_entropy_with_logits(odds * x[0] + x[1], targets), start)
    return scale, offset


def calibrate(
    kind: str, loss: str, logits: Float[Tensor, "N C"], classes: Int[Tensor, "N"],
    before: Float[Tensor, "N C"], threshold: float | None = None,
) -> tuple[Calibration, Float[Tensor, "N C"]]:  # fmt: skip
    """Fitted to all pictures; and the scores that those of each fifth get from a fit to the other four, by which its
    figures are measured. `before`: the scores as they were. Raises DataError for too few pictures."""
    known = classes >= 0
    if (count := int(known.sum())) < LEAST or len(classes[known].unique()) < 2:
        raise DataError(f"{count} pictures of the labels: at least {LEAST} of two labels are needed to calibrate")
    folds, held = folds_of(classes), torch.empty_like(logits, dtype=torch.float64)
    for fold in range(FOLDS):
        part = folds == fold
        held[part] = _applied(kind, loss, *fitted(kind, loss, logits[~part], classes[~part]), logits[part].double())
    figures: dict[str, Any] = {"pictures": count, "of_none": len(classes) - count}
    for name, scores in (("before", before.double()), ("after", held)):
        figures[name] = measured(kind, scores, classes)._asdict()
        if threshold is not None:
            figures[name] |= answered(scores, classes, threshold)
    scale, offset = fitted(kind, loss, logits, classes)
    return Calibration(kind, loss, tuple(scale.tolist()), tuple(offset.tolist()), figures), held


def measured(kind: str, scores: Float[Tensor, "N C"], classes: Int[Tensor, "N"]) -> Figures:
    known = classes >= 0
    accuracy = (scores[known].argmax(1) == classes[known]).double().mean().item()
    if kind == "temperature":
        scores, classes = scores[known], classes[known]
        tiny = torch.finfo(torch.float32).tiny
        nll = -scores.gather(1, classes[:, None]).clamp(min=tiny).log().mean()
    else:
        own = classes[:, None] == torch.arange(scores.shape[1])
        nll = F.binary_cross_entropy(scores.clamp(0, 1), own.to(scores))  # which bounds its logarithms
    best, found = scores.max(1)
    return Figures(accuracy, nll.item(), calibration_error(best, found == classes))


def answered(scores: Float[Tensor, "N C"], classes: Int[Tensor, "N"], threshold: float) -> dict[str, float | None]:
    """At this threshold: the share of pictures of none of the labels that get an answer (false accept), of pictures of
    a label that get none (false reject), and of answers that are right; None where there are none to take it of."""
    best, found = scores.max(1)
    given, known = best >= threshold, classes >= 0
    return {
        "false_accept": _share(given[~known]), "false_reject": _share(~given[known]),
        "right_of_answers": _share((found == classes)[given]),
    }  # fmt: skip


def bins(best: Float[Tensor, "N"], right: Bool[Tensor, "N"]) -> Float[Tensor, "bins 3"]:
    """Of each of `BINS` spans of the score, (0, 1/15], …: pictures, their mean score, the share that is right."""
    place = (best.double() * BINS).ceil().long().clamp(1, BINS) - 1
    sums = torch.zeros(3, BINS, dtype=torch.float64)
    for row, values in zip(sums, (torch.ones_like(best), best, right), strict=True):
        row.index_add_(0, place, values.double())
    return torch.stack([sums[0], *(sums[1:] / sums[0].clamp(min=1))], 1)


def calibration_error(best: Float[Tensor, "N"], right: Bool[Tensor, "N"]) -> float:
    """Expected calibration error (Guo et al. 2017, equation 5) of the best score."""
    table = bins(best, right)
    return ((table[:, 1] - table[:, 2]).abs() * table[:, 0]).sum().item() / len(best)


def folds_of(classes: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """A fold of each picture, the pictures of each class spread over all; always the same."""
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    order = order[classes[order].argsort(stable=True)]
    folds = torch.empty_like(classes)
    folds[order] = torch.arange(len(classes)) % FOLDS
    return folds


def _applied(kind: str, loss: str, scale: Tensor, offset: Tensor, logits: Tensor) -> Float[Tensor, "N C"]:
    mapped = _mapped(kind, loss, scale, offset, logits)
    return mapped.softmax(-1) if kind == "temperature" else mapped.sigmoid().to(logits)


def _mapped(kind: str, loss: str, scale: Tensor, offset: Tensor, logits: Tensor) -> Float[Tensor, "N C"]:
    if kind == "temperature":
        return logits * scale.to(logits)
    odds = log_odds(loss, logits)
    return odds * scale.to(odds) + offset.to(odds)


def _platt_targets(own: Bool[Tensor, "N C"], by_label: bool) -> Float[Tensor, "N C"]:
    """Platt's: a Laplace-smoothed 0 and 1, without which few pictures that are told apart give an endless slope."""
    yes = (own.sum(0) if by_label else own.sum()[None]).double()
    no = (len(own) if by_label else own.numel()) - yes
    return torch.where(own, (yes + 1) / (yes + 2), 1 / (no + 2))


def _minimise(loss: Callable[[Tensor], Tensor], start: Float[Tensor, "P K"]) -> Float[Tensor, "P K"]:
    with torch.inference_mode(False), torch.enable_grad():  # of tensors that may come of inference mode
        x = start.clone().requires_grad_()
        steps = torch.optim.LBFGS([x], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-12,
                                  line_search_fn="strong_wolfe")  # fmt: skip

        def closure() -> Tensor:
            steps.zero_grad()
            value = loss(x)
            value.backward()
            return value

        steps.step(closure)
    return x.detach()


def _share(hits: Tensor) -> float | None:
    return hits.double().mean().item() if len(hits) else None
