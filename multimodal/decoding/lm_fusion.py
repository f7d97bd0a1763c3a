"""Language models in a beam search, beside the acoustic scores (shallow fusion, Gulcehre et al. 2015)."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.sampling import Rule
from multimodal.models.text import TextTransformer
from multimodal.tokens.text.tokenizer import Tokenizer

# lm(ids of texts [R N]) -> natural log-probabilities [R V] of each next token, of the text's end at the end's id
LanguageModel = Callable[[Tensor], Tensor]


def fused(
    scorer: Rule | None, lm: LanguageModel, weight: float, prompt: int, eos: int, bonus: float = 0.0,
    starts: Bool[Tensor, "V"] | None = None,
) -> Rule:  # fmt: skip
    """A scorer for `beams.beam`: the scores of `scorer` (None: the step's own) + `weight`·log p_lm(token | text), and
    `bonus` for a token that begins a word (`starts`; None: for each but the end), since every word costs probability.

    `prompt`: ids before the first of the text. With a bonus a going text can still rise, so the search, which ends
    when none that goes is ahead, may miss a longer one; small bonuses do not show it."""

    def rule(ids: Int[Tensor, "R N"], logprobs: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        scores = logprobs if scorer is None else scorer(ids, logprobs)
        if weight:
            scores = scores + weight * lm(ids[:, prompt:]).to(scores)
        if bonus:
            places = torch.arange(scores.shape[1], device=scores.device)
            begins = (places != eos) if starts is None else starts.to(scores.device)
            scores = scores + bonus * begins
        return scores

    return rule


def word_starts(tokenizer: Tokenizer) -> Bool[Tensor, "V"]:
    """Which tokens begin with a space."""
    decoded = (tokenizer.decode([i], skip_control=False) for i in range(tokenizer.vocab_size))
    return torch.tensor([text.startswith(" ") for text in decoded])


class NeuralScorer:
    """A `LanguageModel` of a causal `TextTransformer` with logits, whose texts begin with `bos`.

    It caches keys and values of the last texts; texts one token longer each go on from theirs. One that fills the
    context goes on from its last half."""

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
            # every step of one that lies between would begin anew otherwise
            kept = ids if ids.shape[1] < context else ids[:, -(context // 2) :]
            new = torch.cat([ids.new_full((len(ids), 1), self.bos), kept], 1)
        else:
            self.cache.reorder(torch.tensor(parents, device=ids.device))
            new = ids[:, -1:]
        self.rows = {text: row for row, text in enumerate(texts)}
        return self.model(new, cache=self.cache, last=1)[:, -1].float().log_softmax(-1)
