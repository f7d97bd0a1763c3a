"""Synthetic English speech for training and testing a recognizer, by espeak-ng and flite (Debian packages).

    python recipes/speech/speak.py speech/train.jsonl --texts captions.en.gz=8 wikitext.txt.gz=2 --spelled 1 --hours 4
    python recipes/speech/speak.py speech/test.jsonl --texts captions-test.en.gz=1 --count 200 --unseen 0.2 --seed 1

Writes wav files beside a JSONL manifest of {"audio_filepath", "duration", "text", "voice"}; 4 h take about 3 minutes on
2 cores. Text is lower-cased, with apostrophes as its only punctuation. Lines with digits are skipped, since voices and
transcripts would disagree on how to read them. A share of `--unseen` is spoken by a voice that no other run uses.
"""

import itertools
import math
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from multimodal.data.manifests import read_text
from multimodal.data.spoken import SpokenText, write_speech
from multimodal.errors import UsageError
from multimodal.system.options import Limits, Positive, Share
from multimodal.system.outputs import Outputs
from multimodal.train import start

ACCENTS = ["en-us", "en-us", "en-us-nyc", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-029"]
VARIANTS = ["f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8"]
VARIANTS += ["Alicia", "Andy", "Annie", "Gene", "Lee", "Michael", "adam", "belinda", "linda", "john"]
FLITE = ["kal16", "slt", "awb", "rms"]
UNSEEN = "en-gb-x-gbcwmd+steph"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SENTENCE_END = re.compile(r"(?<=[.!?]) ")


@dataclass(frozen=True)
class SpeechRun:
    manifest: tyro.conf.Positional[Path]
    texts: tuple[str, ...]  # FILE=SHARE each
    spelled: Share = 0.0  # share of digit and letter strings
    hours: Annotated[float, Limits(0, above=True)] = math.inf
    count: Positive | None = None  # utterances
    unseen: Share = 0.0  # share spoken by a voice of no other run
    seed: int = 0
    overwrite: bool = False  # replace a manifest that multimodal did not write


def sentences(path: Path, most_words: int = 18) -> list[str]:
    """Read the sentences of a text file (plain or gzip) in lower case, with words of letters and apostrophes."""
    kept = []
    for line in read_text(path).split("\n"):
        for sentence in SENTENCE_END.split(line.strip()):
            text = re.sub(r" (n't|'\w+)\b", r"\1", sentence.replace("@-@", " ").replace("’", "'").lower())
            text = re.sub(r"[^a-z' ]", " ", text) if re.search(r"[\d<=@&:_~]|[^\x00-\x7f]", text) is None else ""
            text = re.sub(r"(?<![a-z])'|'(?![a-z])", "", text)
            if 3 <= len(text.split()) <= most_words:
                kept.append(" ".join(text.split()))
    return kept


def spelled(chooser: random.Random) -> tuple[str, str]:
    """Draw digits or letters; return the text and its spelling for a voice, which would read a lone "a" as an
    article."""
    count = chooser.randint(1, 8)
    if chooser.random() < 0.6:
        text = " ".join(chooser.choices(DIGITS, k=count))
        return text, text
    letters = chooser.choices(string.ascii_lowercase, k=count)
    return " ".join(letters), ", ".join(letters).upper()


def command(chooser: random.Random, unseen: float) -> tuple[str, list[str]]:
    """Draw a voice; return it and the arguments of its synthesizer, with placeholders `{wav}` and `{text}`."""
    if chooser.random() < 0.3 and not unseen:
        voice = chooser.choice(FLITE)
        stretch = f"duration_stretch={chooser.uniform(0.8, 1.25):.2f}"
        return voice, ["flite", "-voice", voice, "--setf", stretch, "-o", "{wav}", "-t", "{text}"]
    voice = f"{chooser.choice(ACCENTS)}+{chooser.choice(VARIANTS)}"
    voice = UNSEEN if chooser.random() < unseen else voice
    pace, pitch = str(chooser.randint(125, 195)), str(chooser.randint(25, 75))
    return voice, ["espeak-ng", "-v", voice, "-s", pace, "-p", pitch, "-w", "{wav}", "{text}"]


def pools(s: SpeechRun) -> tuple[list[list[str]], list[float]]:
    """Sentences and share of each file. Raises UsageError where there are none, or no share."""
    if wrong := [spec for spec in s.texts if not re.fullmatch(r".+=\d*\.?\d+", spec)]:
        raise UsageError(f"{wrong[0]}: expected FILE=SHARE", argument="texts")
    paths, shares = zip(*(spec.rsplit("=", 1) for spec in s.texts), strict=True)
    found = [sentences(Path(path)) for path in paths]
    for path, pool in zip(paths, found, strict=True):
        if not pool:
            raise UsageError(f"{path}: has no sentence of 3 to 18 words in ASCII without digits", argument="texts")
    if not sum(weights := [*map(float, shares)]) + s.spelled > 0:
        raise UsageError("expected a share above 0 here or in --spelled", argument="texts")
    return found, weights


def plan(s: SpeechRun, pools: list[list[str]], shares: list[float]) -> Iterator[SpokenText]:
    """Yield utterances without end; a file whose sentences are used up starts again."""
    chooser = random.Random(s.seed)
    for pool in pools:
        chooser.shuffle(pool)
    sources = [itertools.cycle(pool) for pool in pools] + [None]
    while True:
        source = chooser.choices(sources, [*shares, s.spelled])[0]
        text, spoken = spelled(chooser) if source is None else (next(source),) * 2
        yield SpokenText(text, spoken, *command(chooser, s.unseen))


def main(s: SpeechRun) -> None:
    if s.hours == math.inf and s.count is None:
        raise UsageError("expected --hours or --count")
    utterances = plan(s, *pools(s))  # read before anything is written
    Outputs([spec.rpartition("=")[0] for spec in s.texts], s.overwrite).claim(s.manifest)
    write_speech(s.manifest, itertools.islice(utterances, s.count), s.hours * 3600)


if __name__ == "__main__":
    start(main)
