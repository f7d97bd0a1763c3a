"""/v1/embeddings, as OpenAI's, of texts and of images."""

import base64
import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from multimodal.serve.calls import named, opening, outcome
from multimodal.serve.errors import HttpError
from multimodal.serve.jobs.images import checked
from multimodal.serve.media import Media
from multimodal.serve.state import server_of

router = APIRouter(prefix="/v1", tags=["embeddings"])
MOST = 2048  # inputs, as OpenAI's
Ids = Annotated[list[int], Field(fail_fast=True)]


class EmbeddingRequest(BaseModel):
    """`input`: a text or several, or lists of token ids as the model encodes a text; or images as data URLs or
    {"image": URL}, to a model of images. `dimensions`: the first ones alone, scaled to length 1, as Matryoshka models
    are made for."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"input": ["a dog", "a cat"]}]})

    input: str | dict[str, Any] | Ids | Annotated[list[str | dict[str, Any] | Ids], Field(fail_fast=True)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


def _is_text(one: Any) -> bool:
    return isinstance(one, list) or (isinstance(one, str) and one[:11].lower() != "data:image/")


async def _image(one: str | dict[str, Any], where: str, media: Media) -> bytes | Path:
    found = one.get("image", one.get("image_url")) if isinstance(one, dict) else one
    return await media.read(found.get("url") if isinstance(found, dict) else found, where)


@router.post("/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
    """Unit vectors."""
    server = server_of(request)
    several = isinstance(body.input, list) and not (body.input and isinstance(body.input[0], int))
    inputs: list[Any] = body.input if several else [body.input]
    if not 0 < len(inputs) <= MOST:
        raise HttpError(400, f"input: expected 1 to {MOST} (got {len(inputs)})", param="input")
    of_images = not _is_text(inputs[0])
    if any(_is_text(one) == of_images for one in inputs):
        raise HttpError(400, "input: expected texts or images, not both at once", param="input")
    model = server.embedder("embed-images" if of_images else "embed", body.model)
    texts, tokens = list[str](), 0
    if not of_images:
        texts, tokens = await anyio.to_thread.run_sync(model.read, inputs, limiter=opening())
    async with contextlib.AsyncExitStack() as leave:
        media = Media(request, leave)
        images = [await _image(one, f"input[{i}]", media) for i, one in enumerate(inputs)] if of_images else []
        most = server.options.max_megapixels
        places = [f"input[{i}]" for i in range(len(images))]
        make = lambda _: model.images(checked(images, most, places)) if of_images else model.texts(texts)
        with named(media.names):
            vectors = await outcome(request, model.served.lane, make)
    if body.dimensions is not None:
        vectors = cut(vectors, body.dimensions, model.served.name)
    data = [{"object": "embedding", "index": i, "embedding": _written(vector, body.encoding_format)}
            for i, vector in enumerate(vectors)]  # fmt: skip
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model.served.name, "usage": usage}


def cut(vectors: np.ndarray, count: int, name: str) -> np.ndarray:
    """The first dimensions, scaled to length 1. Raises HttpError for more than there are."""
    if count > vectors.shape[1]:
        raise HttpError(400, f"dimensions: {name} has {vectors.shape[1]} (got {count})", param="dimensions")
    kept = vectors[:, :count]
    return kept / np.linalg.norm(kept, axis=1, keepdims=True).clip(1e-12)


def _written(vector: np.ndarray, encoding: str) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
