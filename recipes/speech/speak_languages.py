"""Synthetic speech in several languages with English translations: parallel sentences spoken by espeak-ng.

    m=data/text/multi30k
    for l in en de fr cs; do python recipes/speech/speak_languages.py speech/train-$l.jsonl --language $l \\
        --texts $m/train.$l.gz --english $m/train.en.gz --count 10000 --pieces 2000; done
    python recipes/speech/speak_languages.py speech/test-de.jsonl --language de --texts $m/test_2016_flickr.de.gz \\
        --english $m/test_2016_flickr.en.gz --count 1000 --most_words 99 --seed 1

Writes wav files beside a JSONL manifest of {"audio_filepath", "duration", "text", "voice", "language", "translation"}
(`translation` is null for English and for pieces). Line n of `--english` translates line n of `--texts`. `--pieces` are
one to four words cut from sentences, from which a model first learns where words are. A share of `--unseen` is spoken
by a voice that no other run uses. `--joined 3` makes recordings of three sentences with pauses. A thousand utterances
take about 15 s on one core.
"""

import html
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import tyro

from multimodal.data.manifests import read_aligned
from multimodal.data.spoken import SpokenText, write_speech
from multimodal.system.options import Limits, Natural, Positive, Share
from multimodal.system.outputs import Outputs
from multimodal.train import start

VOICES = {"en": ["en-us", "en-gb"], "de": ["de"], "fr": ["fr-fr"], "cs": ["cs"]}
VARIANTS = ["", "", "", "+m3", "+f2", "+f4"]  # the plain voice speaks half of the texts
UNSEEN = "+m7"


@dataclass(frozen=True)
class SpeechOfLanguage:
    manifest: tyro.conf.Positional[Path]
    language: Literal["en", "de", "fr", "cs"]
    texts: Path  # sentences, one per line
    english: Path  # their translations, line by line
    count: Natural  # sentences
    pieces: Natural = 0  # pieces of one to four words
    most_words: Positive = 16  # words of the longest sentence
    joined: Positive = 1  # sentences of a recording
    pause: Annotated[float, Limits(0, 60)] = 0.4  # seconds between them
    unseen: Share = 0.0  # share spoken by a voice of no other run
    seed: int = 0
    overwrite: bool = False  # replace a manifest that multimodal did not write


def read(s: SpeechOfLanguage) -> list[list[str]]:
    """Sentences and their translations. Raises DataError unless they have equal numbers of lines."""
    return [[" ".join(line.replace("’", "'").split()) for line in own] for own in read_aligned([s.texts, s.english])]


def piece(chooser: random.Random, sentence: str) -> str:
    words = sentence.split()
    count = min(len(words), chooser.randint(1, 4))
    start = chooser.randint(0, len(words) - count)
    return " ".join(words[start : start + count]).strip(".,;:!?\"'- ")


def texts(
    s: SpeechOfLanguage, own: list[str], english: list[str], chooser: random.Random
) -> Iterator[tuple[str, str | None]]:
    """Yield texts and translations: each whole sentence once, then random pieces."""
    order = [i for i, text in enumerate(own) if text and len(text.split()) <= s.most_words]
    chooser.shuffle(order)
    for i in order[: s.count]:
        yield own[i], None if s.language == "en" else english[i]
    for i in chooser.choices(order, k=s.pieces):
        if text := piece(chooser, own[i]):
            yield text, None


def join(s: SpeechOfLanguage, items: tuple[tuple[str, str | None], ...]) -> tuple[str, str, str | None]:
    """Return the text of a recording, as espeak-ng's markup reads it with pauses, and its translation."""
    own, english = zip(*items, strict=True)
    spoken = f' <break time="{round(1000 * s.pause)}ms"/> '.join(map(html.escape, own))
    return " ".join(own), spoken, " ".join(english) if all(english) else None


def plan(s: SpeechOfLanguage, own: list[str], english: list[str]) -> Iterator[SpokenText]:
    chooser, markup = random.Random(f"{s.seed} {s.language}"), ["-m"] if s.joined > 1 else []
    found = texts(s, own, english, chooser)
    while items := tuple(islice(found, s.joined)):
        text, spoken, translation = join(s, items)
        variant = UNSEEN if chooser.random() < s.unseen else chooser.choice(VARIANTS)
        voice = chooser.choice(VOICES[s.language]) + variant
        pace, pitch = str(chooser.randint(175, 215)), str(chooser.randint(35, 65))
        command = ["espeak-ng", *markup, "-v", voice, "-s", pace, "-p", pitch, "-w", "{wav}", "{text}"]
        facts = {"language": s.language, "translation": translation}
        yield SpokenText(text, spoken if markup else text, voice, command, facts)


def main(s: SpeechOfLanguage) -> None:
    utterances = plan(s, *read(s))  # read before anything is written
    Outputs([s.texts, s.english], s.overwrite).claim(s.manifest)
    write_speech(s.manifest, utterances)


if __name__ == "__main__":
    start(main)
