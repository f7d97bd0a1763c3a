"""/v1/embeddings, as OpenAI's, of texts and of images."""

import base64
import contextlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from multimodal.serve.calls import named, outcome
from multimodal.serve.errors import HttpError
from multimodal.serve.jobs.images import checked
from multimodal.serve.media import Media
from multimodal.serve.state import server_of

router = APIRouter(prefix="/v1", tags=["embeddings"])
MOST = 2048  # inputs, as OpenAI's


class EmbeddingRequest(BaseModel):
    """`input`: a text or several; or images as data URLs or {"image": URL}, to a model of images."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"input": ["a dog", "a cat"]}]})

    input: str | dict[str, Any] | list[str | dict[str, Any]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


def _is_text(one: str | dict[str, Any]) -> bool:
    return isinstance(one, str) and not one.startswith("data:image/")


async def _image(one: str | dict[str, Any], where: str, media: Media) -> bytes | Path:
    found = one.get("image", one.get("image_url")) if isinstance(one, dict) else one
    return await media.read(found.get("url") if isinstance(found, dict) else found, where)


@router.post("/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
    """Unit vectors."""
    server = server_of(request)
    inputs = body.input if isinstance(body.input, list) else [body.input]
    if not 0 < len(inputs) <= MOST:
        raise HttpError(400, f"input: expected 1 to {MOST} (got {len(inputs)})", param="input")
    of_images = not _is_text(inputs[0])
    if any(_is_text(one) == of_images for one in inputs):
        raise HttpError(400, "input: expected texts or images, not both at once", param="input")
    model = server.embedder("embed-images" if of_images else "embed", body.model)
    async with contextlib.AsyncExitStack() as leave:
        media = Media(request, leave)
        images = [await _image(one, f"input[{i}]", media) for i, one in enumerate(inputs)] if of_images else []
        most = server.options.max_megapixels
        make = lambda _: model.images(checked(images, most)) if of_images else model.texts(inputs)
        with named(media.names):
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
