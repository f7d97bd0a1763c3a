"""The models of a server: each loaded once, with the tasks that it can do and a thread of its own."""

import threading
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from multimodal.errors import CheckpointError, MultimodalError, UsageError, did_you_mean
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.any_to_text import AnyToText
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.serve.jobs.lane import Lane
from multimodal.serve.options import ServeOptions
from multimodal.tasks.classify.head import has_head
from multimodal.tasks.encode.loaded import device_of
from multimodal.tasks.encode.search_defaults import warn_of_search
from multimodal.tasks.text.embed import is_language_model
from multimodal.tasks.text.options import GenerateOptions, TranslateOptions
from multimodal.tasks.transcribe.options import SpeechDecodingOptions
from multimodal.tokens.text.languages import LANGUAGES
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

Task = Literal["transcribe", "classify", "embed-images", "embed", "rerank", "chat", "translate"]
KINDS: dict[str, tuple[Task, ...]] = {
    **dict.fromkeys(("speech_to_text", "joint_conformer", "transducer", "moonshine", "canary"), ("transcribe",)),
    "any_to_text": ("chat",),
    "clip": ("classify", "embed-images", "embed"), "coca": ("classify", "embed-images", "embed"),
}  # fmt: skip


class ServedModel(NamedTuple):
    name: str
    checkpoint: Checkpoint
    tasks: tuple[Task, ...]
    lane: Lane


class NoModelError(UsageError):
    """No such model, or none for the task."""


class NotReadyError(MultimodalError):
    """Models are still loading, or could not be loaded."""


def tasks_of(checkpoint: Checkpoint) -> tuple[Task, ...]:
    """Tasks of a model. Raises CheckpointError for one that no endpoint takes."""
    model = checkpoint.model
    if found := KINDS.get(checkpoint.kind):
        return found
    if checkpoint.kind == "vit":
        return ("classify", "embed-images") if has_head(checkpoint) else ("embed-images",)
    if isinstance(model, TextTransformer):
        other: Task = "rerank" if model.config.classes == 1 else "embed"  # a cross-encoder
        return ("chat",) if is_language_model(checkpoint) else (other,)
    if isinstance(model, EncoderDecoder):
        return ("translate",) if checkpoint.required_tokenizer().language_ids else ("chat",)
    raise CheckpointError(f"model {checkpoint.source}: cannot be served, no endpoint takes a {checkpoint.kind}")


def media_of(checkpoint: Checkpoint) -> list[str]:
    """Kinds of media that messages to a model may hold."""
    if not isinstance(checkpoint.model, AnyToText):
        return []
    kinds = [kind for kind in ("image", "audio") if getattr(checkpoint.model, kind) is not None]
    return [*kinds, "video"] if "image" in kinds else kinds


def languages_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Names by code of the languages among which a Whisper model chooses; {} for others."""
    tokenizer = checkpoint.tokenizer
    several = isinstance(tokenizer, WhisperTokenizer) and tokenizer.multilingual
    return {code: LANGUAGES[code] for code in tokenizer.languages} if several else {}


def _warn_of_search(checkpoint: Checkpoint) -> None:
    """Warn of settings of texts that the checkpoint asks for and that its answers do not follow."""
    tasks = tasks_of(checkpoint)
    if "chat" in tasks:
        warn_of_search(checkpoint, {}, GenerateOptions, dropped=("beam_size", "early_stopping"))
    elif "translate" in tasks:
        warn_of_search(checkpoint, {}, TranslateOptions, checkpoint.required_tokenizer().pad_id)
    elif "transcribe" in tasks:
        warn_of_search(checkpoint, {}, SpeechDecodingOptions)


class Models:
    """Models by name, loaded by `load_all`. Raises NotReadyError until they are there."""

    def __init__(self, options: ServeOptions):
        self.options, self.aliases = options, dict(options.alias)
        self.served: dict[str, ServedModel] = {}
        self.failure: Exception | None = None
        self.ready = threading.Event()

    def load_all(self) -> None:
        """Load the models in order. Raises what an unusable one does, and keeps it as `failure`."""
        o = self.options
        if o.threads:
            torch.set_num_threads(o.threads)
        try:
            for name in o.models:
                loaded = load(name)
                checkpoint = prepare_for_inference(loaded, o.compute_type, device_of(o.device, loaded))
                checkpoint = replace(checkpoint, source=name)  # messages name models as clients do
                _warn_of_search(checkpoint)
                self.served[name] = ServedModel(name, checkpoint, tasks_of(checkpoint),
                                                Lane(name, o.batch_size, o.queue))  # fmt: skip
        except Exception as error:
            self.failure = error
            raise
        self.ready.set()

    @property
    def loading(self) -> bool:
        return not self.ready.is_set() and self.failure is None

    def check(self) -> None:
        if not self.ready.is_set():
            raise NotReadyError("models are loading" if self.failure is None else "models could not be loaded")

    def of(self, task: Task, name: str | None) -> ServedModel:
        """The named model, or the first one of a task, one for texts alone before a CLIP. Raises NoModelError,
        NotReadyError."""
        self.check()
        able = {one.name: one for one in self.served.values() if task in one.tasks}
        if name is None:
            if not able:
                raise NoModelError(f"must be one that can {task} (served: {', '.join(self.served)})", argument="model")
            return next((one for one in able.values() if one.tasks == (task,)), next(iter(able.values())))
        found = self.named(name)
        if task not in found.tasks:
            others = ", ".join(able) or "none"
            raise NoModelError(f"{name!r:.80}: cannot {task} (able: {others})", argument="model")
        return found

    def named(self, name: str) -> ServedModel:
        """The model of a name or alias. Raises NoModelError."""
        found = self.served.get(self.aliases.get(name, name))
        if found is None:
            known = [*self.served, *self.aliases]
            raise NoModelError(f"{name!r:.80}: not served{did_you_mean(name, known)} (served: {', '.join(known)})",
                               argument="model")  # fmt: skip
        return found

    def stop(self) -> None:
        for one in self.served.values():
            one.lane.stop()
