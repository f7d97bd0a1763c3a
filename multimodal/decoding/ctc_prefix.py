"""CTC prefix scores for joint CTC/attention beam search (Watanabe et al. 2017, algorithm 2)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


class CTCPrefixScorer:
    """A `scorer` for `beam_search` over B sources: (1 - weight)·attention + weight·CTC, both log-probabilities.

    A token's CTC score is log p(prefix + token …) - log p(prefix …), where "…" is any continuation; the end token's is
    that of the prefix as a whole text. `logprobs` [B T W] have the blank last, W = V + 1, and `lengths` real frames;
    `prompt`: ids before the first decoded one. Each source has equally many consecutive rows. Recursions over frames
    are cumulative sums in float64; one matrix product per source scores all tokens of all beams."""

    def __init__(
        self, logprobs: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], eos: int, prompt: int, weight: float
    ):
        self.eos, self.prompt, self.weight = eos, prompt, weight
        past = torch.arange(logprobs.shape[1], device=logprobs.device) >= lengths[:, None]
        # past the end a text cannot grow
        frames = logprobs.double().masked_fill(past[..., None], -torch.inf)
        self.past, self.tokens = past, frames[..., :-1]
        self.chances, self.blank_sum = self.tokens.exp(), frames[..., -1].masked_fill(past, 0).cumsum(1)
        self.parents: Tensor | None = None

    def reorder_rows(self, rows: Int[Tensor, "R"]) -> None:
        """The rows whose texts those of the next call continue."""
        self.parents = rows

    def __call__(self, ids: Int[Tensor, "R N"], attention: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        beams = len(ids) // len(self.tokens)
        source = torch.arange(len(ids), device=ids.device) // beams
        whole = self._first(source) if ids.shape[1] == self.prompt else self._extend(source, ids)
        self.scores = self._continuations(ids, beams)
        ctc = self.scores - whole[:, None]
        mixed = (1 - self.weight) * attention.double() + self.weight * ctc
        return mixed.nan_to_num(nan=-torch.inf, neginf=-torch.inf).to(attention.dtype)

    def _first(self, source: Int[Tensor, "R"]) -> Float[Tensor, "R"]:
        """State of empty texts: log-probability of ending in a token, or in a blank, at each frame."""
        self.blank = self.blank_sum[source]
        self.token = torch.full_like(self.blank, -torch.inf)
        return self.blank.new_zeros(len(source))

    def _extend(self, source: Int[Tensor, "R"], ids: Int[Tensor, "R N"]) -> Float[Tensor, "R"]:
        """States of texts one token longer than before; returns log p(text …) of each."""
        parents, self.parents = self.parents, None
        if parents is None:
            raise RuntimeError("expected reorder_rows before each call but the first")
        last, empty = ids[:, -1], ids.shape[1] == self.prompt + 1
        any_end, blank_end = (part[parents] for part in self._before(empty))
        repeat = (last == ids[:, -2]) & (not empty)  # a repeat needs a blank between
        enter = torch.where(repeat[:, None], blank_end, any_end)
        past, blank_sum = self.past[source], self.blank_sum[source]
        self.token = _accumulate(enter, self.tokens[source, :, last].cumsum(1)).masked_fill(past, -torch.inf)
        after = torch.cat([torch.full_like(enter[:, :1], -torch.inf), self.token[:, :-1]], 1)
        self.blank = _accumulate(after, blank_sum)
        return self.scores[parents, last]

    def _before(self, empty: bool) -> tuple[Float[Tensor, "R T"], Float[Tensor, "R T"]]:
        """Log-probability that the text is complete before each frame: in any way, and ending in a blank."""
        start = torch.full_like(self.blank[:, :1], 0.0 if empty else -torch.inf)
        both = torch.logaddexp(self.token, self.blank)
        return torch.cat([start, both[:, :-1]], 1), torch.cat([start, self.blank[:, :-1]], 1)

    def _continuations(self, ids: Int[Tensor, "R N"], beams: int) -> Float[Tensor, "R V"]:
        """log p(text + token …) of each token and of the end."""
        empty = ids.shape[1] == self.prompt
        any_end, blank_end = self._before(empty)
        top = any_end.amax(1, keepdim=True).clamp(min=-1e300)
        shares = (any_end - top).exp().unflatten(0, (-1, beams))
        scores = (shares @ self.chances).flatten(0, 1).log() + top
        if not empty:
            rows = torch.arange(len(ids), device=ids.device)
            scores[rows, ids[:, -1]] = (blank_end + self.tokens[rows // beams, :, ids[:, -1]]).logsumexp(1)
        scores[:, self.eos] = torch.logaddexp(self.token[:, -1], self.blank[:, -1])
        return scores


def _accumulate(enter: Float[Tensor, "R T"], stay: Float[Tensor, "R T"]) -> Float[Tensor, "R T"]:
    """r[t] = (r[t-1] + enter[t])·p[t] in the log domain, where `stay` is the running sum of log p."""
    before = torch.cat([torch.zeros_like(stay[:, :1]), stay[:, :-1]], 1)
    return stay + (enter - before).logcumsumexp(1)
