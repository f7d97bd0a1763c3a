"""Linear probe: logistic regression on frozen features (Radford et al. 2021, appendix A.3), with scikit-learn's L-BFGS.

Its strength is chosen on a held-out part of the training images, over 1e-6 to 1e6 by the paper's binary search, at
last in 8 steps a decade; then all training images are fitted. scikit-learn's C is the inverse of the paper's λ."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.errors import DataError, UsageError
from multimodal.tasks.classify.options import ProbeOptions
from multimodal.tasks.evaluate.class_scores import ClassScores, class_scores

ITERATIONS = ProbeOptions.max_iterations.default
HELD_OUT = 0.2  # of the training images of each class, to choose C by
LEAST, MOST = -6.0, 6.0  # exponents of C
COARSE, FINE = 2.0, 1 / 8  # steps in exponents: of the first round and of the last


class LabelledVectors(NamedTuple):
    """Vectors and class numbers."""

    vectors: Float[Tensor, "N D"]
    labels: Int[Tensor, "N"]


@dataclass(frozen=True)
class ProbeFit:
    """A value of C: the accuracy on the images it is chosen by, L-BFGS's iterations, and whether they were enough."""

    c: float
    accuracy: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class Probe:
    """Scores of the test images by the fit to all training images; how C was chosen (empty: it was given)."""

    scores: ClassScores
    c: float
    iterations: int
    converged: bool
    sweep: list[ProbeFit]


def linear_probe(
    train: LabelledVectors, test: LabelledVectors, names: list[str], c: float | None = None,
    seed: int = ProbeOptions.seed.default, max_iterations: int = ITERATIONS,
) -> Probe:  # fmt: skip
    """Warns where the last fit has not converged; those of the search say it of themselves. Raises DataError where the
    training images are of one class, UsageError where no class has two to choose C by."""
    sweep = []
    if c is None:
        held = held_out(train.labels, HELD_OUT, seed)
        some, others = (LabelledVectors(train.vectors[part], train.labels[part]) for part in (~held, held))
        c, sweep = best_strength(some, others, len(names), max_iterations)
    scores, iterations, converged = fitted(train, test.vectors, len(names), c, max_iterations)
    if not converged:
        warnings.warn(
            f"linear probe: L-BFGS has not converged at C {c:.3g} after {iterations} of {max_iterations} iterations",
            stacklevel=2,
        )
    return Probe(class_scores(names, test.labels, scores), c, iterations, converged, sweep)


def best_strength(
    train: LabelledVectors, held: LabelledVectors, classes: int, max_iterations: int = ITERATIONS
) -> tuple[float, list[ProbeFit]]:
    """The C of the best accuracy on `held`, of equal ones the middle one, and all that were tried, in their order of C.
    Raises UsageError where `held` is empty."""
    if not len(held.labels):
        raise UsageError("is needed: no class has two training images to choose it by", argument="C")

    def tried(exponent: float) -> ProbeFit:
        scores, *how = fitted(train, held.vectors, classes, 10**exponent, max_iterations)
        return ProbeFit(10**exponent, (scores.argmax(1) == held.labels).double().mean().item(), *how)

    tries = searched(tried)
    return _peak(tries).c, tries


def searched(tried: Callable[[float], ProbeFit]) -> list[ProbeFit]:
    """The paper's search: steps of two decades first, then half a step to either side of the best, and so on."""
    count = round((MOST - LEAST) / COARSE) + 1
    found = {exponent: tried(exponent) for exponent in (LEAST + COARSE * i for i in range(count))}
    steps = COARSE
    while steps > FINE:
        steps /= 2
        best = _peak([found[exponent] for exponent in sorted(found)])
        peak = next(exponent for exponent, fit in found.items() if fit is best)
        for exponent in (peak - steps, peak + steps):
            if LEAST <= exponent <= MOST and exponent not in found:
                found[exponent] = tried(exponent)
    return [found[exponent] for exponent in sorted(found)]


def _peak(tries: Sequence[ProbeFit]) -> ProbeFit:
    """The best, of equal ones the middle one: at an end of a range that is right everywhere nothing is learned."""
    highest = max(fit.accuracy for fit in tries)
    equal = [fit for fit in tries if fit.accuracy == highest]
    return equal[len(equal) // 2]


def fitted(
    train: LabelledVectors, vectors: Float[Tensor, "N D"], classes: int, c: float, max_iterations: int = ITERATIONS
) -> tuple[Float[Tensor, "N C"], int, bool]:
    """Scores of `vectors`, L-BFGS's iterations, and whether it converged. A class without training images scores
    minus infinity. Raises DataError for training images of one class."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    if len(train.labels.unique()) < 2:
        raise DataError(f"linear probe: its {len(train.labels)} training images are of one class")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "The number of unique classes")  # one image a class is what was asked for
        model = LogisticRegression(C=c, max_iter=max_iterations).fit(train.vectors.numpy(), train.labels.numpy())
        found = torch.from_numpy(model.decision_function(vectors.numpy())).float()
    for warning in caught:
        if not issubclass(warning.category, ConvergenceWarning):
            warnings.warn(warning.message, stacklevel=2)
    if found.ndim == 1:  # of two classes scikit-learn scores the second
        found = torch.stack([torch.zeros_like(found), found], 1)  # whose softmax is the sigmoid
    scores = torch.full((len(vectors), classes), -torch.inf)
    scores[:, torch.from_numpy(model.classes_)] = found
    return scores, int(model.n_iter_.max()), not any(issubclass(w.category, ConvergenceWarning) for w in caught)


def held_out(labels: Int[Tensor, "N"], share: float, seed: int) -> Bool[Tensor, "N"]:
    """Random share of each class: at least one image, never all of them."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    taken = torch.zeros(len(labels), dtype=torch.bool)
    for number in labels.unique().tolist():
        own = order[labels[order] == number]
        taken[own[: min(len(own) - 1, max(1, round(share * len(own))))]] = True
    return taken
