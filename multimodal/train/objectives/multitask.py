"""Whisper's multitask format (Radford et al. 2022, section 2.3): one decoder that is told by tokens what to do.

[<|startofprev|> text before] <|startoftranscript|> language transcribe|translate
    (<|notimestamps|> text | <|begin|> text <|end|> ...) <|endoftext|>
<|startoftranscript|> <|nospeech|> <|endoftext|>
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.data.datasets.speech_windows import NOISES, Spoken, noise
from multimodal.decoding import logits as rules
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam
from multimodal.models.whisper import SpeechToText
from multimodal.tokens.audio.log_mel import HOP, log_mel, spec_augment
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.train.objective import Summed

UNSCORED = -100
STEP = 2  # mel frames a time token
MOST_PREVIOUS = 24  # tokens of the text before that are kept


class Row(NamedTuple):
    """A line of tokens, of which those from `scored` on are to be predicted, the previous text not. `read`: what the
    decoder is given in their place (None: the same)."""

    ids: list[int]
    scored: int
    read: list[int] | None = None


class Segment(NamedTuple):
    """A sentence from mel frame `start` to `end` of the window; `end` None: cut off by the window's end."""

    start: int
    end: int | None
    text: str


class Window(NamedTuple):
    """`letters`: the transcript as targets of the CTC head, counted from 1."""

    mel: Float[Tensor, "M F"]
    rows: list[Row]
    letters: list[int]


@dataclass(frozen=True)
class MultitaskBatch:
    """`source` says which window each row of tokens hears."""

    mel: Float[Tensor, "B M F"]
    ids: Int[Tensor, "R T"]
    targets: Int[Tensor, "R T"]
    source: Int[Tensor, "R"]
    letters: Int[Tensor, "B L"]
    letter_counts: Int[Tensor, "B"]


def speech_row(
    tokenizer: WhisperTokenizer, segments: Sequence[Segment], language: str, task: str, timestamps: bool,
    previous: str | None = None,
) -> Row:  # fmt: skip
    """The tokens of a window with speech; `segments` in order, the last one with `end` None gives its begin alone."""
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
    return Row([*before, *prompt, *body, tokenizer.eot], len(before) + 1)


def silent_row(tokenizer: WhisperTokenizer) -> Row:
    return Row([tokenizer.sot, tokenizer.no_speech, tokenizer.eot], 1)


def letters_of(texts: Sequence[str]) -> str:
    """The alphabet of a CTC head: letters, apostrophe and space that occur."""
    return "".join(sorted({c for text in texts for c in spelled(text)}))


def spelled(text: str) -> str:
    kept = "".join(c if c.isalpha() or c == "'" else " " for c in text.lower())
    return " ".join(kept.split())


