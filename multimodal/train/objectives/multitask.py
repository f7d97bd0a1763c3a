"""Whisper's multitask format (Radford et al. 2022, section 2.3): prompt tokens choose the decoder's task.

[<|startofprev|> text before] <|startoftranscript|> language transcribe|translate
    (<|notimestamps|> text | <|begin|> text <|end|> ...) <|endoftext|>
<|startoftranscript|> <|nospeech|> <|endoftext|>

The latter also where no clip of the window has a text.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.data.batching import Pinnable, pad_rows, pad_text, stacked_batch
from multimodal.data.datasets.speech_windows import NOISES, WindowFrames, noise
from multimodal.data.datasets.text import IGNORED
from multimodal.errors import DataError
from multimodal.models.whisper import Whisper
from multimodal.tokens.audio.log_mel import HOP, log_mel, spec_augment
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.train.losses import ctc_loss
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.language import loss_of_states

STEP = 2  # mel frames a time token
SMOOTHING = 0.1  # of labels
MOST_PREVIOUS = 24  # tokens kept of the previous text


class TranscriptLine(NamedTuple):
    """Tokens, predicted from `scored` on, after the prompt with the previous text. `read`: the decoder's input, if it
    differs."""

    ids: list[int]
    scored: int
    read: list[int] | None = None


class TextSegment(NamedTuple):
    """A sentence from mel frame `start` to `end` of the window; `end` None: cut by the window's end."""

    start: int
    end: int | None
    text: str


class TrainingWindow(NamedTuple):
    """`letters`: CTC targets of the transcript, numbered from 1."""

    mel: Float[Tensor, "M F"]
    rows: list[TranscriptLine]
    letters: list[int]


@dataclass(frozen=True)
class MultitaskBatch(Pinnable):
    """`source`: the window of each row of tokens. `letter_counts`: on the host, where CTC needs them."""

    mel: Float[Tensor, "B M F"]
    ids: Int[Tensor, "R T"]
    targets: Int[Tensor, "R T"]
    source: Int[Tensor, "R"]
    letters: Int[Tensor, "B L"]
    letter_counts: list[int]


