"""Vectors of images and texts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, Unpack

import numpy as np
import torch
from jaxtyping import Float32

from multimodal.errors import MultimodalError, TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.files import shown
from multimodal.tasks.encode.arguments import EmbedderArguments
from multimodal.tasks.encode.attempts import in_parts_of, item_error
from multimodal.tasks.encode.columns import Columns, result_columns, source_column
from multimodal.tasks.encode.features import encoder, kind_of
from multimodal.tasks.encode.images import ImageBatch, check_reading
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
from multimodal.tasks.encode.native import check_native, encode_pixels, native_limit
from multimodal.tasks.encode.reader import ImageReader
from multimodal.tasks.encode.videos import Clip, clip_mean
from multimodal.tasks.text.embed import check_normalize, check_text, embed, scaled
from multimodal.tasks.text.options import EmbedOptions
from multimodal.tokens.image.arrays import ImageInput, images_of
from multimodal.tokens.text.tokenizer import texts_of
from multimodal.tokens.video.options import ClipOptions
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.encode import vector_width
from multimodal.weights.folder import Checkpoint

Kind = Literal["image", "text"]
TEXTS = 4096  # that are sorted by length together


class Embedder(LoadedModel):
    """Image and text encoder: loads a CLIP, a ViT or a text model once.

    The vector of an image is CLIP's, or the pooled output of a ViT; that of a text is CLIP's, or a text model's tokens
    pooled by `pooling` (see `embed`). Without `model`, images use the default model of `embed-images` and texts that of
    `embed`, each loaded at its first use: their vectors are not comparable. `normalize`: scale vectors to length 1;
    None: as the model's card says; False: leave them as the model gives them (a CLIP's have length 1). `batch_tokens`:
    most tokens of texts in a batch. `device`: `auto` is the GPU if there is one. `compute_type`: see
    `prepare_for_inference`. `urls`: allow http and https URLs of images. `every_s`, `max_frames`, `scenes`, `per_clip`:
    frames of videos, see `ClipOptions`. `prompt`: prompt for texts, see `EmbedOptions`. `native`: keep the aspect ratio
    of images, with at most this many patches (0: as many as in training).

    Raises UsageError, CheckpointError."""

    def __init__(
        self, model: Model | None = None, *, pooling: str | None = None, normalize: bool | None = True,
        batch_size: int = 32, batch_tokens: int | None = None, workers: int | None = None,
        device: str | torch.device | None = "auto", compute_type: str = "auto", urls: bool = False,
        every_s: float | None = None, max_frames: int | None = None, scenes: float | None = None,
        per_clip: bool = False, prompt: str | None = None, native: int | None = None,
    ):  # fmt: skip
        video = ClipOptions(every_s=every_s, max_frames=max_frames, scenes=scenes, per_clip=per_clip)
        check_reading(batch_size, workers)
        EmbedOptions(pooling=pooling, normalize=normalize, batch_tokens=batch_tokens, prompt=prompt)  # checks them
        if native is not None:
            check_native(native)
        self.model, self.compute_type, self.device = model, compute_type, device
        self.normalize, self.pooling, self.batch_tokens, self.prompt = normalize, pooling, batch_tokens, prompt
        self._checkpoints: dict[Kind | None, Checkpoint] = {}
        if model is not None:
            self._checkpoint("image")
        self._images, self.native = (batch_size, workers, urls, video), native

    def _checkpoint(self, kind: Kind) -> Checkpoint:
        key = kind if self.model is None else None
        with self._lock:
            if key not in self._checkpoints:
                checkpoint = loaded(self.model, "embed-images" if kind == "image" else "embed")
                check_normalize(checkpoint, self.normalize)
                device = device_of(self.device, checkpoint)
                self._checkpoints[key] = prepare_for_inference(checkpoint, self.compute_type, device)
            return self._checkpoints[key]

    def __call__(self, batch: Columns) -> dict[str, np.ndarray]:
        """Columns vector and error of a batch of columns: bytes, image or path, or text (see `encode/columns.py`). A
        video is one row."""
        name, values, kept = source_column(batch, ("vector", "error"))
        kind: Kind = "text" if name == "text" else "image"
        results = [result for _, result in self._many(values, kind, one_each=True)]
        width = next((len(one) for one in results if isinstance(one, np.ndarray)), None)
        failed = {"vector": np.full(self._width(kind) if width is None else width, np.nan, np.float32)}
        return result_columns(kept, results, lambda vector: {"vector": vector}, failed)

    def images(self, images: ImageInput | Sequence[ImageInput]) -> Float32[np.ndarray, "N D"]:
        """One vector per image, or sampled frame of a video, in order. Raises ImageError, UsageError for a model
        without an image encoder."""
        vectors: list[Any] = [vector for _, vector in self.many(images_of(images), "image", on_error="raise")]
        return np.stack(vectors) if vectors else self._none("image")

    def texts(self, texts: str | Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """One vector per text, in order. Raises TextError, UsageError for a model without a text encoder. Warns
        (TextCut) of texts cut to the context."""
        several = [texts] if isinstance(texts, str) else texts_of(texts, "texts")
        with self._lock:
            return self._vectors(several) if several else self._none("text")

    def many(
        self, items: Iterable[Any], kind: Kind = "image", *, keyed: bool = False, on_error: OnError = "return"
    ) -> Iterator[tuple[Any, Float32[np.ndarray, "D"] | MultimodalError]]:
        """Yield (key, vector) for each image, frame or text, in order, as `Classifier.many` does."""
        return self._many(items, kind, keyed, on_error)

    def _many(
        self, items: Iterable[Any], kind: Kind, keyed: bool = False, on_error: OnError = "return",
        one_each: bool = False,
    ) -> Iterator[tuple[Any, Any]]:  # fmt: skip
        check_on_error(on_error)
        if kind not in ("image", "text"):
            raise UsageError(f"must be image or text (got {shown(kind)})", argument="kind")
        sources = Items(items, keyed, paths=kind == "image")
        results = self._of_images(sources, one_each) if kind == "image" else self._of_texts(sources)
        return self._queued(checked_results(results, sources, on_error))

    def _of_images(self, sources: Items, one_each: bool) -> Iterator[tuple[Any, Any]]:
        checkpoint = self._checkpoint("image")
        model = checkpoint.model
        encoder(checkpoint, kind_of(checkpoint))  # checks the model

        unit = lambda pixels: scaled(encode_pixels(model, pixels), checkpoint, self.normalize)

        def work(batch: ImageBatch, part: slice) -> Sequence[np.ndarray]:
            return list(unit(batch.pixels[part]).cpu().numpy())

        def whole(clip: Clip) -> np.ndarray:
            return scaled(clip_mean(clip.batches, unit), checkpoint, self.normalize).cpu().numpy()[0]

        record = known_preprocessing(checkpoint)
        native = None if self.native is None else (model, native_limit(model, self.native, record))
        reader = ImageReader(record, *self._images, native)
        return (reader.one_each() if one_each else reader).results(sources, work, whole)

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
            made = in_parts_of(lambda texts: list(self._vectors(texts)), [item.source for item in good])
            results |= {item.position: one for item, one in zip(good, made, strict=True)}
            for item in part:
                result = results[item.position]
                failed = isinstance(result, Exception)
                yield item.key, item_error(result, f"text {item.position + 1}", TextError) if failed else result

    def _none(self, kind: Kind) -> Float32[np.ndarray, "0 D"]:
        return np.empty((0, self._width(kind)), np.float32)

    def _width(self, kind: Kind) -> int:
        if kind == "text":
            return self.texts("a").shape[1]
        return vector_width(self._checkpoint("image").model)

    @inference_mode()
    def _vectors(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        checkpoint = self._checkpoint("text")
        return embed(texts, checkpoint, self.pooling, self.normalize, self.batch_tokens, self.prompt).cpu().numpy()


def embed_many(
    items: Iterable[Any], model: Model | None = None, kind: Kind = "image", *, keyed: bool = False,
    on_error: OnError = "return", **options: Unpack[EmbedderArguments],
) -> Iterator[tuple[Any, Float32[np.ndarray, "D"] | MultimodalError]]:  # fmt: skip
    """`Embedder.many` of a new `Embedder`."""
    return Embedder(model, **options).many(items, kind, keyed=keyed, on_error=on_error)
