r"""Questions about speech, as conversations to train and to evaluate an any-to-text model.

    s=data/speech m=data/text/multi30k
    python recipes/any/ask_speech.py questions/train/speech.jsonl --data $s/an4/train.jsonl $s/fsdd/train.jsonl \
        $s/speechocean762/train.jsonl
    python recipes/any/ask_speech.py questions/train/languages.jsonl --data synthetic/train-{en,de,fr,cs}.jsonl \
        --english $m/train.en.gz --german $m/train.de.gz

"Transcribe the recording." for lines whose language is English or not stated; with a `language` also "Which language is
spoken?", and for English sentences of `--english` "Translate to German." (line n of `--german` translates line n).
`recipes/speech/speak_languages.py` makes such speech.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from multimodal.data.datasets.chats import question, write_chats
from multimodal.data.manifests import read_aligned
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import SourceRow, duration_of, open_source
from multimodal.errors import DataError, UsageError
from multimodal.train import log, start

LANGUAGES = {"en": "English", "de": "German", "fr": "French", "cs": "Czech"}
TRANSCRIBE, WHICH, TRANSLATE = "Transcribe the recording.", "Which language is spoken?", "Translate to German."


@dataclass(frozen=True)
class SpeechQuestions:
    out: tyro.conf.Positional[Path]  # JSON lines
    data: tuple[str, ...]  # manifests of recordings with their texts
    english: Path | None = None  # sentences, one per line
    german: Path | None = None  # their translations
    longest: float = 12.0  # s, of a recording
    trust: Trust = Trust()

    def __post_init__(self):
        if not self.data:
            raise UsageError("expected a manifest or more", argument="data")
        if (self.english is None) != (self.german is None):
            raise UsageError("needs --german, and --german needs english", argument="english")


def plain(text: str) -> str:
    """Lower case without punctuation, as the recordings' sets differ."""
    return " ".join("".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split())


def translations(s: SpeechQuestions) -> dict[str, str]:
    if s.english is None or s.german is None:
        return {}
    lines = [[" ".join(line.split()) for line in own] for own in read_aligned([s.english, s.german])]
    return {en.replace("’", "'"): de for en, de in zip(*lines, strict=True) if en and de}


def check(line: SourceRow) -> None:
    """Raise DataError for a line that is no recording with a text in a known language."""
    language = line.fields.get("language")
    if not isinstance(line.media, str) or not line.texts:
        raise DataError(f"{line.place}: expected a line of a manifest with its text")
    if language is not None and language not in LANGUAGES:
        raise DataError(f"{line.place}: expected a language among {', '.join(LANGUAGES)}, got {language!r}")


def questions(s: SpeechQuestions) -> Iterator[dict[str, Any]]:
    german = translations(s)
    for data in s.data:
        source = open_source(data, trust=s.trust)
        for key in range(len(source)):
            line = source.row(key)
            if line.fault or duration_of(line.fields) > s.longest:
                continue
            check(line)
            path, text, language = str(Path(line.media).resolve()), line.texts[0], line.fields.get("language")
            name = Path(data).absolute().parent.name if language is None else "synthetic English"
            if language in (None, "en"):
                asked = question(TRANSCRIBE, [plain(text)], f"transcribe {name}", "wer", audio=path)
                yield asked | {"language": "en"}
            if language is not None:
                yield question(WHICH, [LANGUAGES[language]], "language of speech", audio=path)
            if language == "en" and text in german:
                yield question(TRANSLATE, [german[text]], "speech to German", "bleu", audio=path)


def main(s: SpeechQuestions) -> None:
    rows = list(questions(s))  # before anything is written
    log.info("%s: %d questions", s.out, write_chats(s.out, rows))


if __name__ == "__main__":
    start(main)
