"""Results of images and videos, item by item."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from multimodal.errors import ImageError, MultimodalError
from multimodal.tasks.encode.attempts import OF_ALL, in_parts, item_error
from multimodal.tasks.encode.columns import result_columns, source_column
from multimodal.tasks.encode.images import ImageBatch, batches, check_reading, name_of
from multimodal.tasks.encode.loaded import Item, Items, LoadedModel, OnError, check_on_error, checked_results, local
from multimodal.tasks.encode.native import native_batches, native_frames
from multimodal.tasks.encode.videos import Clip, plain_frames, with_videos
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.video.options import ClipOptions


@dataclass(frozen=True)
class ImageReader:
    """Batches of images and of frames of videos for one model. `urls`: read http and https URLs. Raises UsageError."""

    record: Preprocessing
    batch_size: int
    workers: int | None
    urls: bool
    video: ClipOptions
    native: tuple[nn.Module, int | None] | None = None  # the model, and the most patches of an image at its own aspect
    done: Container[Any] = ()  # keys of videos' frames, or of whole videos, that are not read again

    def __post_init__(self) -> None:
        check_reading(self.batch_size, self.workers)

    def one_each(self) -> "ImageReader":
        """The same with one result per video."""
        return replace(self, video=self.video.replace(per_clip=True))

    def results(
        self,
        items: Iterable[Item],
        work: Callable[[ImageBatch, slice], Sequence[Any]],
        whole: Callable[[Clip], Any],
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (key, result or error) in order. `work` gives the results of a part of a batch, `whole` that of a
        video with `per_clip`; else each sampled frame has a result, and the key of a path becomes a FrameName, any
        other key (key, time)."""
        for batch in self.batches(items):
            if isinstance(batch, Clip):
                yield batch.item.key, clip_result(batch, whole)
                continue
            made = in_parts(partial(work, batch), len(batch.read))
            found = [*zip(batch.read, made, strict=True), *batch.refused]
            for item, result in sorted(found, key=lambda pair: pair[0].position):
                failed = isinstance(result, Exception)
                yield item.key, item_error(result, name_of(item), ImageError) if failed else result

    def batches(self, items: Iterable[Item]) -> Iterator[Any]:
        """Batches as `with_videos` gives them."""
        source_of = lambda item: local(item.source, self.urls)
        if self.native is None:
            of_images = lambda run: batches(run, self.record, self.batch_size, self.workers, source_of)
            preparation = plain_frames(self.record, self.batch_size)
        else:
            model, most = self.native
            own = (self.record, most, self.batch_size)
            of_images = lambda run: native_batches(model, run, *own, self.workers, source_of)
            preparation = native_frames(model, *own)
        return with_videos(items, of_images, preparation, self.video, source_of, self.done)


class ImageTask(LoadedModel):
    """Base of Classifier and Captioner, whose results are dicts."""

    reader: ImageReader
    _results: Callable[[ImageBatch, slice], list[dict[str, Any]]]  # see `ImageReader.results`
    _whole: Callable[[Clip], dict[str, Any]]

    def many(
        self, items: Iterable[Any], *, keyed: bool = False, on_error: OnError = "return"
    ) -> Iterator[tuple[Any, dict[str, Any] | MultimodalError]]:
        """Yield (key, result) for each image, in order, while the next ones are decoded. With `keyed`, items are (key,
        image) pairs; else a path is its own key, and any other image has its position. An image that fails gives its
        error as result, unless `on_error` is "raise".

        A video gives a result for each frame (unless `per_clip`): the key of a path becomes "clip.mp4 @ 12.4 s", any
        other (key, time)."""
        return self._many(items, self.reader, keyed, on_error)

    def _many(
        self, items: Iterable[Any], reader: ImageReader, keyed: bool = False, on_error: OnError = "return"
    ) -> Iterator[tuple[Any, Any]]:
        check_on_error(on_error)
        sources = Items(items, keyed)
        return self._queued(checked_results(reader.results(sources, self._results, self._whole), sources, on_error))

    def _columns(
        self, batch: Any, row: Callable[[Any], Mapping[str, Any]], failed: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Columns of a batch of columns, see `result_columns`."""
        _, sources, kept = source_column(batch, (*failed, "error"))
        results = (result for _, result in self._many(sources, self.reader.one_each()))
        return result_columns(kept, results, row, failed)


def clip_result(clip: Clip, whole: Callable[[Clip], Any]) -> Any:
    """`whole(clip)`, or the error that it raises by the fault of the video."""
    try:
        return whole(clip)
    except OF_ALL:
        raise
    except Exception as error:
        return item_error(error, name_of(clip.item), ImageError)
