"""Text classification: labelled texts, a classifier on an encoder or causal model, metrics, and a bag of words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.data.datasets.labelled_texts import ClassBatch, LabelledText
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tasks.evaluate.classification import class_logits
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint


def classifier(
    known: Checkpoint, classes: int, dropout: float, fresh: bool = False
) -> tuple[TextTransformer, list[str]]:
    """Build a classifier from a text model's weights, or random ones if `fresh`; return it and its new parts. Token
    heads are dropped. An encoder without a pooler gets one (Devlin et al. 2019, section 4.1); a causal model classifies
    its last token (Radford et al. 2018, section 3.2). `dropout` replaces the model's own.

    Raises CheckpointError for another model."""
    if not isinstance(known.model, TextTransformer) or known.model.embed is None or known.tokenizer is None:
        raise CheckpointError(f"{known.source}: expected a text model with a tokenizer, got {known.kind}")
    own: TextConfig = known.model.config
    attention = replace(own.stack.block.attention, dropout=dropout)
    block = replace(own.stack.block, attention=attention, dropout=dropout)
    pool = own.pool or (None if own.causal else "tanh")
    model = TextTransformer(replace(
        own, stack=replace(own.stack, block=block), tied=None, transform=False, head_bias=False, detect=False,
        stem_dropout=dropout, pool=pool, classes=classes,
    ))  # fmt: skip
    torch.nn.init.normal_(model.classes.weight, std=0.02)
    torch.nn.init.zeros_(model.classes.bias)
    if fresh:
        return model, []
    weights = known.model.state_dict()
    new = [name for name in model.state_dict() if name not in weights or name.startswith("classes.")]
    model.load_state_dict({name: weights[name] for name in model.state_dict() if name not in new}, strict=False)
    return model, sorted({name.split(".")[0] for name in new})


class ClassifyText(Summed):
    """Cross-entropy over labels."""

    def forward(self, batch: ClassBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(class_logits(self.model, batch), batch.labels, reduction="sum")}

    def counts(self, batch: ClassBatch) -> dict[str, int]:
        return {"loss": len(batch.labels)}


def bag_of_words(train: Sequence[LabelledText], test: Sequence[LabelledText]) -> Mapping[str, float]:
    """Score logistic regression on word counts (scikit-learn, C = 1)."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    words = CountVectorizer(token_pattern=r"\S+")
    counts = words.fit_transform([row.text for row in train])
    model = LogisticRegression(max_iter=1000).fit(counts, [row.label for row in train])
    return {"accuracy": float(model.score(words.transform([row.text for row in test]), [row.label for row in test]))}
