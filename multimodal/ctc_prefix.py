"""CTC prefix scores for joint CTC/attention beam search (Watanabe et al. 2017, algorithm 2)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# log-probability over all alignments that end with (a token, a blank) at each frame
State = tuple[Tensor, Tensor]


class PrefixScorer:
    """A scorer for `search.beam` over one source: (1 - weight)·attention + weight·CTC, both in log-probability.

    The CTC score of a token is log p(prefix + token …) - log p(prefix …), where "…" is any continuation; the end
    token's is that of the prefix as a whole text. `logprobs` are [T W] with the blank last, W = V + 1;
    `prompt`: ids before the first decoded one. The recursions over frames are cumulative sums in float64."""

    def __init__(self, logprobs: Float[Tensor, "T W"], eos: int, prompt: int, weight: float):
        self.frames, self.eos, self.prompt, self.weight = logprobs.double(), eos, prompt, weight
        self.tokens, blank = self.frames[:, :-1], self.frames[:, -1]
        self.blank_sum = blank.cumsum(0)
        nothing = torch.full_like(blank, -torch.inf)
        self.states: dict[tuple[int, ...], State] = {(): (nothing, self.blank_sum)}
        self.scores: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, ids: Int[Tensor, "R N"], attention: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        rows = [tuple(row) for row in ids[:, self.prompt :].tolist()]
        self.states = {row: self._state(row) for row in rows}
        scores = {row: self._continuations(row) for row in self.states}
        whole = [self.scores[row[:-1]][row[-1]] if row else 0.0 for row in rows]
        ctc = torch.stack([scores[row] - total for row, total in zip(rows, whole, strict=True)])
        self.scores = scores
        mixed = (1 - self.weight) * attention.double() + self.weight * ctc
        return mixed.nan_to_num(nan=-torch.inf, neginf=-torch.inf).to(attention.dtype)

    def _before(self, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Log-probability that the prefix is complete before each frame: at all, and with a blank last."""
        token, blank = self.states[prefix]
        start = token.new_full((1,), -torch.inf if prefix else 0.0)
        return torch.cat([start, torch.logaddexp(token, blank)[:-1]]), torch.cat([start, blank[:-1]])

    def _state(self, prefix: tuple[int, ...]) -> State:
        if prefix in self.states:
            return self.states[prefix]
        parent, token = prefix[:-1], prefix[-1]
        any_end, blank_end = self._before(parent)
        enter = blank_end if parent and parent[-1] == token else any_end
        own = _accumulate(enter, self.tokens[:, token].cumsum(0))
        return own, _accumulate(torch.cat([own.new_full((1,), -torch.inf), own[:-1]]), self.blank_sum)

    def _continuations(self, prefix: tuple[int, ...]) -> Float[Tensor, "V"]:
        """log p(prefix + token …) of each token, and of the end."""
        any_end, blank_end = self._before(prefix)
        scores = (any_end[:, None] + self.tokens).logsumexp(0)
        if prefix:  # a repeat needs a blank between
            scores[prefix[-1]] = (blank_end + self.tokens[:, prefix[-1]]).logsumexp(0)
        scores[self.eos] = torch.logaddexp(*(part[-1] for part in self.states[prefix]))
        return scores


def _accumulate(enter: Float[Tensor, "T"], stay: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """r[t] = (r[t-1] + enter[t])·p[t] in the log domain, where `stay` is the running sum of log p."""
    before = torch.cat([stay.new_zeros(1), stay[:-1]])
    return stay + (enter - before).logcumsumexp(0)
