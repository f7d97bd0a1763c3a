"""/v1/embeddings, as OpenAI's, of texts and of images."""

import base64
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from multimodal.serve.calls import outcome
from multimodal.serve.errors import HttpError
from multimodal.serve.routes.chat import data_url
from multimodal.serve.state import server_of

router = APIRouter(prefix="/v1", tags=["embeddings"])
MOST = 2048  # inputs, as OpenAI's


class EmbeddingRequest(BaseModel):
    """`input`: a text or several; or images as data URLs or {"image": data URL}, to a model of images."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"input": ["a dog", "a cat"]}]})

    input: str | dict[str, Any] | list[str | dict[str, Any]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


def _image(one: str | dict[str, Any], where: str) -> bytes | None:
    """Bytes of an image; None for a text."""
    if isinstance(one, dict):
        found = one.get("image", one.get("image_url"))
        return data_url(found.get("url") if isinstance(found, dict) else found, where)
    return data_url(one, where) if one.startswith("data:image/") else None


@router.post("/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
    """Unit vectors."""
    server = server_of(request)
    inputs = body.input if isinstance(body.input, list) else [body.input]
    if not 0 < len(inputs) <= MOST:
        raise HttpError(400, f"input: expected 1 to {MOST} (got {len(inputs)})", param="input")
    images = [_image(one, f"input[{i}]") for i, one in enumerate(inputs)]
    of_images = images[0] is not None
    if any((one is not None) != of_images for one in images):
        raise HttpError(400, "input: expected texts or images, not both at once", param="input")
    model = server.embedder("embed-images" if of_images else "embed", body.model)
    make = lambda _: model.images(images) if of_images else model.texts(inputs)
    vectors = await outcome(request, model.served.lane, make, server.options.seconds)
    if body.dimensions not in (None, vectors.shape[1]):
        raise HttpError(400, f"dimensions: {model.served.name} has {vectors.shape[1]} (got {body.dimensions})",
                        param="dimensions")  # fmt: skip
    data = [{"object": "embedding", "index": i, "embedding": _written(vector, body.encoding_format)}
            for i, vector in enumerate(vectors)]  # fmt: skip
    tokens = 0 if of_images else model.tokens(inputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model.served.name, "usage": usage}


def _written(vector: np.ndarray, encoding: str) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
