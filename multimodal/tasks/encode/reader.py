"""Results of images and videos, item by item."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from multimodal.errors import ImageError
from multimodal.tasks.encode.attempts import OF_ALL, in_parts, item_error
from multimodal.tasks.encode.images import ImageBatch, batches, check_reading, name_of
from multimodal.tasks.encode.loaded import Item, local
from multimodal.tasks.encode.native import NativeImages, native_batches, native_frames
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

    def __post_init__(self) -> None:
        check_reading(self.batch_size, self.workers)

    def one_each(self) -> "ImageReader":
        """The same with one result per video."""
        return replace(self, video=self.video.replace(per_clip=True))

    def results(
        self,
        items: Iterable[Item],
        work: Callable[[ImageBatch | NativeImages, slice], Sequence[Any]],
        whole: Callable[[Clip], Any],
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (key, result or error) in order. `work` gives the results of a part of a batch, `whole` that of a
        video with `per_clip`; else each sampled frame has a result, and the key of a path becomes a FrameName, any
        other key (key, time)."""
        source_of = lambda item: local(item.source, self.urls)
        if self.native is not None:
            model, most = self.native
            of_images = lambda run: native_batches(
                model, run, self.record, most, self.batch_size, self.workers, source_of
            )
            preparation = native_frames(model, self.record, most, self.batch_size)
        else:
            of_images = lambda run: batches(run, self.record, self.batch_size, self.workers, source_of)
            preparation = plain_frames(self.record, self.batch_size)
        for batch in with_videos(items, of_images, preparation, self.video, source_of):
            if isinstance(batch, Clip):
                yield batch.item.key, clip_result(batch, whole)
                continue
            made = in_parts(partial(work, batch), len(batch.read))
            found = [*zip(batch.read, made, strict=True), *batch.refused]
            for item, result in sorted(found, key=lambda pair: pair[0].position):
                failed = isinstance(result, Exception)
                yield item.key, item_error(result, name_of(item), ImageError) if failed else result


def clip_result(clip: Clip, whole: Callable[[Clip], Any]) -> Any:
    """`whole(clip)`, or the error that it raises by the fault of the video."""
    try:
        return whole(clip)
    except OF_ALL:
        raise
    except Exception as error:
        return item_error(error, name_of(clip.item), ImageError)
