"""Heads on a text model: classes of texts, tags of tokens, answers in a context, choices; and a bag of words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.data.datasets.annotated.choices import ChoiceBatch
from multimodal.data.datasets.annotated.questions import AnswerBatch
from multimodal.data.datasets.annotated.tagged import TagBatch
from multimodal.data.datasets.labelled_texts import ClassBatch, LabelledText
from multimodal.data.datasets.text import IGNORED
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.evaluate.classification import class_logits
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint

HEADS = ("classes", "tags", "spans")


def with_head(
    known: Checkpoint, dropout: float, fresh: bool = False, classes: int = 0, tags: int = 0, spans: bool = False,
    keep: bool = False,
) -> tuple[TextTransformer, list[str]]:  # fmt: skip
    """Build a model with one head from a text model's weights, or random ones if `fresh`; return it, and the names
    of its head and new parts. Other heads are dropped; with `keep` one of this kind and size keeps its weights. For
    `classes` (1: a choice's score) an encoder without a pooler gets one (Devlin et al. 2019, section 4.1); a causal
    model classifies its last token (Radford et al. 2018, section 3.2). `tags` and `spans` are of each token. `dropout`
    replaces the model's own.

    Raises CheckpointError for another model."""
    if not isinstance(known.model, TextTransformer) or known.model.embed is None or known.tokenizer is None:
        raise CheckpointError(f"{known.source}: expected a text model with a tokenizer, got {known.kind}")
    own: TextConfig = known.model.config
    attention = replace(own.stack.block.attention, dropout=dropout)
    block = replace(own.stack.block, attention=attention, dropout=dropout)
    pool = own.pool or (None if own.causal or not classes else "tanh")
    model = TextTransformer(replace(
        own, stack=replace(own.stack, block=block), tied=None, transform=False, head_bias=False, detect=False,
        stem_dropout=dropout, pool=pool, classes=classes, tags=tags, spans=spans,
    ))  # fmt: skip
    head = next(name for name in HEADS if getattr(model, name) is not None)
    torch.nn.init.normal_(getattr(model, head).weight, std=0.02)
    torch.nn.init.zeros_(getattr(model, head).bias)
    if fresh:
        return model, []
    weights = known.model.state_dict()
    made = model.state_dict()
    own = {name for name in made if name.startswith(f"{head}.")}
    kept = {name for name in own if keep and name in weights and weights[name].shape == made[name].shape}
    old = {name for name in made if name in weights and (name in kept or name not in own)}
    model.load_state_dict({name: weights[name] for name in old}, strict=False)
    return model, sorted({name.split(".")[0] for name in made if name in own or name not in old})


class ClassifyText(Summed):
    """Cross-entropy over labels."""

    def forward(self, batch: ClassBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(class_logits(self.model, batch), batch.labels, reduction="sum")}

    def counts(self, batch: ClassBatch) -> dict[str, int]:
        return {"loss": len(batch.labels)}


class TagTokens(Summed):
    """Cross-entropy over the tags of the words' first tokens."""

    def forward(self, batch: TagBatch) -> dict[str, Tensor]:
        logits = self.model.tags(_dropped(self.model, self.model.states(batch.ids, valid=batch.valid)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum",
                                        ignore_index=IGNORED)}  # fmt: skip

    def counts(self, batch: TagBatch) -> dict[str, Tensor]:
        return {"loss": (batch.targets != IGNORED).sum()}


class FindAnswers(Summed):
    """Mean of the cross-entropies of an answer's first and last token (Devlin et al. 2019, section 4.2)."""

    def forward(self, batch: AnswerBatch) -> dict[str, Tensor]:
        states = _dropped(self.model, pair_batch_states(self.model, batch))
        logits = self.model.spans(states).float().masked_fill(~batch.valid[..., None], -torch.inf)
        ends = zip(logits.unbind(-1), (batch.starts, batch.ends), strict=True)
        return {"loss": sum(F.cross_entropy(own, wanted, reduction="sum") for own, wanted in ends) / 2}

    def counts(self, batch: AnswerBatch) -> dict[str, int]:
        return {"loss": len(batch.starts)}


class ChooseAnswer(Summed):
    """Cross-entropy over the choices of a question."""

    def forward(self, batch: ChoiceBatch) -> dict[str, Tensor]:
        pooled = self.model.pooled(pair_batch_states(self.model, batch), batch.valid)
        scores = self.model.classes(_dropped(self.model, pooled)).float().view(len(batch.labels), -1)
        return {"loss": F.cross_entropy(scores, batch.labels, reduction="sum")}

    def counts(self, batch: ChoiceBatch) -> dict[str, int]:
        return {"loss": len(batch.labels)}


def pair_batch_states(model: TextTransformer, batch: AnswerBatch | ChoiceBatch) -> Float[Tensor, "B T D"]:
    """A model of one segment gets no second one."""
    return model.states(batch.ids, valid=batch.valid, segments=batch.segments if model.config.segments > 1 else None)


def _dropped(model: TextTransformer, states: Tensor) -> Tensor:
    return F.dropout(states, model.config.stem_dropout, model.training)


def bag_of_words(train: Sequence[LabelledText], test: Sequence[LabelledText]) -> Mapping[str, float]:
    """Score logistic regression on word counts (scikit-learn, C = 1)."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    words = CountVectorizer(token_pattern=r"\S+")
    counts = words.fit_transform([row.text for row in train])
    model = LogisticRegression(max_iter=1000).fit(counts, [row.label for row in train])
    return {"accuracy": float(model.score(words.transform([row.text for row in test]), [row.label for row in test]))}
