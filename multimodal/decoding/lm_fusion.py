"""Shallow fusion of language models in beam search (Gulcehre et al. 2015)."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.sampling import LogitsProcessor
from multimodal.models.text import TextTransformer
from multimodal.tokens.text.tokenizer import Tokenizer

# lm(ids of texts [R N]) -> natural log-probabilities [R V] of each next token; the end's at its id
LanguageModel = Callable[[Tensor], Tensor]


def shallow_fusion(
    scorer: LogitsProcessor | None, lm: LanguageModel, weight: float, prompt: int, eos: int, bonus: float = 0.0,
    starts: Bool[Tensor, "V"] | None = None,
) -> LogitsProcessor:  # fmt: skip
    """A `scorer` for `beam_search`: scores of `scorer` (None: the step's) + `weight`·log p_lm(token | text) + `bonus`
    for each token that begins a word (`starts`; None: all but the end), since every word costs probability.

    `prompt`: ids before the text. With a bonus the score of an active beam can rise, so the search may stop before a
    longer and better text; small bonuses do not show it."""

    def score(ids: Int[Tensor, "R N"], logprobs: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        scores = logprobs if scorer is None else scorer(ids, logprobs)
        if weight:
            scores = scores + weight * lm(ids[:, prompt:]).to(scores)
        if bonus:
            tokens = torch.arange(scores.shape[1], device=scores.device)
            begins = (tokens != eos) if starts is None else starts.to(scores.device)
            scores = scores + bonus * begins
        return scores

    return score


def word_starts(tokenizer: Tokenizer) -> Bool[Tensor, "V"]:
    """Mask of tokens that begin with a space."""
    decoded = (tokenizer.decode([i], skip_control=False) for i in range(tokenizer.vocab_size))
    return torch.tensor([text.startswith(" ") for text in decoded])


class NeuralScorer:
    """A `LanguageModel` from a causal `TextTransformer` with logits, whose texts begin with `bos`.

    It caches keys and values of the last texts and continues texts that are one token longer. A text that fills the
    context continues from its last half."""

    def __init__(self, model: TextTransformer, bos: int):
        self.model, self.bos = model, bos
        self.rows: dict[tuple[int, ...], int] = {}
        self.cache = Cache(0)

    @torch.inference_mode()
    def __call__(self, ids: Int[Tensor, "R N"]) -> Float[Tensor, "R V"]:
        texts = [tuple(text) for text in ids.tolist()]
        parents = [self.rows.get(text[:-1], -1) if text else -1 for text in texts]
        context = self.model.config.context
        if min(parents) < 0 or self.cache.length == context:
            self.cache = self.model.new_cache()
            # half, or each further step would recompute the whole context
            kept = ids if ids.shape[1] < context else ids[:, -(context // 2) :]
            new = torch.cat([ids.new_full((len(ids), 1), self.bos), kept], 1)
        else:
            self.cache.reorder(torch.tensor(parents, device=ids.device))
            new = ids[:, -1:]
        self.rows = {text: row for row, text in enumerate(texts)}
        return self.model(new, cache=self.cache, last=1)[:, -1].float().log_softmax(-1)
