"""Synthetic speech in several languages with English translations: parallel sentences spoken by espeak-ng.

    m=../shared/data/text/multi30k
    for l in en de fr cs; do python recipes/speech/speak_languages.py speech/train-$l.jsonl --language $l \\
        --texts $m/train.$l.gz --english $m/train.en.gz --count 10000 --pieces 2000; done
    python recipes/speech/speak_languages.py speech/test-de.jsonl --language de --texts $m/test_2016_flickr.de.gz \\
        --english $m/test_2016_flickr.en.gz --count 1000 --seed 1

Writes wav files beside a JSONL manifest of {"audio_filepath", "duration", "text", "voice", "language", "translation"}
(`translation` is null for English and for pieces). Line n of `--english` translates line n of `--texts`. `--pieces` are
one to four words cut from sentences; a model learns from them first where words lie. A share of `--unseen` is spoken by
a voice that no other run uses. A thousand utterances take about 15 s on one core.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from multimodal.data.manifests import read_text
from multimodal.data.spoken import SpokenText, write_speech
from multimodal.errors import UsageError
from multimodal.system.outputs import Outputs

VOICES = {"en": ["en-us", "en-gb"], "de": ["de"], "fr": ["fr-fr"], "cs": ["cs"]}
VARIANTS = ["", "", "", "+m3", "+f2", "+f4"]  # the plain voice speaks half of it
UNSEEN = "+m7"


def lines(path: Path) -> list[str]:
    return [" ".join(line.replace("’", "'").split()) for line in read_text(path).splitlines()]


def piece(chooser: random.Random, sentence: str) -> str:
    words = sentence.split()
    count = min(len(words), chooser.randint(1, 4))
    start = chooser.randint(0, len(words) - count)
    return " ".join(words[start : start + count]).strip(".,;:!?\"'- ")


def texts(args: argparse.Namespace, chooser: random.Random) -> Iterator[tuple[str, str | None]]:
    """Texts and translations: each whole sentence once, then random pieces."""
    own, english = lines(args.texts), lines(args.english)
    order = [i for i, text in enumerate(own) if text and len(text.split()) <= args.most_words]
    chooser.shuffle(order)
    for i in order[: args.count]:
        yield own[i], None if args.language == "en" else english[i]
    for i in chooser.choices(order, k=args.pieces):
        if text := piece(chooser, own[i]):
            yield text, None


def plan(args: argparse.Namespace) -> Iterator[SpokenText]:
    chooser = random.Random(f"{args.seed} {args.language}")
    for text, translation in texts(args, chooser):
        variant = UNSEEN if chooser.random() < args.unseen else chooser.choice(VARIANTS)
        voice = chooser.choice(VOICES[args.language]) + variant
        pace, pitch = str(chooser.randint(175, 215)), str(chooser.randint(35, 65))
        command = ["espeak-ng", "-v", voice, "-s", pace, "-p", pitch, "-w", "{wav}", "{text}"]
        yield SpokenText(text, text, voice, command, {"language": args.language, "translation": translation})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--language", choices=VOICES, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="sentences, one a line")
    parser.add_argument("--english", type=Path, required=True, help="their translations, line by line")
    parser.add_argument("--count", type=int, required=True, help="sentences")
    parser.add_argument("--pieces", type=int, default=0, help="pieces of one to four words")
    parser.add_argument("--most-words", type=int, default=16, help="words of the longest sentence")
    parser.add_argument("--unseen", type=float, default=0.0, metavar="SHARE", help="share by a voice of no other run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace a manifest that multimodal did not write")
    args = parser.parse_args()
    try:
        Outputs([args.texts, args.english], args.overwrite).claim(args.manifest)
    except UsageError as error:
        parser.error(str(error))
    write_speech(args.manifest, plan(args))


if __name__ == "__main__":
    main()
