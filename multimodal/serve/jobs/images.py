"""Jobs of images: classification and search."""

import io
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from PIL import Image

from multimodal.errors import ImageError, MultimodalError, UsageError, VideoError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.clip import CLIP
from multimodal.serve.jobs.lane import Job, Lane, Stream, Work, one_request
from multimodal.serve.jobs.lengths import length_read
from multimodal.serve.models import ServedModel
from multimodal.serve.options import ServeOptions
from multimodal.tasks.classify.classifier import templates_of
from multimodal.tasks.classify.classify import Classifier
from multimodal.tasks.classify.head import has_head
from multimodal.tasks.encode.loaded import device_of
from multimodal.tasks.encode.prompts import checked_labels, prompts_of
from multimodal.tasks.figures import overlay
from multimodal.tasks.inspect.heatmap import check_model, relevance
from multimodal.tasks.report.page import data_uri
from multimodal.tasks.retrieve.gallery import still
from multimodal.tasks.retrieve.index import Index, model_for, open_index, query_vectors
from multimodal.tokens.image.preprocessing import preprocess
from multimodal.tokens.image.reading import ImageLimits, check_size, image_size, read_image
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

SMALL, LARGE = 256, 640  # pixels of the longer edge of a thumbnail, and of a heat map
KEPT = 64  # lists of labels whose vectors are kept


