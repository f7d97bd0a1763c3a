r"""Questions in text alone, as conversations to train and to evaluate an any-to-text model.

    m=data/text/multi30k
    python recipes/any/ask_texts.py questions/train/texts.jsonl --texts $m/train --without \
        data/vision/flickr8k-1000/test.jsonl --count 12000
    python recipes/any/ask_texts.py questions/test/texts.jsonl --texts $m/test_2016_flickr --count 200

Reads TEXTS.en.gz, TEXTS.de.gz, TEXTS.fr.gz and TEXTS.cs.gz, aligned line by line. "Write a sentence." (answered by an
English one), "Translate to German: …" and "Which language is this: …". Sentences like captions of the `--without`
images are left out, since Multi30k describes some of the same photographs.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from multimodal.data.datasets.captions import tidy, unlike
from multimodal.data.datasets.chats import question, write_chats
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import open_source
from multimodal.system.options import Positive
from multimodal.train import log, start
from multimodal.train.objectives.text.translation import read_parallel

LANGUAGES = {"en": "English", "de": "German", "fr": "French", "cs": "Czech"}


@dataclass(frozen=True)
class TextQuestions:
    out: tyro.conf.Positional[Path]  # JSON lines
    texts: str  # beginning of the files' names
    without: tuple[str, ...] = ()  # images with captions
    count: Positive = 10000  # lines used
    most_words: Positive = 20  # words of the longest sentence
    seed: int = 0
    trust: Trust = Trust()


def questions(s: TextQuestions) -> Iterator[dict[str, Any]]:
    lines = read_parallel(s.texts, list(LANGUAGES))
    held = [text for data in s.without for r in _rows(data, s.trust) for text in r.texts]
    fine = unlike(lines["en"], held)
    usable = [i for i, text in enumerate(lines["en"]) if fine[i] and 0 < len(text.split()) <= s.most_words]
    draw = random.Random(s.seed)
    draw.shuffle(usable)
    for number, i in enumerate(usable[: s.count]):
        said = {code: " ".join(own[i].split()) for code, own in lines.items()}
        yield question("Write a sentence.", [tidy(said["en"])], "sentences", "perplexity")
        yield question(f"Translate to German: {said['en']}", [said["de"]], "text to German", "bleu")
        code = list(LANGUAGES)[number % len(LANGUAGES)]
        yield question(f"Which language is this: {said[code]}", [LANGUAGES[code]], "language of text")


def _rows(data: str, trust: Trust) -> Iterator[Any]:
    source = open_source(data, trust=trust)
    return map(source.row, range(len(source)))


def main(s: TextQuestions) -> None:
    log.info("%s: %d questions", s.out, write_chats(s.out, questions(s)))


if __name__ == "__main__":
    start(main)
