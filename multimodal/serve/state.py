"""The state that all routes share."""

import gc
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from multimodal.errors import MultimodalError
from multimodal.serve.guard import Metrics
from multimodal.serve.jobs.images import ClassifyingModel, SearchedIndex
from multimodal.serve.jobs.texts import ChatModel, EmbeddingModel
from multimodal.serve.models import Models, ServedModel, Task
from multimodal.serve.options import ServeOptions

DOWNLOADS = 16  # at once
log = logging.getLogger(__name__)


@dataclass
class Server:
    """Options, models, counts, and what was made of the models for a task."""

    options: ServeOptions
    models: Models
    metrics: Metrics = field(default_factory=Metrics)
    folder: Path | None = None  # of uploads
    live: int = 0  # live recordings
    fetching: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(DOWNLOADS))
    chats: dict[str, ChatModel] = field(default_factory=dict)
    embedders: dict[str, EmbeddingModel] = field(default_factory=dict)
    classifiers: dict[str, ClassifyingModel] = field(default_factory=dict)
    indexes: dict[str, SearchedIndex] = field(default_factory=dict)

    def of(self, task: Task, name: str | None) -> ServedModel:
        return self.models.of(task, name)

    def chat(self, name: str | None) -> ChatModel:
        served = self.of("chat", name)
        return self.chats.setdefault(served.name, ChatModel(served))

    def embedder(self, task: Task, name: str | None) -> EmbeddingModel:
        served = self.of(task, name)
        if served.name not in self.embedders:
            self.embedders[served.name] = EmbeddingModel(served)
        return self.embedders[served.name]

    def classifier(self, name: str | None) -> ClassifyingModel:
        served = self.of("classify", name)
        return self.classifiers.setdefault(served.name, ClassifyingModel(served))

    def load(self) -> None:
        """Load models and indexes, in a thread of its own."""
        try:
            self.models.load_all()
            gc.collect()
            gc.freeze()  # the collector need not walk what stays
            for one in self.models.served.values():
                one.lane.batches = self.metrics.batches.labels(one.name).observe
        except Exception as error:
            log.error("%s", error, exc_info=None if isinstance(error, MultimodalError) else error)


def server_of(request: Any) -> Server:
    """The shared state, of a request or a socket."""
    return request.app.state.server
