"""Relevance of documents to a query, by a cross-encoder."""

import itertools
from collections.abc import Sequence

import torch

from multimodal.errors import CheckpointError
from multimodal.serve.jobs.lane import Job, Work, one_request
from multimodal.serve.models import ServedModel
from multimodal.tasks.text.answer import chooser, row_logits
from multimodal.tasks.text.embed import check_text
from multimodal.tokens.text.pieces import PairRow, pair_row
from multimodal.weights.folder import Checkpoint

ACTIVATIONS = {"Sigmoid": torch.sigmoid, "Identity": torch.Tensor.clone}


def relevance(served: ServedModel, query: str, documents: Sequence[str]) -> tuple[Job, int]:
    """A job with the score of each document, as sentence-transformers' CrossEncoder gives it, and the number of tokens
    read. Raises TextError, also for a pair beyond the context, CheckpointError."""
    checkpoint = chooser(served.checkpoint)
    tokenizer, activation = checkpoint.required_tokenizer(), ACTIVATIONS[activation_of(checkpoint)]
    check_text(query, "query")
    asked, context = tokenizer.encode(query), checkpoint.model.config.context
    rows = [pair_row(asked, one, tokenizer, context, f"documents[{i}]") for i, one in enumerate(documents)]

    def serve(payloads: list[list[PairRow]]) -> list[list[float]]:
        scores = iter(activation(row_logits(list(itertools.chain(*payloads)), checkpoint.model)).tolist())
        return [list(itertools.islice(scores, len(one))) for one in payloads]

    return one_request(Work("rerank", rows, serve)), sum(len(row.ids) for row in rows)


def activation_of(checkpoint: Checkpoint) -> str:
    """Name of the function from logit to score: the checkpoint's own, else Sigmoid. Raises CheckpointError."""
    card = checkpoint.card
    own = (card.get("sentence_transformers") or {}).get("activation_fn")
    name = own or card.get("sbert_ce_default_activation_function") or "Sigmoid"
    if (found := str(name).rpartition(".")[2]) not in ACTIVATIONS:
        expected = " or ".join(ACTIVATIONS)
        raise CheckpointError(f"model {checkpoint.source}: activation_fn must be {expected} (got {name!r:.60})")
    return found
