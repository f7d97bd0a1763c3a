"""/v1/rerank, as Cohere's, Jina's and vLLM's."""

import uuid
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from multimodal.serve.calls import opening, outcome
from multimodal.serve.jobs.rerank import relevance
from multimodal.serve.state import server_of

router = APIRouter(tags=["text"])
MOST = 2048  # documents
EXAMPLE = {"query": "Who barks?", "documents": ["A dog barks.", "A cat sleeps."], "top_n": 1}


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str


class RerankRequest(BaseModel):
    """`top_n`: the best ones alone. `return_documents`: each result with its text."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [EXAMPLE]})

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MOST, fail_fast=True)]
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = False
    user: str | None = None


@router.post("/v1/rerank")
@router.post("/v2/rerank", include_in_schema=False)  # Cohere's
@router.post("/rerank", include_in_schema=False)  # Infinity's
async def rerank(request: Request, body: RerankRequest) -> dict[str, Any]:
    """Documents by their relevance to a query, the best first."""
    served = server_of(request).of("rerank", body.model)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    job, tokens = await anyio.to_thread.run_sync(relevance, served, body.query, texts, limiter=opening())
    scores = await outcome(request, served.lane, lambda _: job)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    told = lambda i: {"document": {"text": texts[i]}} if body.return_documents else {}
    results = [{"index": i, "relevance_score": scores[i]} | told(i) for i in best]
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": served.name, "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}  # fmt: skip
