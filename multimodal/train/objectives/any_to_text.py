"""Any-to-text training: conversations to batches, and the objective."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from multimodal.blocks.masks import places
from multimodal.data.batching import PaddedText, pad_rows, pad_text, round_up
from multimodal.data.datasets.captions import (
    DRAWS,
    CaptionAugmentSettings,
    as_tensor,
    augmented,
    smaller,
    stacked_images,
)
from multimodal.data.datasets.text import IGNORED
from multimodal.data.examples import SizedCache
from multimodal.data.sources import Sample
from multimodal.errors import DataError, TextError
from multimodal.models.any_to_text import AnyToText
from multimodal.tasks.ask.media import MediaEncoder, Medium, assembled, row_count
from multimodal.tokens.chat.format import media
from multimodal.tokens.chat.messages import Message, MessagePart, read_messages
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.image.reading import read_image
from multimodal.tokens.image.tiles import Tiled
from multimodal.tokens.video.options import VideoOptions
from multimodal.train.objective import Summed
from multimodal.train.objectives.augment_speech import SpeechAugmentation, augment, stacked
from multimodal.train.objectives.text.language import loss_of_states
from multimodal.weights.folder import Checkpoint

KEPT = 3 << 30  # bytes of decoded media that a process keeps, and of states of frozen encoders


class Input(NamedTuple):
    """`name`: of a medium that is the same each time; None for one that is augmented."""

    medium: Medium
    name: str | None = None


class ChatExample(NamedTuple):
    """Ids of a conversation with its answer; targets: the id after each, IGNORED outside the answers."""

    ids: list[int]
    targets: list[int]
    inputs: list[Input]


@dataclass(frozen=True)
class ChatBatch(PaddedText):
    """`inputs`: of all rows in order, `counts` of each row."""

    targets: Int[Tensor, "B T"]
    inputs: list[Input]
    counts: list[int]
    sizes: list[int]  # lengths on the host
    answers: list[int]  # tokens of each row that are learned


class _VideoPart(NamedTuple):
    """A frame of a video, or a window of its sound."""

    value: Any
    name: str


class PrepareChat:
    """Draws one of a row's answers, augments its images (not the frames of its videos), with `sound` its recordings
    too, and writes both as ids.

    Decoded images, sound and frames are kept, up to `KEPT` bytes, since decoding takes longer than a small model's
    step. Raises TextError for a conversation that exceeds the context."""

    def __init__(
        self, checkpoint: Checkpoint, video: VideoOptions, augment: CaptionAugmentSettings,
        sound: SpeechAugmentation | None = None,
    ):  # fmt: skip
        self.checkpoint, self.augment, self.sound = checkpoint, augment, sound
        self.encoder, self.tokenizer = MediaEncoder(checkpoint, video), checkpoint.required_tokenizer()
        self.before, self.end = self._around()
        self.kept = SizedCache(KEPT, _media_bytes)

    def __call__(self, sample: Sample, random: torch.Generator) -> ChatExample:
        messages = [self._opened(one) for one in read_messages(sample.fields["messages"])]
        parts = list(media(messages))
        inputs = [self._input(part, len(parts) > 1, random) for part in parts]
        answer = sample.texts[int(torch.randint(len(sample.texts), (), generator=random))]
        answers = [(i, one.text) for i, one in enumerate(messages) if one.role == "assistant"]
        ids, targets = list[int](), list[int]()
        for position, text in [*answers, (len(messages), answer)]:
            prompt, order = self._prompt(messages[:position], inputs)
            if prompt[: len(ids)] != ids:
                raise DataError("the chat template writes earlier turns otherwise once they are answered")
            said = [*self.tokenizer.encode(self.before + text), self.end]
            targets += [IGNORED] * (len(prompt) - len(ids) - 1) + said
            ids = prompt + said
            targets.append(IGNORED)
        if len(ids) - 1 > (most := self.checkpoint.model.config.decoder.context):
            raise TextError(f"has {len(ids) - 1} tokens, the model's context is {most}")
        return ChatExample(ids[:-1], targets[: len(ids) - 1], [inputs[i] for i in order])

    def _around(self) -> tuple[str, int]:
        """The text that the template writes before an answer, and the token that ends it, else the first that can."""
        said = [Message(role, (MessagePart("text", "probe"),)) for role in ("user", "assistant")]
        begun, whole = self._prompt(said[:1], [])[0], self._prompt(said, [])[0]
        same = next((i for i, pair in enumerate(zip(begun, whole, strict=False)) if len({*pair}) > 1), len(begun))
        ends, rest = self.checkpoint.chat.end_ids(self.tokenizer), whole[same:]
        if not (own := [token for token in rest if token in ends]):
            return "", ends[0]
        before = self.tokenizer.decode(rest[: rest.index(own[0])]).partition("probe")[0]
        return before if same == len(begun) else "", own[0]

    def _prompt(self, messages: Sequence[Message], inputs: Sequence[Input]) -> tuple[list[int], list[int]]:
        """Ids, and the order of the inputs in them."""
        own, model = [one.medium for one in inputs[: len(list(media(messages)))]], self.checkpoint.model
        written = [self.encoder.markup(one, row_count(model, one, self.checkpoint.preprocessing)) for one in own]
        return self.checkpoint.chat.ids(messages, written, self.tokenizer, "chat template")

    def _opened(self, message: Message) -> Message:
        parts = list[MessagePart]()
        for part in message.parts:
            source = part.value
            if part.kind != "video" or not isinstance(source, str):
                parts += self.encoder.opened_parts(part)
                continue
            opened = self.kept.get_or_make(source, lambda part=part: list(self.encoder.opened_parts(part)))
            parts += (
                one if one.kind == "text" else replace(one, value=_VideoPart(one.value, f"{source} {i}"))
                for i, one in enumerate(opened)
            )
        return replace(message, parts=tuple(parts))

    def _input(self, part: MessagePart, several: bool, random: torch.Generator) -> Input:
        record, source = self.checkpoint.preprocessing, part.value
        if isinstance(source, _VideoPart):
            return Input(self.encoder.read(replace(part, value=source.value), several), source.name)
        if not isinstance(source, str):
            return Input(self.encoder.read(part, several))
        if part.kind == "image" and record.tiling is None:
            image = self.kept.get_or_make(source, lambda: smaller(read_image(Path(source)).convert("RGB"), record))
            draws = torch.rand(1, DRAWS, generator=random)
            pixels = augmented(*stacked_images([as_tensor(image)]), draws, record, self.augment)
            return Input(Medium("image", pixels, tile=Tiled(pixels, (0, 0), (image.height, image.width))))
        medium = self.kept.get_or_make(source, lambda: self.encoder.read(part, several))
        if part.kind == "audio" and self.sound is not None:
            windows = [window[:n] for window, n in zip(medium.tensors, medium.lengths.tolist(), strict=True)]
            tensors, lengths = stacked([augment(window, self.sound, random) for window in windows])
            return Input(medium._replace(tensors=tensors, lengths=lengths))
        return Input(medium, source)


def _media_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(_media_bytes(part.value) for part in value)
    if isinstance(value, Image.Image):
        return value.width * value.height * 3
    return value.tensors.nbytes if isinstance(value, Medium) else 1024


def collate(examples: Sequence[ChatExample]) -> ChatBatch:
    text = pad_text([example.ids for example in examples])
    targets = pad_rows([example.targets for example in examples], IGNORED)
    inputs = [one for example in examples for one in example.inputs]
    counts, sizes = [len(example.inputs) for example in examples], [len(example.ids) for example in examples]
    answers = [sum(target != IGNORED for target in example.targets) for example in examples]
    return ChatBatch(text.ids, text.lengths, targets, inputs, counts, sizes, answers)


def alike(sizes: Sequence[int]) -> list[list[int]]:
    """Rows in groups of like length, within a factor of two: a short answer beside a video would be mostly padding."""
    groups: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        groups.setdefault(max(size, 32).bit_length(), []).append(row)
    return list(groups.values())


def _index(rows: list[int], device: torch.device) -> Int[Tensor, "N"]:
    return torch.tensor(rows).to(device, non_blocking=True)


def _state_bytes(states: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in states)


class Answering(Summed):
    """Next-token cross-entropy over answers; a row of n tokens weighs √n, so that a yes counts beside a long sentence
    (InternVL 2.5, Chen et al. 2024, section 3.3). `smoothing`: label smoothing (Szegedy et al. 2016).

    Encoders that are frozen whole run without gradient, in eval mode, and once for each medium that is not augmented,
    up to `KEPT` bytes of states."""

    def __init__(self, model: AnyToText, record: Preprocessing | None, smoothing: float = 0.0):
        super().__init__(model)
        self.record, self.smoothing, self.kept = record, smoothing, SizedCache(KEPT, _state_bytes)
        self.uneven = [part for part in (model.image, model.audio) if part is not None]

    @property
    def partly(self) -> bool:
        """A batch without media does not run the encoders."""
        return any(map(_trained, self.uneven))

    def train(self, mode: bool = True) -> "Answering":
        super().train(mode)
        for part in (self.model.image, self.model.audio):
            if part is not None and not _trained(part):
                part.eval()
        return self

    def forward(self, batch: ChatBatch) -> dict[str, Tensor]:
        own = iter(self._rows(batch.inputs))
        empty = torch.zeros(0, self.model.config.decoder.width, device=batch.ids.device)
        joined = [torch.cat([empty, *(next(own) for _ in range(count))]) for count in batch.counts]
        groups = [list(range(len(batch.sizes)))] if self.even else alike(batch.sizes)
        return {"loss": sum((self._loss(batch, rows, joined) for rows in groups), self._connected())}

    def _connected(self) -> Float[Tensor, ""] | int:
        """With several processes 0 from all parameters between encoders and decoder: their gradient is then 0 in a
        batch without media, which others may have."""
        if not torch.distributed.is_initialized():
            return 0
        parts = (self.model.image_connector, self.model.audio_connector)
        own = [p for part in parts if part is not None for p in part.parameters()]
        return sum(p.flatten()[:0].sum() for p in [*own, self.model.newline] if p is not None)

    def _loss(self, batch: ChatBatch, rows: list[int], joined: Sequence[Float[Tensor, "_ D"]]) -> Float[Tensor, ""]:
        """Summed loss of some rows, cut to the longest of them."""
        decoder, most = self.model.decoder, round_up(max(batch.sizes[row] for row in rows), 8)
        chosen = _index(rows, batch.ids.device)
        ids, targets, valid = (x[chosen, :most] for x in (batch.ids, batch.targets, batch.valid))
        inputs = [joined[row] for row in rows]
        if self.model.config.crosses:
            states = decoder.states(ids, *self.model.source(inputs), valid)
        else:
            states = decoder.states(ids, valid=valid, embedded=self.model.embed(ids, inputs))
        total, answers = torch.zeros((), device=ids.device), [batch.answers[row] for row in rows]
        for size in sorted(set(answers) - {0}):  # rows of one weight
            own = _index([i for i, n in enumerate(answers) if n == size], states.device)
            at = places(targets[own] != IGNORED, size * len(own))
            wanted = targets[own].flatten()[at]
            loss = loss_of_states(decoder, states[own].flatten(0, 1)[at], wanted, smoothing=self.smoothing)
            total = total + loss * size**-0.5
        return total

    def counts(self, batch: ChatBatch) -> dict[str, float]:
        return {"loss": sum(n**0.5 for n in batch.answers)}

    def _rows(self, inputs: Sequence[Input]) -> list[Float[Tensor, "_ D"]]:
        """Rows of each input. All that has no name is encoded at once."""
        model, found = self.model, list[Any]([None] * len(inputs))
        seen = [i for i, one in enumerate(inputs) if one.medium.kind != "audio"]
        heard = [i for i, one in enumerate(inputs) if one.medium.kind == "audio"]
        for group, encode, part in ((seen, self._seen, model.image), (heard, self._heard, model.audio)):
            frozen = part is not None and not _trained(part)
            fresh = [i for i in group if not frozen or inputs[i].name is None]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                for i, states in zip(fresh, encode([inputs[j].medium for j in fresh]), strict=True):
                    found[i] = states
                for i in sorted(set(group) - set(fresh)):  # encoded alone, states do not depend on the batch
                    read = lambda i=i, encode=encode: encode([inputs[i].medium])[0]
                    found[i] = self.kept.get_or_make(inputs[i].name, read)
        if seen:
            grid = tuple(side // model.config.image.patch for side in inputs[seen[0]].medium.tensors.shape[-2:])
            rows = model.image_connector(torch.cat([found[i] for i in seen]), grid)
            for i, own in zip(seen, rows.split([len(found[i]) for i in seen]), strict=True):
                found[i] = assembled(model, inputs[i].medium, own, self.record)
        for i in heard:
            found[i] = torch.cat([model.audio_connector(window[None])[0] for window in found[i]])
        return found

    def _seen(self, inputs: Sequence[Medium]) -> list[Float[Tensor, "_ N S"]]:
        if not inputs:
            return []
        states, _ = self.model.image_states(torch.cat([one.tensors for one in inputs]))
        return list(states.split([len(one.tensors) for one in inputs]))

    def _heard(self, inputs: Sequence[Medium]) -> list[list[Float[Tensor, "_ S"]]]:
        """States of each window of each recording."""
        if not inputs:
            return []
        features = nn.utils.rnn.pad_sequence([window for one in inputs for window in one.tensors], batch_first=True)
        states, counts = self.model.audio_states(features, torch.cat([one.lengths for one in inputs]))
        windows = iter([row[:count].clone() for row, count in zip(states, counts.tolist(), strict=True)])
        return [[next(windows) for _ in range(len(one.tensors))] for one in inputs]


def _trained(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())
