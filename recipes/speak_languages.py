"""Synthetic speech in several languages, with its English translation: parallel sentences spoken by espeak-ng.

    m=../shared/data/text/multi30k
    for l in en de fr cs; do python recipes/speak_languages.py speech/train-$l.jsonl --language $l \\
        --texts $m/train.$l.gz --english $m/train.en.gz --count 10000 --pieces 2000; done
    python recipes/speak_languages.py speech/test-de.jsonl --language de --texts $m/test_2016_flickr.de.gz \\
        --english $m/test_2016_flickr.en.gz --count 1000 --seed 1

writes wav files beside a JSONL manifest of {"audio_filepath", "duration", "text", "voice", "language", "translation"}
(the last is null for English and for pieces). Line n of `--texts` means what line n of `--english` does. `--pieces`
are one to four words cut from other sentences, which a model that is to learn where words lie learns from first.
`--unseen` is the share spoken by a voice that no other run uses. A thousand utterances take about 15 s on one core.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from speak import speak

from multimodal.data.manifests import read_text
from multimodal.errors import UsageError
from multimodal.system.outputs import Outputs, opened_output

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
    """Text and translation: whole sentences each once, then pieces of any."""
    own, english = lines(args.texts), lines(args.english)
    order = [i for i, text in enumerate(own) if text and len(text.split()) <= args.most_words]
    chooser.shuffle(order)
    for i in order[: args.count]:
        yield own[i], None if args.language == "en" else english[i]
    for i in chooser.choices(order, k=args.pieces):
        if text := piece(chooser, own[i]):
            yield text, None


def plan(args: argparse.Namespace) -> Iterator[dict]:
    chooser = random.Random(f"{args.seed} {args.language}")
    for number, (text, translation) in enumerate(texts(args, chooser)):
        variant = UNSEEN if chooser.random() < args.unseen else chooser.choice(VARIANTS)
        voice = chooser.choice(VOICES[args.language]) + variant
        pace, pitch = str(chooser.randint(175, 215)), str(chooser.randint(35, 65))
        parts = ["espeak-ng", "-v", voice, "-s", pace, "-p", pitch, "-w", "{wav}", "{text}"]
        item = {"text": text, "spoken": text, "voice": voice, "parts": parts, "name": f"{number:06d}.wav"}
        yield item | {"language": args.language, "translation": translation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--language", choices=VOICES, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--pieces", type=int, default=0)
    parser.add_argument("--most-words", type=int, default=16)
    parser.add_argument("--unseen", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace a manifest that another hand wrote")
    args = parser.parse_args()
    try:
        Outputs([args.texts, args.english], args.overwrite).claim(args.manifest)
    except UsageError as error:
        parser.error(str(error))
    folder = args.manifest.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    seconds, count, items = 0.0, 0, plan(args)
    with ThreadPoolExecutor(2) as pool, opened_output(args.manifest, "keep") as file:
        while some := list(itertools.islice(items, 64)):
            for item, line in zip(some, pool.map(lambda item: speak(item, folder), some), strict=True):
                line |= {key: item[key] for key in ("language", "translation")}
                file.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
                seconds, count = seconds + line["duration"], count + 1
    print(f"{args.manifest}: {count} utterances, {seconds / 3600:.2f} h")


if __name__ == "__main__":
    main()
