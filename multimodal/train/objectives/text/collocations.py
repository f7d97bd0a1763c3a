"""Collocations of a corpus by pointwise mutual information (PMI masking, Levine et al. 2021)."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence

Word = tuple[int, ...]  # ids of its tokens
LONGEST = 5  # words of a collocation


def collocations(texts: Iterable[Sequence[Word]], most: int, often: int) -> set[tuple[Word, ...]]:
    """The `most` runs of 2 to 5 words with the highest PMI, of those that occur `often` times or more.

    The PMI of n words is the lowest over all ways to cut them in parts, log p(all) - Σ log p(part), so that a long run
    is not a collocation because of a short one inside (section 3.2)."""
    counts: list[Counter[tuple[Word, ...]]] = [Counter() for _ in range(LONGEST + 1)]
    totals = [0] * (LONGEST + 1)
    for text in texts:
        words = tuple(text)
        for size in range(1, LONGEST + 1):
            runs = [words[at : at + size] for at in range(len(words) - size + 1)]
            counts[size].update(runs)
            totals[size] += len(runs)

    def logarithm(run: tuple[Word, ...]) -> float:
        return math.log(counts[len(run)][run] / totals[len(run)])

    best: dict[tuple[Word, ...], float] = {}  # the likeliest way to cut a run, or the run itself

    def parts(run: tuple[Word, ...], whole: bool) -> float:
        """Highest sum of log-probabilities of the parts, of which the run itself is one if `whole`."""
        if whole and run in best:
            return best[run]
        cuts = (logarithm(run[:at]) + parts(run[at:], True) for at in range(1, len(run)))
        found = max([*cuts, *([logarithm(run)] if whole else [])])
        if whole:
            best[run] = found
        return found

    frequent = [run for size in range(2, LONGEST + 1) for run, count in counts[size].items() if count >= often]
    ranked = heapq.nlargest(most, ((logarithm(run) - parts(run, False), run) for run in frequent))
    return {run for _, run in ranked}
