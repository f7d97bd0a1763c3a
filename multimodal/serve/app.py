"""The application: its state, its routes, its answers to errors."""

import contextlib
import threading
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from multimodal import __version__
from multimodal.errors import MultimodalError, one_line
from multimodal.serve.errors import HttpError, as_http
from multimodal.serve.guard import Guard
from multimodal.serve.jobs.images import SearchedIndex
from multimodal.serve.models import Models
from multimodal.serve.options import ServeOptions
from multimodal.serve.routes import audio, chat, completions, embeddings, live, rerank, system, vision
from multimodal.serve.state import Server
from multimodal.serve.uploads import UploadFolder


def create(options: ServeOptions) -> Guard:
    """The ASGI application. Raises UsageError for options that contradict each other."""
    server = Server(options, Models(options))
    for name, folder in options.index:
        server.indexes[name] = SearchedIndex.opened(folder, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        uploads = UploadFolder()
        server.folder = uploads.path
        threading.Thread(target=server.load, daemon=True).start()
        try:
            yield
        finally:
            server.models.stop()
            uploads.remove()

    app = FastAPIOffline(
        title="multimodal", version=__version__, lifespan=lifespan, redoc_url=None, static_url="/docs-files"
    )
    app.state.server = server
    for part in (audio, chat, completions, embeddings, live, rerank, system, vision):
        app.include_router(part.router)
    invalid = (RequestValidationError, ValidationError)
    for kind in (MultimodalError, HttpError, *invalid, OSError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, _http)
    if options.page:
        system.add_page(app)
    guard = Guard(app, options, server.metrics)
    app.state.guard = guard
    return guard


async def _answer(request: Request, error: Exception) -> JSONResponse:
    told = as_http(error)
    return JSONResponse(told.body, told.status, told.headers)


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    """A path or method that does not exist, or a body that is JSON and cannot be read."""
    if error.status_code == 400 and error.__cause__ is not None:
        told = HttpError(400, f"body: cannot be read ({one_line(error.__cause__).partition(';')[0]})")
        return JSONResponse(told.body, told.status)
    text = f"{request.method} {request.url.path[:100]}: {str(error.detail).lower()}"
    told = HttpError(error.status_code, text, "not_found" if error.status_code == 404 else None)
    return JSONResponse(told.body, told.status, error.headers)
