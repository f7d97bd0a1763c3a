"""Greedy decoding of CTC outputs (Graves et al. 2006, section 3.2: best path)."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class CTCPath(NamedTuple):
    """Tokens of one row, and for each the frames [first, past the last) in which it won."""

    ids: list[int]
    spans: list[tuple[int, int]]


def ctc_paths(logits: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], blank: int) -> list[CTCPath]:
    """The best path of each row: the winner of every frame, repeats joined, blanks left out.

    Frames from `lengths` on do not matter. Scores may be logits or log-probabilities."""
    found = []
    for winners, length in zip(logits.argmax(-1).tolist(), lengths.tolist(), strict=True):
        path, last = CTCPath([], []), blank
        for frame, winner in enumerate(winners[:length]):
            if winner != blank and winner == last:
                path.spans[-1] = (path.spans[-1][0], frame + 1)
            elif winner != blank:
                path.ids.append(winner)
                path.spans.append((frame, frame + 1))
            last = winner
        found.append(path)
    return found


def ctc_greedy(logits: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], blank: int) -> list[list[int]]:
    """Token ids of each row's best path."""
    return [path.ids for path in ctc_paths(logits, lengths, blank)]