@dataclass(frozen=True)
class Prepare:
    """Makes a window of a sample: places the clips, adds loudness, noise and masks, and writes the rows. The shares
    `timestamps` of the rows have times, `translated` of the windows that can have it a second row in English;
    `confused` of the text tokens are read as random ones, so that a decoder which knows the sentences by heart
    must listen."""

    tokenizer: WhisperTokenizer
    alphabet: str
    bands: int
    augmented: bool = True
    timestamps: float = 0.5
    translated: float = 1.0
    confused: float = 0.0

    def __call__(self, item: Spoken, chance: torch.Generator) -> Window:
        if not item.clips:
            return self._silent(item, chance)
        draw = partial(_whole, chance)
        mel, segments = _placed(item, draw)
        if self.augmented:
            mel = augment(mel, chance)
        cut = segments[-1].end is None
        stamped = cut or float(torch.rand((), generator=chance)) < self.timestamps
        language = item.clips[0].language
        rows = [speech_row(self.tokenizer, segments, language, "transcribe", stamped, item.previous)]
        told = float(torch.rand((), generator=chance)) < self.translated
        if told and not cut and all(clip.translation for clip in item.clips):
            english = [s._replace(text=c.translation) for s, c in zip(segments, item.clips, strict=True)]
            rows.append(speech_row(self.tokenizer, english, language, "translate", stamped))
        rows = [self._confused(row, chance) for row in rows]
        whole = " ".join(s.text for s in segments if s.end is not None)
        letters = [] if cut else [self.alphabet.find(c) + 1 for c in spelled(whole)]
        return Window(mel, rows, [letter for letter in letters if letter])

    def _confused(self, row: Row, chance: torch.Generator) -> Row:
        if not self.augmented or not self.confused:
            return row
        wrong = (torch.rand(len(row.ids), generator=chance) < self.confused).tolist()
        others = torch.randint(0, self.tokenizer.eot, (len(row.ids),), generator=chance).tolist()
        swap = [w and i < self.tokenizer.eot for w, i in zip(wrong, row.ids, strict=True)]
        return row._replace(read=[o if s else i for s, o, i in zip(swap, others, row.ids, strict=True)])

    def _silent(self, item: Spoken, chance: torch.Generator) -> Window:
        width = item.sample.frames
        size = width - _whole(chance, width // 2)
        kind = NOISES[_whole(chance, len(NOISES) - 1)]
        mel = log_mel(noise(kind, size * HOP, chance), self.bands)
        return Window(F.pad(mel, (0, width - size)), [silent_row(self.tokenizer)], [])


def _whole(chance: torch.Generator, most: int) -> int:
    """0 to `most`."""
    return int(torch.randint(0, most + 1, (), generator=chance))


def _placed(item: Spoken, draw) -> tuple[Float[Tensor, "M F"], list[Segment]]:
    """The clips in a window: up to 1 s of silence before, a pause between, silence after and then zeros, as a
    recording that ends before its window does (openai/whisper pads the log-mel frames with 0)."""
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
            segments.append(Segment(at, end if fits else None, clip.text))
        at = end
    after = max(0, width - at)
    if after:
        window[:, at + draw(after) :] = 0.0
    return window, segments


def augment(mel: Float[Tensor, "M F"], chance: torch.Generator) -> Float[Tensor, "M F"]:
    """Loudness by ±10 dB, in a fifth of the cases steady noise 15 to 45 dB under the loudest frames, in half of
    them one narrow mask in frequency and one in time. One unit of a log-mel frame is 40 dB."""
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


def collate(windows: list[Window]) -> MultitaskBatch:
    rows = [(row, at) for at, window in enumerate(windows) for row in window.rows]
    longest = -(-max(len(row.ids) - 1 for row, _ in rows) // 8) * 8
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    targets = torch.full((len(rows), longest), UNSCORED)
    for number, (row, _) in enumerate(rows):
        count = len(row.ids) - 1
        ids[number, :count] = torch.tensor((row.read or row.ids)[:-1])
        targets[number, row.scored - 1 : count] = torch.tensor(row.ids[row.scored :])
    counts = torch.tensor([len(window.letters) for window in windows])
    letters = torch.zeros(len(windows), max(1, int(counts.max())), dtype=torch.long)
    for number, window in enumerate(windows):
        letters[number, : len(window.letters)] = torch.tensor(window.letters, dtype=torch.long)
    source = torch.tensor([at for _, at in rows])
    return MultitaskBatch(torch.stack([w.mel for w in windows]), ids, targets, source, letters, counts)


class Lettered(nn.Module):
    """The model with a CTC head over letters, which leads the encoder to find where sounds lie; only for training."""

    def __init__(self, speech: SpeechToText, letters: int):
        super().__init__()
        self.speech = speech
        self.head = nn.Linear(speech.config.encoder.width, letters + 1)


class Multitask(Summed):
    """Cross-entropy a token and, beside it, CTC a letter (Watanabe et al. 2017)."""

    weights: Mapping[str, float] = {"text": 1.0, "ctc": 1.0}

    def __init__(self, model: Lettered, smoothing: float = 0.1):
        super().__init__(model)
        self.smoothing = smoothing

    def counts(self, batch: MultitaskBatch) -> dict[str, int | Tensor]:
        return {"text": (batch.targets != UNSCORED).sum(), "ctc": batch.letter_counts.sum()}

    def forward(self, batch: MultitaskBatch) -> dict[str, Tensor]:
        speech = self.model.speech
        frames = speech.encoder(batch.mel)
        known = batch.letter_counts > 0
        scores = self.model.head(frames[known]).float().log_softmax(-1)
        lengths = torch.full((len(scores),), scores.shape[1])
        ctc = F.ctc_loss(
            scores.transpose(0, 1), batch.letters[known], lengths, batch.letter_counts[known], reduction="sum",
            zero_infinity=True,
        ) if len(scores) else frames.sum() * 0  # fmt: skip
        logits = speech.decoder(batch.ids, frames[batch.source])
        text = F.cross_entropy(
            logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=UNSCORED, reduction="sum",
            label_smoothing=self.smoothing,
        )  # fmt: skip
        return {"text": text, "ctc": ctc}


class Heard(NamedTuple):
    """Per window: code of the most probable language, and the probability that there is no speech."""

    languages: list[str]
    no_speech: list[float]


@torch.inference_mode()
def listen(model: SpeechToText, tokenizer: WhisperTokenizer, frames: Float[Tensor, "B T D"]) -> Heard:
    """What the token after <|startoftranscript|> says about each window; `frames` are the encoder's."""
    start = torch.full((len(frames), 1), tokenizer.sot, device=frames.device)
    logits = model.decoder(start, frames)[:, 0]
    best = logits[:, list(tokenizer.language_tokens)].argmax(-1).tolist()
    silence = rules.no_speech_probability(logits, tokenizer.no_speech).tolist()
    return Heard([tokenizer.languages[i] for i in best], silence)


@torch.inference_mode()
def write(
    model: SpeechToText, tokenizer: WhisperTokenizer, frames: Float[Tensor, "B T D"], languages: Sequence[str],
    task: str = "transcribe", beams: int | None = None,
) -> list[str]:  # fmt: skip
    """Texts of windows that each hold one sentence, without times; greedy, or a beam search with `beams`."""
    prompt = torch.tensor([tokenizer.sot_sequence(language, task, False) for language in languages])
    never = rules.suppress([i for i in tokenizer.control if i != tokenizer.eot])
    step = sampling.over_source(model.decoder, frames)
    room = model.config.decoder.context // 2
    common = {"eos": tokenizer.eot, "max_new": room, "rules": [never]}
    cache = model.decoder.new_cache()
    found = beam(step, prompt, cache, beams=beams, **common) if beams else (
        sampling.greedy(step, prompt, cache, **common)
    )  # fmt: skip
    return [tokenizer.decode(ids).strip() for ids in found.ids]
