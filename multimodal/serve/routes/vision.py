"""/v1/classify and /v1/search."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from multimodal.errors import UsageError
from multimodal.serve.calls import named, opening, outcome
from multimodal.serve.errors import HttpError
from multimodal.serve.jobs.images import checked, thumbnail
from multimodal.serve.media import Media
from multimodal.serve.state import server_of
from multimodal.serve.uploads import Form, received

router = APIRouter(prefix="/v1", tags=["vision"])
MOST = 256  # images of a request


class ClassificationRequest(BaseModel):
    """`images`: data URLs, or others that the server may read. The same fields may come as a form, with files as
    `images` and a `labels` each."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={
        "examples": [{"images": ["data:image/jpeg;base64,…"], "labels": ["a dog", "a cat"]}]
    })  # fmt: skip

    images: list[str] = Field(min_length=1, max_length=MOST)
    labels: list[str] | None = Field(None, max_length=100_000)
    model: str | None = None
    templates: str | Annotated[list[str], Field(max_length=1000)] | None = None
    threshold: float | None = None
    top: int | None = Field(None, ge=1)
    heatmaps: int = Field(0, ge=0, le=10, description="best labels of which a heat map is drawn")


BODY = {"required": True, "content": {
    "application/json": {"schema": ClassificationRequest.model_json_schema()},
    "multipart/form-data": {"schema": {"type": "object", "properties": {
        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "labels": {"type": "array", "items": {"type": "string"}}, "threshold": {"type": "number"},
        "top": {"type": "integer"}, "heatmaps": {"type": "integer"}, "model": {"type": "string"},
        "templates": {"type": "array", "items": {"type": "string"}},
    }}},
}}  # fmt: skip


@router.post("/classify", openapi_extra={"requestBody": BODY})
async def classify(request: Request) -> dict[str, Any]:
    """Scores of labels for images, zero-shot, or of the classes of a ViT with a head."""
    server = server_of(request)
    if request.headers.get("content-type", "").startswith("multipart/"):
        async with received(request, server.folder) as form:
            return await _scored(request, *_from_form(form))
    asked = ClassificationRequest.model_validate_json(await request.body())
    async with contextlib.AsyncExitStack() as leave:
        media = Media(request, leave)
        return await _scored(
            request, asked, [await media.read(one, f"images[{i}]") for i, one in enumerate(asked.images)]
        )


def _from_form(form: Form) -> tuple[ClassificationRequest, list[Path | bytes]]:
    """The request in a form, and its images. Raises HttpError, ValidationError."""
    if unknown := [name for name in form.files if name not in ("images", "file")]:
        raise HttpError(400, f"{unknown[0][:60]}: expected no file (images are)", param=unknown[0][:60])
    files = form.files.get("images", []) + form.files.get("file", [])
    if not files or "images" in form.texts:
        raise HttpError(400, "images: expected files in a form", param="images")
    lists = ("labels", "templates") if len(form.texts.get("templates", [])) > 1 else ("labels",)
    values = {name: found if name in lists else form.text(name) for name, found in form.texts.items()}
    return ClassificationRequest.model_validate(values | {"images": ["form"] * len(files)}), files


async def _scored(request: Request, asked: ClassificationRequest, images: list[Any]) -> dict[str, Any]:
    server = server_of(request)
    model = server.classifier(asked.model)
    places = [f"images[{i}]" for i in range(len(images))]
    names = {str(path): place for path, place in zip(images, places, strict=True) if isinstance(path, Path)}
    read = lambda: checked(images, server.options.max_megapixels, places)
    options = (asked.labels, asked.templates, asked.threshold, asked.top, asked.heatmaps)
    make = lambda _: model.classify(read(), *options)
    with named(names):
        results = await outcome(request, model.served.lane, make)
    data = [{"index": i, **{k: v for k, v in one.items() if k != "file"}} for i, one in enumerate(results)]
    return {"object": "list", "data": data, "model": model.served.name}


class SearchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"text": "two dogs", "top": 5}]})

    index: str | None = None
    text: str | None = None
    image: str | None = None  # a URL, as in ClassificationRequest
    top: int = Field(10, ge=1, le=1000)
    thumbnails: bool = False  # of the images, as data URLs


@router.post("/search")
async def search(request: Request, body: SearchRequest) -> dict[str, Any]:
    """The images of an index nearest to a text or an image. `thumbnails`: small JPEGs of them, or of frames of
    videos; null for what can no longer be read."""
    server = server_of(request)
    server.models.check()
    if (body.text is None) == (body.image is None):
        raise UsageError("expected either a text or an image", argument="text")
    if not server.indexes:
        raise HttpError(404, "this server has no index", "index_not_found")
    name = body.index or next(iter(server.indexes))
    if name not in server.indexes:
        known = ", ".join(server.indexes)
        raise HttpError(404, f"index: {name[:60]!r} is not served (served: {known})", "index_not_found", "index")
    found = server.indexes[name]
    texts = [] if body.text is None else [body.text]
    async with contextlib.AsyncExitStack() as leave:
        media = Media(request, leave)
        images = [] if body.image is None else [await media.read(body.image, "image")]
        places, most = ["image"] * len(images), server.options.max_megapixels
        make = lambda _: found.search(texts, checked(images, most, places), body.top)
        with named(media.names):
            (hits,) = await outcome(request, found.lane, make)
    if body.thumbnails:
        small = await anyio.to_thread.run_sync(lambda: [thumbnail(one["file"]) for one in hits], limiter=opening())
        hits = [one | {"thumbnail": url} for one, url in zip(hits, small, strict=True)]
    return {"object": "list", "index": name, "data": hits}
