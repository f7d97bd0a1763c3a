"""Calibration of classifier scores.

Temperature scaling (Guo et al. 2017, On Calibration of Modern Neural Networks, section 4.2): softmax(logits / T), which
keeps the order. Platt scaling (Platt 1999, Probabilistic Outputs for Support Vector Machines): sigmoid(a · log-odds +
b) of each label alone, with a and b shared or per label, so that all scores may be low for an image of something else.
The log-odds are log p / (1 - p) of the model's softmax (calibrating cosines alone had twice the error), or the logit of
a model trained with the sigmoid loss. Both minimize the negative log likelihood by L-BFGS in float64. Where
every label is right it has no minimum: Platt smooths the targets, and the number of images bounds the temperature."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.errors import CheckpointError, DataError
from multimodal.system.files import shown

BINS = 15  # of equal width, as in Guo et al. 2017
FOLDS = 5
LEAST = 20  # images; with fewer, a fold has two or three


@dataclass(frozen=True)
class Calibration:
    """`loss`: training loss of the model. `scale`, `offset`: one each, or one per label. `figures`: how it was fitted
    and measured."""

    kind: Literal["temperature", "platt", "platt-per-label"]
    loss: Literal["softmax", "sigmoid"]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    figures: dict[str, Any]

    def __call__(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        scale, offset = (torch.tensor(part, dtype=torch.float64) for part in (self.scale, self.offset))
        return _applied(self.kind, self.loss, scale, offset, logits)

    def unbounded(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        """Scores before softmax or sigmoid, in the same order except where those round to a tie."""
        scale, offset = (torch.tensor(part, dtype=torch.float64) for part in (self.scale, self.offset))
        return _mapped(self.kind, self.loss, scale, offset, logits)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_labels(self, labels: int) -> None:
        """Raises CheckpointError for another number of labels, or numbers that overflow float32."""
        count = labels if self.kind == "platt-per-label" else 1
        for name, values in (("scale", self.scale), ("offset", self.offset)):
            if len(values) != count or not max(map(abs, values)) < 1e30:
                raise CheckpointError(f"calibration: {name}: expected {count} numbers below 1e30 ({shown(values)})")


class CalibrationFigures(NamedTuple):
    """Shares in 0..1, and the mean negative log likelihood in nats: of the label for temperature scaling, of each label
    alone for Platt's, where images of no label count too, with every answer wrong."""

    accuracy: float
    nll: float
    ece: float


