"""Few-shot accuracy: a linear probe, and training-free Tip-Adapter, which adds the similarity to labelled images to
the zero-shot scores (Zhang et al. 2022, arXiv 2111.03930).

What a method chooses (C; Tip-Adapter's α and β) is chosen on up to four further images a class, min(shots, 4), as in
CoOp (Zhou et al. 2022, section 4.1)."""

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.tasks.classify.options import FewShotOptions
from multimodal.tasks.evaluate.class_scores import ClassScores, class_scores
from multimodal.tasks.evaluate.linear_probe import LabelledVectors, best_strength, fitted

FURTHER = 4  # images a class to choose by, at most
ALPHAS = tuple(0.1 + 2.9 * i / 19 for i in range(20))  # the spans of Tip-Adapter's own search
BETAS = tuple(0.1 + 6.9 * i / 19 for i in range(20))


@dataclass(frozen=True)
class FewShotVectors:
    """For Tip-Adapter: unit vectors of the same training and test images, and the zero-shot logits of both."""

    train: Float[Tensor, "N D"]
    test: Float[Tensor, "M D"]
    train_logits: Float[Tensor, "N C"]
    test_logits: Float[Tensor, "M C"]


def few_shot(
    train: LabelledVectors, test: LabelledVectors, names: list[str], shots: Sequence[int],
    seeds: int = FewShotOptions.seeds.default, c: float | None = None,
    embedded: FewShotVectors | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each number of shots: of each method accuracies of the test images by draw, their mean and standard
    deviation (None for one draw), and what was chosen. Draw i has the seed i. Warns of classes with too few images, and
    of what is left out where no class has images to choose by: Tip-Adapter, and without `c` the number of shots.

    Raises UsageError where that leaves none."""
    rows, sizes = [], torch.bincount(train.labels, minlength=len(names))
    for count in shots:
        if count >= sizes.max() and (c is None or embedded is not None):
            left = "no Tip-Adapter" if c is not None else "left out"
            warnings.warn(f"{count} shots: {left}, as no class has more images to choose by", stacklevel=2)
            if c is None:
                continue
        if scarce := (sizes < count).nonzero().flatten().tolist():
            warnings.warn(
                f"{count} shots: {len(scarce)} classes have fewer, such as {names[scarce[0]]!r}", stacklevel=2
            )
        runs: dict[str, list[tuple[ClassScores, dict[str, float]]]] = {}
        for seed in range(seeds):
            few, further = drawn(train.labels, count, seed)
            runs.setdefault("linear_probe", []).append(_probed(train, test, names, few, further, c))
            if embedded is not None and len(further):
                runs.setdefault("tip_adapter", []).append(_adapted(embedded, train, test, names, few, further))
        rows.append({"shots": count, **{method: _summed(own) for method, own in runs.items()}})
    if not rows:
        raise UsageError("is needed: no class has an image more than its shots to choose it by", argument="C")
    return rows


def drawn(labels: Int[Tensor, "N"], shots: int, seed: int) -> tuple[Int[Tensor, "n"], Int[Tensor, "m"]]:
    """Images to learn from and images to choose by, of each class at random; first come those to learn from."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    classes = [order[labels[order] == number] for number in labels.unique().tolist()]
    further = min(shots, FURTHER)
    return torch.cat([own[:shots] for own in classes]), torch.cat([own[shots : shots + further] for own in classes])


def _probed(
    train: LabelledVectors, test: LabelledVectors, names: list[str], few: Tensor, further: Tensor, c: float | None
) -> tuple[ClassScores, dict[str, float]]:
    own, held = (LabelledVectors(train.vectors[part], train.labels[part]) for part in (few, further))
    if c is None:
        c, _ = best_strength(own, held, len(names))
    scores, _, converged = fitted(own, test.vectors, len(names), c)
    if not converged:
        warnings.warn(f"linear probe of {len(few)} images: L-BFGS has not converged at C {c:.3g}", stacklevel=4)
    return class_scores(names, test.labels, scores), {"c": c}


def _adapted(
    embedded: FewShotVectors,
    train: LabelledVectors,
    test: LabelledVectors,
    names: list[str],
    few: Tensor,
    further: Tensor,
) -> tuple[ClassScores, dict[str, float]]:
    keys, values = embedded.train[few], torch.nn.functional.one_hot(train.labels[few], len(names)).float()
    alike, logits, labels = embedded.train[further] @ keys.T, embedded.train_logits[further], train.labels[further]
    best = (-1.0, 0.0, 0.0)
    for beta in BETAS:
        added = cache_scores(alike, values, beta)
        for alpha in ALPHAS:
            right = (logits + alpha * added).argmax(1) == labels
            best = max(best, (right.double().mean().item(), -alpha, -beta))
    _, alpha, beta = (abs(x) for x in best)
    scores = embedded.test_logits + alpha * cache_scores(embedded.test @ keys.T, values, beta)
    return class_scores(names, test.labels, scores), {"alpha": alpha, "beta": beta}


def cache_scores(alike: Float[Tensor, "N K"], values: Float[Tensor, "K C"], beta: float) -> Float[Tensor, "N C"]:
    """Tip-Adapter's equation 4: exp(-β (1 - cosine)) of the kept images, summed by class."""
    return (beta * (alike - 1)).exp() @ values


def _summed(runs: list[tuple[ClassScores, dict[str, float]]]) -> dict[str, Any]:
    figures = [scores.figures() for scores, _ in runs]
    found: dict[str, Any] = {}
    for name in ("acc1", "acc5", "mean_per_class_recall"):
        values = [own[name] for own in figures if own[name] is not None]
        sd = statistics.stdev(values) if len(values) > 1 else None
        found |= {name: values, f"{name}_mean": statistics.fmean(values) if values else None, f"{name}_sd": sd}
    return found | {name: [chosen[name] for _, chosen in runs] for name in runs[0][1]}
