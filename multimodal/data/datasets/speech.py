"""Speech datasets: recordings with transcripts from manifests, with features cached or computed on reading."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unicodedata import category, normalize

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.batching import UtteranceGroup
from multimodal.data.datasets.cached_frames import cached_frames
from multimodal.data.manifests import repeated
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns, Source, duration_of, joined, open_source
from multimodal.errors import DataError
from multimodal.tokens.audio.features import speech_features
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
ZWNJ, ZWJ, DIVIDER = "\u200c", "\u200d", "\u200b"  # the last divides words (Thai, Khmer)
INSIDE = f"'{ZWNJ}{ZWJ}"
OTHER = re.compile("[^a-z0-9']+")  # of ASCII


class SpeechFrames(NamedTuple):
    """Log-mel frames [F M], ids of the transcript without control tokens, and whether to augment."""

    features: Tensor
    ids: list[int]
    augment: bool


def plain(text: str) -> str:
    """Normalize a transcript: lower case, composed letters with their marks, digits and apostrophes, single spaces.
    Joiners stay inside of words, where they are spelling (Persian, Sinhala); other invisible characters go."""
    text = text.replace("’", "'").replace(DIVIDER, " ").lower()
    if text.isascii():
        return " ".join(OTHER.sub(" ", text).split())
    text = normalize("NFC", text)
    kept = "".join(c if category(c)[0] in "LMN" or c in INSIDE else "" if category(c) == "Cf" else " " for c in text)
    words = (word.lstrip(ZWNJ + ZWJ).rstrip(ZWNJ) for word in kept.split())  # Malayalam ends words with a ZWJ
    return " ".join(filter(None, words))


def transcript_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a transcript. The leading space gives its first word the same tokens as inside a sentence; a text without
    words, of a recording without speech, has none."""
    return tokenizer.encode(" " + text) if text.strip() else []


def read_features(source: Source, key: int, bands: int = 80, kind: str = "fixed") -> Float[Tensor, "F *M"]:
    """Return `speech_features` of one recording. Raises one of `loader.BROKEN`."""
    wave = read_audio(source.read(key).media, on_truncated="warn")
    return speech_features(kind, [wave], bands)[0][0]


def load_features(
    source: Source, cache: Path, bands: int = 80, where: str = "", most_broken: float = 1.0
) -> list[Float[Tensor, "_ M"]]:
    """Return `cached_frames` of every item's `read_features`."""
    items = list(map(source.identity, range(len(source))))
    return cached_frames(
        cache, items, lambda key: read_features(source, key, bands), source.name, bands, where, most_broken
    )


class SpeechCorpus:
    """A `loader.Source` of `UtteranceGroup`s over manifests `PATH` or `PATH=TIMES` (repeats per epoch; 0.5: a random
    half): anything that `open_source` reads, each item with a text.

    With a `cache` folder all features are computed first, and broken items are dropped with their transcripts. Without
    one they are computed on reading, and each line needs its `duration` in seconds. Raises DataError, also if more than
    `most_broken` of a manifest is broken."""

    def __init__(
        self, specs: Sequence[str], cache: Path | None = None, bands: int = 80, most_broken: float = 0.05,
        columns: ListColumns = USUAL, trust: Trust = OWN_FOLDER,
    ):  # fmt: skip
        self.times, sources, self.features, self.bands = [], [], None if cache is None else [], bands
        self.keys: list[int] = []  # in the joined sources
        self.texts: list[str] = []
        self.lengths: list[int] = []  # frames
        self.ids: list[list[int]] = []
        self.paths = [repeated(spec) for spec in specs]
        start = 0
        for path, times in self.paths:
            source = open_source(path, columns=columns, trust=trust)
            kept = self._add(source, path, start, cache, most_broken)
            self.times.append((kept, times))
            sources.append(source)
            start += len(source)
        self.source = joined(sources)

    def _add(self, source: Source, path: str, start: int, cache: Path | None, most_broken: float) -> int:
        """Add the good items of a manifest and return their number."""
        features = load_features(source, cache, self.bands, path, most_broken) if cache else None
        usable = lambda key: len(features[key]) > 0 if features else not source.row(key).fault
        good = list(filter(usable, range(len(source))))
        if (broken := len(source) - len(good)) > most_broken * len(source):
            raise DataError(f"{path}: {broken} of {len(source)} recordings are broken, more than {most_broken:.1%}")
        if broken:
            log.warning("%s: %d of %d recordings are broken and skipped", path, broken, len(source))
        for key in good:
            row = source.row(key)
            if not row.texts:
                raise DataError(f"{row.place}: has no text")
            seconds = duration_of(row.fields)
            if features is None and not seconds > 0:
                given = row.fields.get("duration")
                raise DataError(f"{row.place}: has no duration ({given!r}), which it needs without a cache")
            self.texts.append(plain(row.texts[0]))
            self.lengths.append(len(features[key]) if features else max(1, round(seconds * RATE / HOP) - 2))
        if empty := self.texts[len(self.keys) :].count(""):
            log.warning("%s: %d of %d texts have no words: taken for no speech", path, empty, len(good))
        self.keys += [start + key for key in good]
        if features:
            self.features += [features[key] for key in good]
        return len(good)

    def encode(self, tokenizer: Tokenizer) -> None:
        """Set the ids of all transcripts."""
        self.ids = [transcript_ids(tokenizer, text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.keys)

    def written(self, number: int) -> str:
        """Return a transcript as its source has it, by which `evaluate asr` scores."""
        return self.source.row(self.keys[number]).texts[0]

    def name(self, key: UtteranceGroup) -> str:
        return " + ".join(self.source.name(self.keys[number % len(self)]) for number in key.numbers)

    def read(self, key: UtteranceGroup) -> SpeechFrames:
        numbers = [number % len(self) for number in key.numbers]
        ids = [token for number in numbers for token in self.ids[number]]
        return SpeechFrames(torch.cat([self.frames(number) for number in numbers]), ids, key.augment)

    def frames(self, number: int) -> Float[Tensor, "_ M"]:
        """Return the features of one utterance. Raises one of `loader.BROKEN`."""
        if self.features is None:
            return read_features(self.source, self.keys[number], self.bands)
        return self.features[number].float()
