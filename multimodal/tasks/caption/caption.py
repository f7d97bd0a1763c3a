"""Image captioning."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.decoding import logits as processors
from multimodal.decoding.beam_search import beam_search, per_token
from multimodal.decoding.sampling import greedy, sample
from multimodal.errors import CheckpointError, MultimodalError, TextError, UsageError
from multimodal.inference.cuda_graphs import fast_step
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.captioner import CaptionModel, Decoding, VisionEncoderDecoder
from multimodal.tasks.caption.options import CaptionOptions, options_for
from multimodal.tasks.encode.arguments import CaptionArguments, CaptionerArguments
from multimodal.tasks.encode.columns import Columns
from multimodal.tasks.encode.images import ImageBatch, name_of
from multimodal.tasks.encode.loaded import Model, OnError, device_of, loaded
from multimodal.tasks.encode.reader import ImageReader, ImageTask
from multimodal.tasks.encode.videos import Clip, checked_batches, time_of
from multimodal.tokens.image.arrays import ImageInput, images_of
from multimodal.tokens.video.names import FrameName
from multimodal.tokens.video.options import ClipOptions
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint


class Captioner(ImageTask):
    """Image captioner: loads the model once.

    `options`: see `CaptionOptions`; defaults come from "caption" in the model's card. A caption depends on its image,
    the options and the seed, not on `batch_size` or `workers`. `device`: `auto` is a GPU if there is one;
    `compute_type`: see `prepare_for_inference`. `urls`: read http and https URLs. `every_s`, `max_frames`, `scenes`,
    `per_clip`: frames of videos, see `ClipOptions`.

    Raises UsageError, TextError (a prompt longer than the context), CheckpointError."""

    def __init__(
        self, model: Model | None = None, *, batch_size: int = 16, workers: int | None = None,
        device: str | torch.device | None = "auto", compute_type: str = "auto", urls: bool = False,
        every_s: float | None = None, max_frames: int | None = None, scenes: float | None = None,
        per_clip: bool = False, **options: Unpack[CaptionArguments],
    ):  # fmt: skip
        video = ClipOptions(every_s=every_s, max_frames=max_frames, scenes=scenes, per_clip=per_clip)
        self.writer = CaptionWriter(*prepared(model, compute_type, device, options))
        self.reader = ImageReader(self.writer.checkpoint.preprocessing, batch_size, workers, urls, video)

    @overload
    def __call__(self, images: Columns) -> dict[str, np.ndarray]: ...
    @overload
    def __call__(self, images: ImageInput | Sequence[ImageInput]) -> list[dict[str, Any]]: ...
    def __call__(self, images: Any) -> Any:
        """Caption one or several images, in order; of a video each sampled frame is an image.

        Each result has `file`, `caption`, `score` (log-probability / tokens^`length_penalty`), `logprob` (the sum),
        `tokens` (with the end token) and `finished` (False: cut at `max_new_tokens`). With `num_captions` above 1 also
        `captions`, the best first, each with a `count` of the sequences that gave its text. A frame of a video has its
        `time` in seconds, as has the one that a clip's caption is of. Raises ImageError.

        A batch of columns (bytes, image or path) gives columns: caption, score, error (see `encode/columns.py`); a
        video is one row."""
        if isinstance(images, Mapping) or hasattr(images, "iloc"):  # of columns; pandas' frames are refused there
            return self._columns(images, lambda one: one, {"caption": "", "score": math.nan})
        return [result for _, result in self.many(images_of(images), on_error="raise")]  # type: ignore[misc]

    def _whole(self, clip: Clip) -> dict[str, Any]:
        best = self.writer.best_of(clip)
        return self.writer.record(clip.item, best.captions, best.time)

    def _results(self, batch: ImageBatch, part: slice) -> list[dict[str, Any]]:
        found = self.writer(batch.pixels[part])
        return [self.writer.record(item, one) for item, one in zip(batch.read[part], found, strict=True)]


def caption(
    images: ImageInput | Sequence[ImageInput], model: Model | None = None, **options: Unpack[CaptionerArguments]
) -> list[dict[str, Any]]:
    """Caption one or several images with a new `Captioner`, whose options it takes. Each call loads the model."""
    return Captioner(model, **options)(images)


def caption_many(
    items: Iterable[Any], model: Model | None = None, *, keyed: bool = False, on_error: OnError = "return",
    **options: Unpack[CaptionerArguments],
) -> Iterator[tuple[Any, dict[str, Any] | MultimodalError]]:  # fmt: skip
    """`Captioner.many` of a new `Captioner`."""
    return Captioner(model, **options).many(items, keyed=keyed, on_error=on_error)


def prepared(
    model: Model | None, compute_type: str, device: str | torch.device | None, options: Mapping[str, Any]
) -> tuple[Checkpoint, CaptionOptions]:
    """Prepared checkpoint and complete options. Raises UsageError, CheckpointError."""
    checkpoint = loaded(model, "caption")
    if not isinstance(checkpoint.model, CaptionModel):
        raise UsageError(f"model {checkpoint.source}: expected a captioner, got {checkpoint.kind}")
    chosen = options_for(checkpoint, options)
    return prepare_for_inference(checkpoint, compute_type, device_of(device, checkpoint)), chosen


class GeneratedCaptions(NamedTuple):
    """Preprocessed image and its captions, the best first. `time`: of the frame, of a whole video."""

    pixels: Float[Tensor, "3 H W"]
    captions: list["Caption"]
    time: float | None = None


class Caption(NamedTuple):
    """`ids`: without prompt and end token. `count`: number of sequences that gave this text."""

    text: str
    ids: list[int]
    score: float
    logprob: float
    tokens: int
    finished: bool
    count: int

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        names = ("score", "logprob", "tokens", "finished")
        return {"caption": self.text, **{name: getattr(self, name) for name in names}}


class CaptionWriter:
    """Captioner with fixed options: maps pixels to the captions of each image, the best first.

    Raises CheckpointError for a checkpoint without tokenizer or preprocessing, TextError for a prompt longer than the
    context, UsageError for `min_tokens` beyond it."""

    def __init__(self, checkpoint: Checkpoint, options: CaptionOptions):
        self.checkpoint, self.options = checkpoint, options
        self.network, tokenizer = checkpoint.model, checkpoint.required_tokenizer()
        known_preprocessing(checkpoint)
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise CheckpointError(f"model {checkpoint.source}: the tokenizer has no begin or end token")
        self.device = next(self.network.parameters()).device
        self.prompt = [tokenizer.bos_id, *tokenizer.encode(options.prompt)]
        self.limit = self._limit()
        self.processors = self._processors(tokenizer.eos_id)

    def _limit(self) -> int:
        context, options = self.network.caption_context, self.options
        room = context - len(self.prompt)
        if room < 1:
            raise TextError(f"prompt: has {len(self.prompt) - 1} tokens, the model's context is {context}")
        if options.min_tokens > room:
            raise UsageError(f"min_tokens must be at most {room}, the rest of the context (got {options.min_tokens})")
        if options.max_new_tokens > room and options.max_new_tokens != CaptionOptions.max_new_tokens.default:
            warnings.warn(f"max_new_tokens {options.max_new_tokens}: limited to {room} by the context", stacklevel=4)
        return min(options.max_new_tokens, room)

    def _processors(self, eos: int) -> list[processors.LogitsProcessor]:
        options, found = self.options, []
        if options.repetition_penalty != 1:
            found.append(processors.repetition_penalty(options.repetition_penalty))
        if options.no_repeat_ngram:
            found.append(processors.no_repeat_ngram(options.no_repeat_ngram))
        if options.min_tokens:
            found.append(processors.suppress_first([eos], len(self.prompt), options.min_tokens))
        return [*found, processors.end_if_all_forbidden(eos)] if found else []

    def generated(self, batch: ImageBatch, part: slice) -> list[GeneratedCaptions]:
        """Captions of a part of a batch."""
        pixels = batch.pixels[part]
        return list(map(GeneratedCaptions, pixels, self(pixels)))

    def best_of(self, clip: Clip) -> GeneratedCaptions:
        """Captions of the frame whose best one has the highest score, finished ones first. Raises VideoError."""
        best = None
        for batch in checked_batches(clip.batches):
            for frame, pixels, captions in zip(batch.read, batch.pixels, self(batch.pixels), strict=True):
                rank = captions[0].finished, captions[0].score
                if best is None or rank > best[0]:
                    best = rank, GeneratedCaptions(pixels.clone(), captions, frame.source.time)
        return best[1]

    @inference_mode()
    def __call__(self, pixels: Float[Tensor, "B 3 H W"]) -> list[list[Caption]]:
        options = self.options
        step, cache = self._decoding(self.network.encode(pixels.to(self.device, non_blocking=True)))
        prompt = torch.tensor([self.prompt] * len(pixels), device=self.device)
        common = {"eos": self.checkpoint.tokenizer.eos_id, "max_new": self.limit, "processors": self.processors}
        if options.temperature > 0:
            chance = [torch.Generator(self.device).manual_seed(options.seed) for _ in pixels]
            narrow = processors.SamplingFilter(options.top_k, options.top_p)
            found = sample(step, prompt, cache, temperature=options.temperature, generators=chance,
                           copies=options.num_captions, narrow=narrow, **common)  # fmt: skip
        elif options.beam_size > 1:
            found = beam_search(step, prompt, cache, beams=options.beam_size, early_stopping=False,
                                keep=options.num_captions, length_penalty=per_token(options.length_penalty),
                                **common)  # fmt: skip
        else:
            found = greedy(step, prompt, cache, **common)
        rows, each = list(zip(*found, strict=True)), options.num_captions
        return [self._captions(rows[first : first + each]) for first in range(0, len(rows), each)]

    def _decoding(self, source: Float[Tensor, "B S _"]) -> Decoding:
        """Decoding step and cache, by CUDA graphs for a plain decoder on a GPU."""
        if isinstance(self.network, VisionEncoderDecoder):
            return fast_step(self.network.decoder, source, None, len(self.prompt) + self.limit, last=1)
        return self.network.decoding(source)

    def _captions(self, rows: list[tuple[list[int], float]]) -> list[Caption]:
        """Captions of one image; of equal texts the best. A beam ranks by score, of draws finished ones come first."""
        texts: dict[str, Caption] = {}
        rows = [row for row in rows if row[1] != -math.inf] or rows
        if not all(math.isfinite(logprob) for _, logprob in rows):
            raise CheckpointError(f"model {self.checkpoint.source}: gives logits that are not finite")
        draws = self.options.temperature > 0
        captions = [self._caption(*row) for row in rows]
        for one in sorted(captions, key=lambda one: (draws and not one.finished, -one.score)):
            held = texts.setdefault(one.text, one._replace(count=0))
            texts[one.text] = held._replace(count=held.count + 1)
        return list(texts.values())

    def _caption(self, ids: list[int], logprob: float) -> Caption:
        finished = len(ids) < self.limit
        text = self.checkpoint.tokenizer.decode([*self.prompt, *ids]).strip()
        text = text if finished else text.rstrip("\ufffd")  # an incomplete character
        tokens = len(ids) + finished
        return Caption(text, ids, logprob / float(tokens) ** self.options.length_penalty, logprob, tokens, finished, 1)

    def record(self, image: Any, found: list[Caption], time: float | None = None) -> dict[str, Any]:
        """The result of `caption` for one image, or a video's frame at `time`; warns of captions that are empty or cut
        short by the options."""
        best, name = found[0], name_of(image)
        if not best.text:
            warnings.warn(f"{name}: the caption is empty (min_tokens 1 forces text)", stacklevel=2)
        if best.finished and len(best.ids) < self.options.min_tokens:
            few = f"ends after {len(best.ids)} tokens, under min_tokens {self.options.min_tokens}"
            warnings.warn(f"{name}: the caption {few}: the options forbid every other token", stacklevel=2)
        several = [{**one.record(), "count": one.count} for one in found]
        timed = time_of(name) if time is None else time_of(FrameName(name, time))
        alternatives = {"captions": several} if self.options.num_captions > 1 else {}
        return {"file": name, **timed, **best.record(), **alternatives}
