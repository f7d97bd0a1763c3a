"""Greedy decoding of CTC outputs (Graves et al. 2006, section 3.2: best path)."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class CTCPath(NamedTuple):
    """Tokens of one row, and the frames [start, end) of each."""

    ids: list[int]
    spans: list[tuple[int, int]]


def ctc_paths(logits: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], blank: int) -> list[CTCPath]:
    """The best path of each row: the winner of every frame, repeats merged and blanks removed.

    Ignores frames from `lengths` on. Scores may be logits or log-probabilities."""
    paths = []
    for winners, length in zip(logits.argmax(-1).tolist(), lengths.tolist(), strict=True):
        path, last = CTCPath([], []), blank
        for frame, winner in enumerate(winners[:length]):
            if winner != blank and winner == last:
                path.spans[-1] = (path.spans[-1][0], frame + 1)
            elif winner != blank:
                path.ids.append(winner)
                path.spans.append((frame, frame + 1))
            last = winner
        paths.append(path)
    return paths


def ctc_greedy(logits: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], blank: int) -> list[list[int]]:
    """Token ids of each row's best path."""
    return [path.ids for path in ctc_paths(logits, lengths, blank)]
