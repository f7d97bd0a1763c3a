"""/v1/models, /health, /metrics and the page."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from multimodal.serve.models import languages_of, media_of
from multimodal.serve.state import server_of

router = APIRouter(tags=["server"])
PAGE = Path(__file__).parents[1] / "page"
# the page gets its own files and what it makes itself, so that text of a client or a model runs nothing
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src blob:; "
          "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")  # fmt: skip
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
           "cache-control": "no-cache"}  # fmt: skip


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def models(request: Request) -> dict[str, Any]:
    """The models, with the tasks of each, the media of a chat and the languages among which a recognizer chooses; the
    first of a task answers where none is named."""
    served = server_of(request).models
    served.check()
    data = [
        {"id": one.name, "object": "model", "created": 0, "owned_by": "multimodal", "tasks": list(one.tasks),
         "media": media_of(one.checkpoint), "languages": languages_of(one.checkpoint),
         "summary": one.checkpoint.card.get("summary", "")}
        for one in served.served.values()
    ]  # fmt: skip
    data += [{"id": alias, "object": "model", "created": 0, "owned_by": "multimodal", "alias_of": name}
             for alias, name in served.aliases.items()]  # fmt: skip
    return {"object": "list", "data": data, "indexes": list(server_of(request).indexes)}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One of the models, as in their list."""
    listed = (await models(request))["data"]
    server_of(request).models.named(name)
    return next(one for one in listed if one["id"] == name)


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 once all models are loaded, 503 before, and while the server stops."""
    server, guard = server_of(request), request.app.state.guard
    models = server.models
    state = "stopping" if guard.draining else "ready" if models.ready.is_set() else "loading"
    state = "failed" if models.failure is not None else state
    waiting = [name for name in models.options.models if name not in models.served]
    told = {"status": state, "models": list(models.served), "loading": waiting}
    return JSONResponse(told, 200 if state == "ready" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counts for Prometheus, of all workers together."""
    return Response(server_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def add_page(app: FastAPI) -> None:
    app.mount("/page", PageFiles(directory=PAGE), name="page")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=HEADERS)


class PageFiles(StaticFiles):
    """Files of the page, which browsers ask for again after an update."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        made = super().file_response(*args, **kwargs)
        made.headers.update(HEADERS)
        return made