class ClassifyingModel:
    """Classification by a served model. The vectors of the last `KEPT` lists of labels are kept."""

    def __init__(self, served: ServedModel):
        self.served = served
        self.kept: OrderedDict[Any, Classifier] = OrderedDict()
        self.plain: Checkpoint | None = None  # not prepared for inference, for heat maps

    def classify(
        self, images: list[Any], labels: Sequence[str] | None, templates: Any, threshold: float | None,
        top: int | None, heatmaps: int = 0,
    ) -> Job:  # fmt: skip
        """A job with the scores of each image, and heat maps of its `heatmaps` best labels. Raises UsageError,
        TextError."""
        listed = lambda value: tuple(value) if isinstance(value, list) else value
        key = (listed(labels), listed(templates), threshold, top)

        def stream() -> Stream:
            classifier = yield Work(object(), None, lambda _: [self._classifier(key, labels, templates)])
            results = yield Work(("classify", key), images, lambda payloads: _scores(classifier, payloads))
            for image, result in zip(images, results, strict=True) if heatmaps else ():
                maps = yield Work(object(), None, lambda _: [self._heatmaps(classifier, image, result, heatmaps)])  # noqa: B023
                result["heatmaps"] = maps
            return results

        return Job(iter([stream()]))

    def _classifier(self, key: Any, labels: Sequence[str] | None, templates: Any) -> Classifier:
        if key not in self.kept:
            self._check_labels(labels, templates)
            threshold, top = key[2:]
            self.kept[key] = Classifier(self.served.checkpoint, labels, templates=templates, threshold=threshold,
                                        top=top, device=None, per_clip=True)  # fmt: skip
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key]

    def _check_labels(self, labels: Sequence[str] | None, templates: Any) -> None:
        """Refuse no labels, and those that a CLIP would cut. Raises UsageError, TextError."""
        checkpoint = self.served.checkpoint
        if has_head(checkpoint):  # has its own, and refuses others
            return
        if labels is None:
            raise UsageError(f"are needed, as model {self.served.name} has none of its own", argument="labels")
        for number, texts in enumerate(prompts_of(checked_labels(labels), templates_of(checkpoint, templates))):
            for text in texts:
                length_read(checkpoint, text, f"labels[{number}]: {text[:40]!r}")

    def _heatmaps(self, classifier: Classifier, image: Any, result: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Overlays of the best labels. The model is loaded once more, as it needs gradients."""
        served = self.served.checkpoint
        self.plain = self.plain or load(served.source)
        shown, labels = read_image(image), classifier.labels
        record, best = classifier.scorer.preprocessing, [one["label"] for one in result["scores"][:count]]
        pixels, patch = preprocess(shown, record)[None], check_model(self.plain.model).config.patch
        chosen = [labels.index(label) for label in best]
        maps = relevance(self.plain.model, pixels, classifier.scorer.weights.float().cpu(), chosen)[0]
        drawn = [overlay(shown, one, record, patch) for one in maps]
        return [{"label": label, "image": jpeg_url(one, LARGE)} for label, one in zip(best, drawn, strict=True)]


def _scores(classifier: Classifier, payloads: list[list[Any]]) -> list[list[dict[str, Any]]]:
    return each_image(payloads, "images", classifier.many)


def each_image(
    payloads: Sequence[Sequence[Any]], field: str, many: Callable[..., Iterator[tuple[str, Any]]]
) -> list[list[Any]]:
    """Results of `many` for the images of each payload. Raises the error of an image, which `field` and its index
    name."""
    pairs = [(f"{field}[{i}]", image) for images in payloads for i, image in enumerate(images)]
    found = _named(pairs, many(pairs, keyed=True))
    return [list(itertools.islice(found, len(one))) for one in payloads]


def _named(pairs: list[tuple[str, Any]], results: Iterable[tuple[str, Any]]) -> Iterator[Any]:
    for (place, image), (_, result) in zip(pairs, results, strict=True):
        if isinstance(result, MultimodalError):
            raise type(result)(f"{place}: {result}") if isinstance(image, bytes) else result  # others have a name
        yield result


def checked(images: list[Any], megapixels: float, places: Sequence[str]) -> list[Any]:
    """The images, none of which may be larger. Raises ImageError by their headers alone; what is no image is left to
    its reader."""
    limits = ImageLimits(max_pixels=round(megapixels * 1e6))
    for one, place in zip(images, places, strict=True):
        if (size := image_size(one)) is not None:
            check_size(size, limits, place or str(one))
    return images


def thumbnail(file: str) -> str | None:
    """A small JPEG of an image, a frame or a video of an index, as a data URL; None for what cannot be read."""
    try:
        found = still(file)
        return jpeg_url(found if isinstance(found, Image.Image) else read_image(found, least=SMALL), SMALL)
    except (ImageError, VideoError, StopIteration):
        return None


def jpeg_url(image: Image.Image, most: int) -> str:
    """The image as a data URL, with at most so many pixels on an edge."""
    image.thumbnail((most, most))
    made = io.BytesIO()
    image.save(made, "JPEG", quality=80)
    return data_uri(made.getvalue(), "image/jpeg")


class SearchedIndex:
    """An image index with the model that made it, in a lane of its own."""

    def __init__(self, index: Index, checkpoint: Checkpoint, lane: Lane):
        self.index, self.checkpoint, self.lane = index, checkpoint, lane

    @classmethod
    def opened(cls, folder: str, options: ServeOptions) -> "SearchedIndex":
        """Raises UsageError, CheckpointError."""
        index = open_index(folder)
        loaded = model_for(index, load(index.record.model, index.record.architecture))
        checkpoint = prepare_for_inference(loaded, options.compute_type, device_of(options.device, loaded))
        return cls(index, checkpoint, Lane(f"index {folder}", options.batch_size, options.queue))

    def search(self, texts: Sequence[str], images: Sequence[Any], top: int) -> Job:
        """A job with [{"file", "score"}] for each text, then each image. Raises TextError."""
        for text in texts if isinstance(self.checkpoint.model, CLIP) else ():
            length_read(self.checkpoint, text, f"text: {text[:40]!r}")

        def serve(payloads: list[Any]) -> list[Any]:
            return [self._found(*one) for one in payloads]

        return one_request(Work("search", (texts, images, top), serve))

    def _found(self, texts: Sequence[str], images: Sequence[Any], top: int) -> list[list[dict[str, Any]]]:
        vectors = query_vectors(self.checkpoint, list(texts), list(images), self.index.record.native)
        scores, rows = self.index.search(vectors, min(top, len(self.index)))
        return [
            [{"file": file, "score": score} for file, score in zip(self.index.files(best), own, strict=True)]
            for own, best in zip(scores.tolist(), rows, strict=True)
        ]
