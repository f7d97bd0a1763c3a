"""Shallow fusion of language models in beam search (Gulcehre et al. 2015)."""

import copy
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
# fuse(ids of a text) -> what each next token adds to its score [V]
Fuse = Callable[[tuple[int, ...]], Float[Tensor, "V"]]

KEPT = 32  # texts whose keys and values a `NeuralScorer` keeps for a search text by text; few beams are wider


class Added:
    """Additions of `fuse`, computed once a text."""

    def __init__(self, fuse: Fuse | None):
        self.fuse, self.known = fuse, {}

    def __call__(self, ids: tuple[int, ...], token: int) -> float:
        if self.fuse is None:
            return 0.0
        if ids not in self.known:
            self.known[ids] = self.fuse(ids)
        return float(self.known[ids][token])


class ShallowFusion:
    """A `scorer` for `beam_search`: scores of `scorer` (None: the step's) + `weight`·log p_lm(token | text) + `bonus`
    for each token that begins a word (`starts`), since every word costs probability.

    `prompt`: ids before the text. With a bonus the score of an active beam can rise, so the search may stop before a
    longer and better text; small bonuses do not show it."""

    def __init__(
        self, scorer: LogitsProcessor | None, lm: LanguageModel, weight: float, prompt: int,
        bonus: float = 0.0, starts: "WordStarts | None" = None,
    ):  # fmt: skip
        self.scorer, self.lm, self.weight, self.prompt = scorer, lm, weight, prompt
        self.bonus, self.starts = bonus, starts

    def __call__(self, ids: Int[Tensor, "R N"], logprobs: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        scores = logprobs if self.scorer is None else self.scorer(ids, logprobs)
        if self.weight:
            scores = scores + self.weight * self.lm(ids[:, self.prompt :]).to(scores)
        if self.bonus and self.starts is not None:
            scores = scores + self.bonus * self.starts(ids[:, self.prompt :]).to(scores)
        return scores

    def reorder_rows(self, rows: Int[Tensor, "R"]) -> None:
        """The rows whose texts those of the next call continue."""
        for part in (self.scorer, self.lm):
            if (reorder := getattr(part, "reorder_rows", None)) is not None:
                reorder(rows)


class WordStarts:
    """Mask of the next tokens that begin a word: those with a space before text; after a space or at the start also
    those without."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device):
        texts = [tokenizer.decode([i], skip_control=False) for i in range(tokenizer.vocab_size)]
        spaces = [text.startswith(" ") for text in texts]
        words = [bool(text.strip(" ")) and i not in tokenizer.control for i, text in enumerate(texts)]
        self.spaces, self.words = (torch.tensor(part, device=device) for part in (spaces, words))

    def __call__(self, ids: Int[Tensor, "R N"]) -> Bool[Tensor, "R V"]:
        if not ids.shape[1]:
            return self.words.expand(len(ids), -1)
        after_space = (self.spaces & ~self.words)[ids[:, -1:]]
        return self.words & (self.spaces | after_space)


class NeuralScorer:
    """A `LanguageModel` from a causal `TextTransformer` with logits, whose texts begin with `bos`.

    It caches keys and values of the last texts and continues texts that are one token longer: in a beam search those
    that `reorder_rows` names, else it compares texts, on the host. A text that fills the context continues from its
    last half."""

    def __init__(self, model: TextTransformer, bos: int):
        self.model, self.bos = model, bos
        self.texts: Tensor | None = None
        self.parents: Tensor | None = None
        self.cache = Cache(0)
        self.single: dict[tuple[int, ...], Cache] = {}  # of `after`, the latest last

    def reorder_rows(self, rows: Int[Tensor, "R"]) -> None:
        """The rows whose texts those of the next call continue."""
        self.parents = rows

    @torch.inference_mode()
    def __call__(self, ids: Int[Tensor, "R N"]) -> Float[Tensor, "R V"]:
        parents = self._parents(ids)
        if parents is None or self.cache.length == self.model.config.context:
            self.cache, new = self.model.new_cache(), self._whole(ids)
        else:
            self.cache.reorder(parents)
            new = ids[:, -1:]
        self.texts = ids
        return self._logprobs(new, self.cache)

    @torch.inference_mode()
    def after(self, ids: tuple[int, ...]) -> Float[Tensor, "V"]:
        """Natural log-probabilities of the next token of one text. It continues the text without its last token, if
        that was among the last `KEPT`."""
        device = next(self.model.parameters()).device
        text, before = torch.tensor([ids], dtype=torch.long, device=device), self.single.get(ids[:-1])
        if not ids or before is None or before.length == self.model.config.context:
            cache, new = self.model.new_cache(), self._whole(text)
        else:
            cache, new = copy.deepcopy(before), text[:, -1:]
        self.single[ids] = cache
        if len(self.single) > KEPT:
            del self.single[next(iter(self.single))]
        return self._logprobs(new, cache)[0]

    def _whole(self, ids: Int[Tensor, "R N"]) -> Int[Tensor, "R M"]:
        """The start and the texts, or their last half where they fill the context, or each further step would compute
        the whole context again."""
        context = self.model.config.context
        kept = ids if ids.shape[1] < context else ids[:, -(context // 2) :]
        return torch.cat([ids.new_full((len(ids), 1), self.bos), kept], 1)

    def _logprobs(self, new: Int[Tensor, "R T"], cache: Cache) -> Float[Tensor, "R V"]:
        return self.model(new, cache=cache, last=1)[:, -1].float().log_softmax(-1)

    def _parents(self, ids: Int[Tensor, "R N"]) -> Int[Tensor, "R"] | None:
        """The rows of the last texts that these continue by a token; None if one continues none."""
        told, self.parents = self.parents, None
        if self.texts is None or ids.shape[1] != self.texts.shape[1] + 1:
            return None
        if told is not None and len(told) == len(ids):
            return told
        rows = {tuple(text): row for row, text in enumerate(self.texts.tolist())}
        found = [rows.get(tuple(text[:-1])) for text in ids.tolist()]
        return None if None in found else torch.tensor(found, device=ids.device)
