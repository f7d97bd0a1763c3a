"""Vectors of images and texts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, Unpack

import numpy as np
import torch
from jaxtyping import Float32

from multimodal.errors import MultimodalError, TextError, UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.clip import CLIP
from multimodal.system.files import shown
from multimodal.tasks.encode.arguments import EmbedderArguments
from multimodal.tasks.encode.attempts import in_parts, item_error
from multimodal.tasks.encode.columns import Columns, result_columns, source_column
from multimodal.tasks.encode.features import encoder
from multimodal.tasks.encode.images import ImageBatch, ImageReader, check_reading
from multimodal.tasks.encode.loaded import (
    Items,
    LoadedModel,
    Model,
    OnError,
    check_on_error,
    checked_results,
    device_of,
    loaded,
)
from multimodal.tasks.text.embed import check_text, embed
from multimodal.tokens.image.arrays import ImageInput
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.encode import image_features
from multimodal.weights.folder import Checkpoint

Kind = Literal["image", "text"]
TEXTS = 1024  # that are sorted by length together


class Embedder(LoadedModel):
    """Image and text encoder: loads a CLIP, a ViT or a text model once.

    Images have CLIP's vectors, or the pooled output of a ViT; texts CLIP's, or `pooling` of a text model's tokens (see
    `embed`). Without `model`, images have the default model of `embed-images` and texts that of `embed`, each loaded
    at its first use: their vectors are not comparable. `normalize`: to length 1; None: as the model's card says.
    `batch_tokens`: most tokens of texts side by side. `device`: `auto` is a GPU if there is one; `compute_type`: see
    `prepare_for_inference`. `urls`: read http and https URLs of images.

    Raises UsageError, CheckpointError."""

    def __init__(
        self, model: Model | None = None, *, pooling: str | None = None, normalize: bool | None = True,
        batch_size: int = 32, batch_tokens: int | None = None, workers: int | None = None,
        device: str | torch.device | None = "auto", compute_type: str = "auto", urls: bool = False,
    ):  # fmt: skip
        check_reading(batch_size, workers)
        self.model, self.compute_type, self.device = model, compute_type, device
        self.normalize, self.pooling, self.batch_tokens = normalize, pooling, batch_tokens
        self._checkpoints: dict[Kind | None, Checkpoint] = {}
        if model is not None:
            self._checkpoint("image")
        self._images = batch_size, workers, urls

    def _checkpoint(self, kind: Kind) -> Checkpoint:
        key = kind if self.model is None else None
        with self._lock:
            if key not in self._checkpoints:
                checkpoint = loaded(self.model, "embed-images" if kind == "image" else "embed")
                device = device_of(self.device, checkpoint)
                self._checkpoints[key] = prepare_for_inference(checkpoint, self.compute_type, device)
            return self._checkpoints[key]

    def __call__(self, batch: Columns) -> dict[str, np.ndarray]:
        """Columns vector and error of a batch of columns: bytes, image or path, or text (see `encode/columns.py`)."""
        name, values = source_column(batch)
        results = [result for _, result in self.many(values, "text" if name == "text" else "image")]
        width = next((len(one) for one in results if isinstance(one, np.ndarray)), 0)
        failed = {"vector": np.full(width, np.nan, np.float32)}
        return result_columns(batch, results, lambda vector: {"vector": vector}, failed)

    def images(self, images: ImageInput | Sequence[ImageInput]) -> Float32[np.ndarray, "N D"]:
        """One vector per image, in order. Raises ImageError, UsageError for a model without an image encoder."""
        several = list(images) if isinstance(images, list | tuple) else [images]
        if not several:
            raise UsageError("must hold at least one image (got 0)", argument="images")
        return np.stack([vector for _, vector in self.many(several, "image", on_error="raise")])  # type: ignore[misc]

    def texts(self, texts: str | Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """One vector per text, in order. Raises TextError, UsageError for a model without a text encoder. Warns
        (TextCut) of texts cut to the context."""
        with self._lock:
            return self._vectors([texts] if isinstance(texts, str) else texts)

    def many(
        self, items: Iterable[Any], kind: Kind = "image", *, keyed: bool = False, on_error: OnError = "return"
    ) -> Iterator[tuple[Any, Float32[np.ndarray, "D"] | MultimodalError]]:
        """Yield (key, vector) for each image or text, in order, as `Classifier.many` does."""
        check_on_error(on_error)
        if kind not in ("image", "text"):
            raise UsageError(f"must be image or text (got {shown(kind)})", argument="kind")
        sources = Items(items, keyed, paths=kind == "image")
        results = self._of_images(sources) if kind == "image" else self._of_texts(sources)
        return self._queued(checked_results(results, sources, on_error))

    def _of_images(self, sources: Items) -> Iterator[tuple[Any, Any]]:
        checkpoint = self._checkpoint("image")
        model = checkpoint.model
        encoder(checkpoint, "embedding" if isinstance(model, CLIP) else "pooled")  # checks the model

        def work(batch: ImageBatch, part: slice) -> Sequence[np.ndarray]:
            return list(self._unit(image_features(model, batch.pixels[part]), checkpoint))

        return ImageReader(known_preprocessing(checkpoint), *self._images).results(sources, work)

    def _of_texts(self, sources: Items) -> Iterator[tuple[Any, Any]]:
        remaining = iter(sources)
        for part in iter(lambda: list(islice(remaining, TEXTS)), []):
            results: dict[int, Any] = {}
            for item in part:
                try:
                    check_text(item.source, f"text {item.position + 1}")
                except TextError as error:
                    results[item.position] = error
            good = [item for item in part if item.position not in results]
            made = in_parts(lambda some: list(self._vectors([item.source for item in good[some]])), len(good))  # noqa: B023
            results |= {item.position: one for item, one in zip(good, made, strict=True)}
            for item in part:
                result = results[item.position]
                failed = isinstance(result, Exception)
                yield item.key, item_error(result, f"text {item.position + 1}", TextError) if failed else result

    def _vectors(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        checkpoint = self._checkpoint("text")
        return self._unit(embed(texts, checkpoint, self.pooling, False, self.batch_tokens), checkpoint)

    def _unit(self, vectors: torch.Tensor, checkpoint: Checkpoint) -> Float32[np.ndarray, "N D"]:
        normalize = bool(checkpoint.card.get("normalize")) if self.normalize is None else self.normalize
        vectors = vectors.float()
        return (torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors).cpu().numpy()


def embed_many(
    items: Iterable[Any], model: Model | None = None, kind: Kind = "image", *, keyed: bool = False,
    on_error: OnError = "return", **options: Unpack[EmbedderArguments],
) -> Iterator[tuple[Any, Float32[np.ndarray, "D"] | MultimodalError]]:  # fmt: skip
    """`Embedder.many` of a new `Embedder`."""
    return Embedder(model, **options).many(items, kind, keyed=keyed, on_error=on_error)
