"""Synthetic speech for training and testing a recogniser: sentences spoken by espeak-ng and flite (Debian packages).

    python recipes/speak.py speech/train.jsonl --texts captions.en.gz=8 wikitext.txt.gz=2 --spelled 1 --hours 4
    python recipes/speak.py speech/test.jsonl --texts captions-test.en.gz=1 --count 200 --unseen 0.2 --seed 1

writes wav files beside a JSONL manifest of {"audio_filepath", "duration", "text", "voice"}. 4 h take about 3 minutes
on 2 cores. Text is lower-cased, without punctuation other than apostrophes; lines with digits are left out, since the
voices and the transcript would not agree on how they are read. `--unseen` is the share spoken by a voice which no
other run uses.
"""

import argparse
import itertools
import json
import random
import re
import string
import subprocess
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from multimodal.data.manifests import read_text
from multimodal.errors import UsageError
from multimodal.system.outputs import Outputs, opened_output

ACCENTS = ["en-us", "en-us", "en-us-nyc", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-029"]
VARIANTS = ["f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8"]
VARIANTS += ["Alicia", "Andy", "Annie", "Gene", "Lee", "Michael", "adam", "belinda", "linda", "john"]
FLITE = ["kal16", "slt", "awb", "rms"]
UNSEEN = "en-gb-x-gbcwmd+steph"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SENTENCE_END = re.compile(r"(?<=[.!?]) ")


def sentences(path: Path, most_words: int = 18) -> list[str]:
    """The plain sentences of a text file (gzip or not): lower case, words of letters and apostrophes."""
    found = []
    for line in read_text(path).split("\n"):
        for sentence in SENTENCE_END.split(line.strip()):
            text = re.sub(r" (n't|'\w+)\b", r"\1", sentence.replace("@-@", " ").replace("’", "'").lower())
            text = re.sub(r"[^a-z' ]", " ", text) if re.search(r"[\d<=@&:_~]|[^\x00-\x7f]", text) is None else ""
            text = re.sub(r"(?<![a-z])'|'(?![a-z])", "", text)
            if 3 <= len(text.split()) <= most_words:
                found.append(" ".join(text.split()))
    return found


def spelled(chooser: random.Random) -> tuple[str, str]:
    """A string of digits or letters, as text and as it must be given to a voice (a lone "a" is no article)."""
    count = chooser.randint(1, 8)
    if chooser.random() < 0.6:
        text = " ".join(chooser.choices(DIGITS, k=count))
        return text, text
    letters = chooser.choices(string.ascii_lowercase, k=count)
    return " ".join(letters), ", ".join(letters).upper()


def command(chooser: random.Random, unseen: float) -> tuple[str, list[str]]:
    """A voice and the command which speaks with it; `{wav}` and `{text}` are still to be filled in."""
    if chooser.random() < 0.3 and not unseen:
        voice = chooser.choice(FLITE)
        stretch = f"duration_stretch={chooser.uniform(0.8, 1.25):.2f}"
        return voice, ["flite", "-voice", voice, "--setf", stretch, "-o", "{wav}", "-t", "{text}"]
    voice = f"{chooser.choice(ACCENTS)}+{chooser.choice(VARIANTS)}"
    voice = UNSEEN if chooser.random() < unseen else voice
    pace, pitch = str(chooser.randint(125, 195)), str(chooser.randint(25, 75))
    return voice, ["espeak-ng", "-v", voice, "-s", pace, "-p", pitch, "-w", "{wav}", "{text}"]


def plan(args: argparse.Namespace) -> Iterator[dict]:
    """Endless utterances to be spoken. A file whose sentences are used up starts again."""
    chooser = random.Random(args.seed)
    paths, shares = zip(*(spec.rsplit("=", 1) for spec in args.texts), strict=True)
    pools = [sentences(Path(path)) for path in paths]
    for pool in pools:
        chooser.shuffle(pool)
    sources = [itertools.cycle(pool) for pool in pools] + [None]
    for number in itertools.count():
        source = chooser.choices(sources, [*map(float, shares), args.spelled])[0]
        text, spoken = spelled(chooser) if source is None else (next(source),) * 2
        voice, parts = command(chooser, args.unseen)
        yield {"text": text, "spoken": spoken, "voice": voice, "parts": parts, "name": f"{number:06d}.wav"}


def speak(item: dict, folder: Path) -> dict:
    """Writes the recording; gives its line of the manifest."""
    path = folder / item["name"]
    filled = {"{wav}": str(path), "{text}": item["spoken"]}
    subprocess.run([filled.get(part, part) for part in item["parts"]], check=True, capture_output=True)
    with wave.open(str(path)) as sound:
        seconds = sound.getnframes() / sound.getframerate()
    audio = f"{folder.name}/{item['name']}"
    return {"audio_filepath": audio, "duration": round(seconds, 3), "text": item["text"], "voice": item["voice"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--texts", nargs="+", required=True, metavar="FILE=SHARE")
    parser.add_argument("--spelled", type=float, default=0.0, metavar="SHARE", help="digit and letter strings")
    parser.add_argument("--hours", type=float, default=1e9)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--unseen", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace a manifest that another hand wrote")
    args = parser.parse_args()
    if args.hours == 1e9 and args.count == 10**9:
        parser.error("one of --hours and --count is needed")
    try:
        Outputs([spec.rpartition("=")[0] for spec in args.texts], args.overwrite).claim(args.manifest)
    except UsageError as error:
        parser.error(str(error))
    folder = args.manifest.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    seconds, count, items = 0.0, 0, plan(args)
    with ThreadPoolExecutor(2) as pool, opened_output(args.manifest, "keep") as file:
        while seconds < args.hours * 3600 and count < args.count:
            some = list(itertools.islice(items, min(64, args.count - count)))
            for line in pool.map(lambda item: speak(item, folder), some):
                file.write(f"{json.dumps(line)}\n".encode())
                seconds, count = seconds + line["duration"], count + 1
    print(f"{args.manifest}: {count} utterances, {seconds / 3600:.2f} h")


if __name__ == "__main__":
    main()