def speech_row(
    tokenizer: WhisperTokenizer, segments: Sequence[TextSegment], language: str, task: str, timestamps: bool,
    previous: str | None = None,
) -> TranscriptLine:  # fmt: skip
    """Build the tokens of a window with speech. A last segment with `end` None gets its start time alone."""
    before = [] if previous is None else [tokenizer.sot_prev, *tokenizer.encode(" " + previous)[-MOST_PREVIOUS:]]
    body: list[int] = []
    for start, end, text in segments:
        words = tokenizer.encode(" " + text)
        if not timestamps:
            body += words
        else:
            begin = tokenizer.timestamp_begin
            body += [begin + start // STEP] + ([] if end is None else [*words, begin + -(-end // STEP)])
    prompt = tokenizer.sot_sequence(language, task, timestamps)
    return TranscriptLine([*before, *prompt, *body, tokenizer.eot], len(before) + 1)


def silent_row(tokenizer: WhisperTokenizer) -> TranscriptLine:
    return TranscriptLine([tokenizer.sot, tokenizer.no_speech, tokenizer.eot], 1)


def letters_of(texts: Sequence[str]) -> str:
    """Return the CTC alphabet of the texts: their letters, apostrophe and space."""
    return "".join(sorted({c for text in texts for c in spelled(text)}))


def spelled(text: str) -> str:
    kept = "".join(c if c.isalpha() or c == "'" else " " for c in text.lower())
    return " ".join(kept.split())


@dataclass(frozen=True)
class PrepareWindow:
    """Builds a training window: places the clips, augments them and encodes the rows. Shares: `timestamps` of the rows
    with times; `translated` of the translatable windows with a second row in English; `confused` of the decoder's input
    tokens replaced by random ones, so that it cannot rely on memorized sentences. Raises DataError for rows of more
    than `context` tokens."""

    tokenizer: WhisperTokenizer
    alphabet: str
    bands: int
    augmented: bool = True
    timestamps: float = 0.5
    translated: float = 1.0
    confused: float = 0.0
    context: int = sys.maxsize

    def __call__(self, item: WindowFrames, chance: torch.Generator) -> TrainingWindow:
        if not item.clips:
            return self._silent(item, chance)
        draw = partial(_whole, chance)
        mel, segments = _placed(item, draw)
        if self.augmented:
            mel = augment(mel, chance)
        spoken = [pair for pair in zip(segments, item.clips, strict=False) if pair[1].text.strip()]
        if not spoken:
            return TrainingWindow(mel, [silent_row(self.tokenizer)], [])
        segments, clips = zip(*spoken, strict=True)
        cut = segments[-1].end is None
        stamped = cut or float(torch.rand((), generator=chance)) < self.timestamps
        language = clips[0].language
        rows = [speech_row(self.tokenizer, segments, language, "transcribe", stamped, item.previous)]
        translating = float(torch.rand((), generator=chance)) < self.translated
        if translating and not cut and all(clip.translation for clip in clips):
            english = [s._replace(text=c.translation) for s, c in spoken]
            rows.append(speech_row(self.tokenizer, english, language, "translate", stamped))
        if (size := max(len(row.ids) for row in rows) - 1) > self.context:
            raise DataError(f"{size} tokens, more than the {self.context} of the model's context")
        rows = [self._confused(row, chance) for row in rows]
        whole = " ".join(s.text for s in segments if s.end is not None)
        letters = [] if cut else [self.alphabet.find(c) + 1 for c in spelled(whole)]
        return TrainingWindow(mel, rows, [letter for letter in letters if letter])

    def _confused(self, row: TranscriptLine, chance: torch.Generator) -> TranscriptLine:
        if not self.augmented or not self.confused:
            return row
        wrong = (torch.rand(len(row.ids), generator=chance) < self.confused).tolist()
        others = torch.randint(0, self.tokenizer.eot, (len(row.ids),), generator=chance).tolist()
        swap = [w and i < self.tokenizer.eot for w, i in zip(wrong, row.ids, strict=True)]
        return row._replace(read=[o if s else i for s, o, i in zip(swap, others, row.ids, strict=True)])

    def _silent(self, item: WindowFrames, chance: torch.Generator) -> TrainingWindow:
        width = item.sample.frames
        size = width - _whole(chance, width // 2)
        kind = NOISES[_whole(chance, len(NOISES) - 1)]
        mel = log_mel(noise(kind, size * HOP, chance), self.bands)
        return TrainingWindow(F.pad(mel, (0, width - size)), [silent_row(self.tokenizer)], [])


def _whole(chance: torch.Generator, most: int) -> int:
    """Draw an integer from 0 to `most`."""
    return int(torch.randint(0, most + 1, (), generator=chance))


def _placed(item: WindowFrames, draw) -> tuple[Float[Tensor, "M F"], list[TextSegment]]:
    """Place clips in a window: up to 1 s of silence, clips with pauses, silence, then zeros, as openai/whisper pads the
    log-mel frames of a recording that ends early."""
    width = item.sample.frames
    floor = max(-1.5, min(float(mel.max()) for mel in item.mels) - 2.0)  # as `log_mel` leaves silence
    window = torch.full((item.mels[0].shape[0], width), floor)
    room = max(0, width - sum(mel.shape[1] for mel in item.mels))
    at, segments = draw(min(100, room)), []
    for mel, clip in zip(item.mels, item.clips, strict=True):
        if segments:
            at += draw(min(50, max(0, width - at - mel.shape[1])))
        end = at + mel.shape[1]
        fits = end <= width
        if at < width - STEP:
            window[:, at : min(end, width)] = mel[:, : width - at]
            segments.append(TextSegment(at, end if fits else None, clip.text))
        at = end
    after = max(0, width - at)
    if after:
        window[:, at + draw(after) :] = 0.0
    return window, segments


def augment(mel: Float[Tensor, "M F"], chance: torch.Generator) -> Float[Tensor, "M F"]:
    """Change the volume by ±10 dB; add noise 15 to 45 dB under the loudest frames to a fifth of the windows; mask a
    narrow band and a short time in half of them. One unit of a log-mel frame is 40 dB."""
    gain, noisy, level, masked = torch.rand(4, generator=chance).tolist()
    x = mel + (gain - 0.5) / 2
    if noisy < 0.2:
        scale = 4 * math.log(10)
        top = float(x.amax(0).quantile(0.9)) - (15 + 30 * level) / 40
        hiss = top + 0.1 * torch.randn(x.shape, generator=chance)
        x = torch.logaddexp(x * scale, hiss * scale) / scale
    if masked < 0.5:
        x = spec_augment(x.T, chance, 1, 0.04, freq_masks=1, freq_width=10, fill=float(x.mean())).T
    return x


def collate(windows: list[TrainingWindow]) -> MultitaskBatch:
    rows = [(row, at) for at, window in enumerate(windows) for row in window.rows]
    ids = pad_rows([(row.read or row.ids)[:-1] for row, _ in rows])
    targets = pad_rows([[IGNORED] * (row.scored - 1) + row.ids[row.scored :] for row, _ in rows], IGNORED)
    letters = pad_text([window.letters for window in windows], multiple=1)
    source = torch.tensor([at for _, at in rows])
    return MultitaskBatch(
        stacked_batch([w.mel for w in windows]), ids, targets, source, letters.ids, letters.lengths.tolist()
    )


class LetterCTC(nn.Module):
    """A Whisper with a CTC head over letters, which teaches the encoder alignment; for training alone."""

    def __init__(self, speech: Whisper, letters: int):
        super().__init__()
        self.speech = speech
        self.head = nn.Linear(speech.config.encoder.width, letters + 1)


class Multitask(Summed):
    """Cross-entropy per token with label smoothing 0.1 plus CTC per letter (Watanabe et al. 2017)."""

    weights: Mapping[str, float] = {"text": 1.0, "ctc": 1.0}

    def counts(self, batch: MultitaskBatch) -> dict[str, int | Tensor]:
        return {"text": (batch.targets != IGNORED).sum(), "ctc": sum(batch.letter_counts)}

    def forward(self, batch: MultitaskBatch) -> dict[str, Tensor]:
        speech = self.model.speech
        frames = speech.encoder(batch.mel)
        scores, sizes = self.model.head(frames), [frames.shape[1]] * len(frames)
        losses = ctc_loss(scores, sizes, batch.letters, batch.letter_counts, blank=0)
        heard = (batch.letters > 0).any(1)  # letters count from 1; a window may have none
        states = speech.decoder.states(batch.ids, frames[batch.source]).flatten(0, 1)
        text = loss_of_states(speech.decoder, states, batch.targets.flatten(), smoothing=SMOOTHING)
        return {"text": text, "ctc": torch.where(heard, losses, 0).sum()}