def log_odds(loss: str, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """Log-odds of the model's probability of each label, in float64."""
    if loss == "sigmoid":
        return logits.double()
    logs = logits.double().log_softmax(-1).clamp(max=-1e-12)  # keeps 1 - p above 0
    return logs - (-torch.expm1(logs)).log()


def fitted(kind: str, loss: str, logits: Float[Tensor, "N C"], classes: Int[Tensor, "N"]) -> tuple[Tensor, Tensor]:
    """Scale and offset, each [1] or [C]. `classes`: label of each image, or -1 for none, which only Platt uses."""
    if kind == "temperature":
        known = classes >= 0
        logits, classes = logits[known].double(), classes[known]
        (log_scale,) = _minimize(lambda x: F.cross_entropy(logits * x[0].exp(), classes), torch.zeros(1, 1).double())
        log_scale = _bounded(log_scale, logits)
        return log_scale.exp(), torch.zeros_like(log_scale)
    odds = log_odds(loss, logits)
    own = classes[:, None] == torch.arange(odds.shape[1])
    targets = _platt_targets(own, kind == "platt-per-label")
    start = torch.tensor([[1.0], [0.0]]).double().expand(2, targets.shape[1] if kind == "platt-per-label" else 1)
    scale, offset = _minimize(lambda x: F.binary_cross_entropy_with_logits(odds * x[0] + x[1], targets), start)
    return scale, offset


def calibrate(
    kind: str, loss: str, logits: Float[Tensor, "N C"], classes: Int[Tensor, "N"],
    before: Float[Tensor, "N C"], threshold: float | None = None,
) -> tuple[Calibration, Float[Tensor, "N C"]]:  # fmt: skip
    """Calibration fitted to all images, and held-out scores of each fifth from a fit to the other four, which its
    figures are measured on. `before`: uncalibrated scores. Raises DataError for too few images. Warns of figures that
    a calibration cannot rest on."""
    known = classes >= 0
    if (count := int(known.sum())) < LEAST or len(classes[known].unique()) < 2:
        raise DataError(f"{count} images of the labels: calibration needs at least {LEAST}, of two labels")
    folds, held = folds_of(classes), torch.empty_like(logits, dtype=torch.float64)
    for fold in range(FOLDS):
        part = folds == fold
        held[part] = _applied(kind, loss, *fitted(kind, loss, logits[~part], classes[~part]), logits[part].double())
    figures: dict[str, Any] = {"images": count, "of_none": len(classes) - count}
    for name, scores in (("before", before.double()), ("after", held)):
        figures[name] = measured(kind, scores, classes)._asdict()
        if threshold is not None:
            figures[name] |= answered(scores, classes, threshold)
    _warn_of(kind, figures)
    scale, offset = fitted(kind, loss, logits, classes)
    return Calibration(kind, loss, tuple(scale.tolist()), tuple(offset.tolist()), figures), held


def measured(kind: str, scores: Float[Tensor, "N C"], classes: Int[Tensor, "N"]) -> CalibrationFigures:
    known = classes >= 0
    accuracy = (scores[known].argmax(1) == classes[known]).double().mean().item()
    if kind == "temperature":
        scores, classes = scores[known], classes[known]
        tiny = torch.finfo(torch.float32).tiny
        nll = -scores.gather(1, classes[:, None]).clamp(min=tiny).log().mean()
    else:
        own = classes[:, None] == torch.arange(scores.shape[1])
        nll = F.binary_cross_entropy(scores.clamp(0, 1), own.to(scores))  # bounds its logarithms itself
    best, place = scores.max(1)
    return CalibrationFigures(accuracy, nll.item(), calibration_error(best, place == classes))


def answered(scores: Float[Tensor, "N C"], classes: Int[Tensor, "N"], threshold: float) -> dict[str, float | None]:
    """False accepts (images of no label that get an answer), false rejects (images of a label that get none) and the
    share of correct answers; None for a share of nothing."""
    best, place = scores.max(1)
    answer, known = best >= threshold, classes >= 0
    return {
        "false_accept": _share(answer[~known]), "false_reject": _share(~answer[known]),
        "right_of_answers": _share((place == classes)[answer]),
    }  # fmt: skip


def bins(best: Float[Tensor, "N"], right: Bool[Tensor, "N"]) -> Float[Tensor, "bins 3"]:
    """Images, mean score and accuracy in each of `BINS` spans of the score: (0, 1/15], …"""
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
    """Fold of each image, stratified by class and deterministic."""
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
    """Platt's smoothed 0 and 1: without them, separable labels give an infinite slope."""
    yes = (own.sum(0) if by_label else own.sum()[None]).double()
    no = (len(own) if by_label else own.numel()) - yes
    return torch.where(own, (yes + 1) / (yes + 2), 1 / (no + 2))


def _bounded(log_scale: Float[Tensor, "1"], logits: Float[Tensor, "N C"]) -> Float[Tensor, "1"]:
    """The scale, or the largest at which the mean best score of N images is (N + 1) / (N + 2), Laplace's rule of
    succession after N hits."""
    most = (len(logits) + 1) / (len(logits) + 2)
    above = lambda x: bool((logits * x.exp()).softmax(-1).amax(-1).mean() > most)
    if not above(log_scale):
        return log_scale
    low, high = log_scale - 50, log_scale
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return low


def _warn_of(kind: str, figures: dict[str, Any]) -> None:
    before, after = figures["before"], figures["after"]
    if kind == "temperature" and before["accuracy"] == 1:
        why = f"all {figures['images']} images are classified right, so the temperature follows from their number"
    elif after["nll"] > before["nll"]:
        why = f"calibration made the held-out NLL worse ({before['nll']:.4g} → {after['nll']:.4g})"
    else:
        return
    warnings.warn(f"{why}; give more images, or those that the model gets wrong", stacklevel=3)


def _minimize(loss: Callable[[Tensor], Tensor], start: Float[Tensor, "P K"]) -> Float[Tensor, "P K"]:
    with torch.inference_mode(False), torch.enable_grad():  # inputs may be inference tensors
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
