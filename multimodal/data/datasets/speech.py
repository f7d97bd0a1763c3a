"""Speech for training: recordings with transcripts from manifests, their features cached or made when read."""

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.batching import Group
from multimodal.data.loader import BROKEN
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import Row, Source, joined, open_source
from multimodal.errors import DataError, UsageError
from multimodal.tokens.audio.log_mel import HOP, RATE, filterbank
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Spoken(NamedTuple):
    """Log-mel frames [F M], ids of the transcript without control tokens, and whether to augment."""

    features: Tensor
    ids: list[int]
    augment: bool


def plain(text: str) -> str:
    """A transcript as the recipe learns it: lower case, letters, digits and apostrophes, single spaces."""
    kept = "".join(c if c.isalnum() or c == "'" else " " for c in text.replace("’", "'").lower())
    return " ".join(kept.split())


def transcript_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a transcript: the space before the first word makes it the same tokens as inside a sentence."""
    return tokenizer.encode(" " + text)


def read_features(source: Source, number: int, bands: int = 80) -> Float[Tensor, "F M"]:
    """`filterbank` of one recording. Raises one of `loader.BROKEN`."""
    return filterbank(read_audio(source.read(number).media, on_truncated="warn"), bands)


def load_features(
    source: Source, cache: Path, bands: int = 80, where: str = "", most_broken: float = 1.0
) -> list[Float[Tensor, "_ M"] | None]:
    """`read_features` of every item as float16, computed once for a `cache` folder; None for a broken one, which is
    logged by name. Raises DataError, naming `where`, as soon as more than `most_broken` of all are broken."""
    rows = [source.row(number) for number in range(len(source))]
    known = "\n".join(f"{row.media} {stamp(row.media)} {row.fault}" for row in rows)
    key = hashlib.sha256(f"{bands}\n{known}".encode()).hexdigest()[:16]
    path = cache / f"features-{key}.npz"
    if not path.exists():
        made = []
        for number in range(len(source)):
            made.append(_read_or_log(source, number, bands))
            broken = sum(not len(row) for row in made) if not len(made[-1]) else 0
            if broken > most_broken * len(source):
                many = f"{broken} of the first {number + 1} recordings are broken"
                raise DataError(f"{where}: {many}, more than {most_broken:.1%} of its {len(source)}")
        cache.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")  # several processes may come here
        with part.open("wb") as file:
            np.savez(file, frames=np.concatenate(made), lengths=np.array([len(row) for row in made]))
        part.rename(path)
    with reading_cache(path), path.open("rb") as raw, np.load(raw) as file:  # numpy leaves a damaged one open
        parts = torch.from_numpy(file["frames"]).split(file["lengths"].tolist())
    return [part if len(part) else None for part in parts]


@contextlib.contextmanager
def reading_cache(path: Path) -> Iterator[None]:
    """Raises DataError for what numpy raises on a damaged file."""
    try:
        yield
    except Exception as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0][:80]
        raise DataError(f"{path}: damaged cache ({cause}); delete it to compute it again") from None


def stamp(media: object) -> tuple[int, ...]:
    """Size and time of a file, so that a changed one is read again."""
    if not isinstance(media, str) or not os.path.exists(media):
        return ()
    status = os.stat(media)
    return status.st_size, status.st_mtime_ns


def _read_or_log(source: Source, number: int, bands: int) -> np.ndarray:
    try:
        return read_features(source, number, bands).half().numpy()
    except BROKEN as error:
        name, cause = source.name(number), " ".join(str(error).split())
        log.warning("broken recording left out: %s: %s", name, cause.removeprefix(f"{name}: "))
        return np.zeros((0, bands), np.float16)


class Corpus:
    """A `loader.Source` of `Group`s over manifests `PATH` or `PATH=TIMES` (heard so often an epoch, 0.5: a random
    half). All `sources.open_source` takes may be one; each item needs a text.

    With a `cache` folder all features are computed first and kept in memory, and what is broken is left out with its
    transcript. Without, they are computed when they are read, and each line needs its `duration` in seconds.
    Raises DataError, also where more than `most_broken` of a manifest is broken."""

    def __init__(
        self, specs: Sequence[str], cache: Path | None = None, bands: int = 80, most_broken: float = 0.05,
        trust: Trust = OWN_FOLDER,
    ):  # fmt: skip
        self.times, sources, self.features, self.bands = [], [], None if cache is None else [], bands
        self.numbers: list[int] = []  # in the joined sources
        self.texts: list[str] = []
        self.lengths: list[int] = []
        self.ids: list[list[int]] = []
        self.paths = [_spec(spec) for spec in specs]
        before = 0
        for path, times in self.paths:
            source = open_source(path, trust=trust)
            kept = self._add(source, path, before, cache, most_broken)
            self.times.append((kept, times))
            sources.append(source)
            before += len(source)
        self.source = joined(sources)

    def _add(self, source: Source, path: str, before: int, cache: Path | None, most_broken: float) -> int:
        """Takes over what is whole of a manifest; gives how many items that are."""
        found = load_features(source, cache, self.bands, path, most_broken) if cache else None
        whole = [i for i in range(len(source)) if (not source.row(i).fault if found is None else found[i] is not None)]
        if (broken := len(source) - len(whole)) > most_broken * len(source):
            raise DataError(f"{path}: {broken} of {len(source)} recordings are broken, more than {most_broken:.1%}")
        if broken:
            log.warning("%s: %d of %d recordings are broken and left out", path, broken, len(source))
        for number in whole:
            row = source.row(number)
            if not row.texts:
                raise DataError(f"{row.place}: has no text")
            self.texts.append(plain(row.texts[0]))
            self.lengths.append(len(found[number]) if found else _frames(row))
        self.numbers += [before + number for number in whole]
        if found:
            self.features += [found[number] for number in whole]
        return len(whole)

    def encode(self, tokenizer: Tokenizer) -> None:
        """Gives the items the ids of their transcripts."""
        self.ids = [transcript_ids(tokenizer, text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, key: Group) -> str:
        return " + ".join(self.source.name(self.numbers[number % len(self)]) for number in key.numbers)

    def read(self, key: Group) -> Spoken:
        own = [number % len(self) for number in key.numbers]
        return Spoken(torch.cat([self.frames(i) for i in own]), [t for i in own for t in self.ids[i]], key.augment)

    def frames(self, number: int) -> Float[Tensor, "_ M"]:
        """Features of one utterance. Raises one of `loader.BROKEN`."""
        if self.features is None:
            return read_features(self.source, self.numbers[number], self.bands)
        return self.features[number].float()


def _spec(spec: str) -> tuple[str, float]:
    path, _, times = spec.rpartition("=")
    if not path or Path(spec).exists():
        return spec, 1.0
    try:
        value = float(times)
    except ValueError:
        return spec, 1.0
    if not 0 < value < math.inf:
        raise UsageError(f"{spec}: a manifest is heard a positive number of times ({times})")
    return path, value


def _frames(row: Row) -> int:
    seconds = row.fields.get("duration")
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise DataError(f"{row.place}: has no duration ({seconds!r}), which is needed without a cache")
    return max(1, round(seconds * RATE / HOP) - 2)
