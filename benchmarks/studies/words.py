"""Word timing: the models' word starts against known ones.

    python benchmarks/studies/words.py --data ../shared/data

Two kinds of truth. Recordings of a set are joined with pauses of 0.2 to 0.6 s of digital silence: the first word of
each begins at its cut plus its leading silence, up to where 4 of 5 frames of 10 ms are within 30 dB of its loudest
(the same in white noise at -50 dB). And
sentences of Multi30k by espeak-ng (through libespeak-ng, left out where it is absent), which tells where each word
begins, in speech without pauses.

"text given" aligns the known text; "recognised" is `transcribe` with `word_timestamps`, where a word counts when it was
recognised (the share is printed). Printed and kept in `words.json` beside this file: words, share of starts within
0.1 s, median of the absolute and of the signed error (seconds). Takes about a minute of one core.
"""

import argparse
import ctypes
import difflib
import gzip
import json
import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.inference.prepare import prepare_for_inference
from multimodal.tasks.transcribe.conformer.words import align_text
from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.tasks.transcribe.whisper.words import alignment_heads, find_alignment
from multimodal.tasks.transcribe.word_times import mel_level, snap_to_audio
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel, pad_or_trim
from multimodal.tokens.audio.reading import read_audio
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

HERE = Path(__file__).resolve().parent
JOINED = {"fsdd": 6, "an4": 3, "ljspeech": 2}  # recordings in one
VOICES = {"en": ["gmw/en-US", "gmw/en"], "de": ["gmw/de"], "fr": ["roa/fr"], "cs": ["zlw/cs"]}
LONGEST = 5.9  # seconds: the window of whisper-mini


class SpokenWords(NamedTuple):
    wave: Tensor
    words: list[tuple[str, float | None]]  # and where each begins, in seconds, if known


def onset(wave: Tensor) -> float:
    level = wave[: len(wave) // HOP * HOP].unflatten(0, (-1, HOP)).square().mean(1).sqrt()
    loud = F.pad((level >= level.max() * 10 ** (-30 / 20)).float(), (0, 4))
    return int((loud.unfold(0, 5, 1).sum(-1) >= 4).nonzero()[0, 0]) * HOP / RATE


def joined(folder: Path, size: int, count: int) -> Iterator[SpokenWords]:
    """`count` recordings, each of `size` others with pauses before them."""
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    chooser = random.Random(0)
    chooser.shuffle(rows)
    for first in range(0, min(len(rows) // size, count) * size, size):
        parts, words, seconds = [], [], 0.0
        for row in rows[first : first + size]:
            wave, pause = read_audio(folder / row["audio_filepath"]), int(chooser.uniform(0.2, 0.6) * RATE)
            start, *rest = row["text"].lower().split()
            words += [(start, seconds + pause / RATE + onset(wave)), *((word, None) for word in rest)]
            parts += [torch.zeros(pause), wave]
            seconds += (pause + len(wave)) / RATE
        yield SpokenWords(torch.cat(parts), words)


def noisy(spoken: SpokenWords) -> SpokenWords:
    """In white noise of -50 dB of full scale."""
    noise = torch.randn(len(spoken.wave), generator=torch.Generator().manual_seed(0))
    return spoken._replace(wave=spoken.wave + 10 ** (-50 / 20) * noise)


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("identifier", ctypes.c_uint), ("text_position", ctypes.c_int),
        ("length", ctypes.c_int), ("audio_position", ctypes.c_int), ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p), ("id", ctypes.c_char * 8),
    ]  # fmt: skip


class Espeak:
    """espeak-ng as a library. Raises OSError if it is not installed."""

    def __init__(self):
        self.library, self.sound, self.starts = ctypes.CDLL("libespeak-ng.so.1"), [], {}
        self.rate = self.library.espeak_Initialize(2, 0, None, 0)  # 2: the sound is given to the callback, at once
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
        self.callback = kind(self._heard)  # kept alive: the library has its address only
        self.library.espeak_SetSynthCallback(self.callback)

    def _heard(self, samples, count: int, events) -> int:
        if samples and count > 0:
            self.sound.append(np.ctypeslib.as_array(samples, (count,)).copy())
        for event in iter_events(events):
            self.starts[event.text_position - 1] = event.sample / self.rate
        return 0

    def say(self, text: str, voice: str, pace: int, pitch: int) -> SpokenWords:
        from torchaudio.functional import resample

        self.sound.clear()
        self.starts.clear()
        if self.library.espeak_SetVoiceByName(voice.encode()):
            raise OSError(f"espeak-ng has no voice {voice}")
        self.library.espeak_SetParameter(1, pace, 0)
        self.library.espeak_SetParameter(3, pitch, 0)
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
        wave = torch.from_numpy(np.concatenate(self.sound).astype(np.float32) / 32768)
        words = [(match.group(), self.starts.get(match.start())) for match in re.finditer(r"\S+", text)]
        return SpokenWords(resample(wave, self.rate, RATE), words)


def iter_events(events) -> Iterator[_Event]:
    """Spans of words (type 1), up to the end of the list (0)."""
    number = 0
    while events[number].type:
        if events[number].type == 1:
            yield events[number]
        number += 1


def sentences(espeak: Espeak, folder: Path, language: str, count: int, plain: bool) -> Iterator[SpokenWords]:
    """Sentences of at most 11 words after up to 0.6 s of silence; `plain`: lower case without punctuation."""
    text = gzip.decompress((folder / f"test_2016_flickr.{language}.gz").read_bytes()).decode()
    lines = [" ".join(line.replace("’", "'").split()) for line in text.splitlines()]
    chooser = random.Random(f"words {language}")
    chooser.shuffle(lines)
    while count:
        line = lines.pop()
        line = " ".join(re.sub(r"[^a-z' ]", " ", line.lower()).split()) if plain else line
        voice = chooser.choice(VOICES[language]) + chooser.choice(["", "+m3", "+f2", "+f4"])
        spoken = espeak.say(line, voice, chooser.randint(175, 215), chooser.randint(35, 65))
        lead = int(chooser.uniform(0, 0.6) * RATE)
        if len(line.split()) > 11 or lead + len(spoken.wave) > LONGEST * RATE:
            continue
        count -= 1
        words = [(word, None if start is None else start + lead / RATE) for word, start in spoken.words]
        yield SpokenWords(torch.cat([torch.zeros(lead), spoken.wave]), words)


Found = list[tuple[str, float]]


def given(checkpoint: Checkpoint, language: str, spoken: SpokenWords, sound: bool = True) -> Found:
    """The words of the known text, by forced alignment or by attention; `sound`: held against the sound."""
    text = " ".join(word for word, _ in spoken.words)
    if checkpoint.kind == "joint_conformer":
        return [(timing.word, timing.start) for timing in align_text(spoken.wave, text, checkpoint)]
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    size = 2 * model.config.encoder.context
    mel = log_mel(F.pad(spoken.wave, (0, size * HOP)), model.config.encoder.bands)
    mel = mel[:, : mel.shape[-1] - size]
    with torch.inference_mode():
        features = model.encoder(pad_or_trim(mel, size)[None])[0]
    ids, heads = tokenizer.encode(" " + text), alignment_heads(checkpoint)
    timings = find_alignment(model, tokenizer, features, ids, mel.shape[1], language, heads=heads)
    timings = snap_to_audio(timings, mel_level(mel)) if sound else timings
    return [(timing.word, timing.start) for timing in timings]


def recognised(checkpoint: Checkpoint, language: str, spoken: SpokenWords) -> Found:
    result = transcribe(spoken.wave, checkpoint, language=language, word_timestamps=True)
    return [(word["word"], word["start"]) for segment in result["segments"] for word in segment["words"]]


def plain_word(word: str) -> str:
    return re.sub(r"[^\w']", "", word.lower())


def errors(found: Found, truth: list[tuple[str, float | None]]) -> list[float]:
    """Errors of words that are in both texts and have a known start. What does not begin with a space is of the word
    before it (Whisper's "l", "'objectif")."""
    begins = [i for i, (word, _) in enumerate(found) if word.startswith(" ")] + [len(found)]
    found = [("".join(word for word, _ in found[a:b]), found[a][1]) for a, b in pairwise(begins)]
    own, true = [plain_word(word) for word, _ in found], [plain_word(word) for word, _ in truth]
    blocks = difflib.SequenceMatcher(None, own, true, autojunk=False).get_matching_blocks()
    pairs = [(found[a + i][1], truth[b + i][1]) for a, b, length in blocks for i in range(length)]
    return [start - right for start, right in pairs if right is not None]


def measure(name: str, sound: list[SpokenWords], find) -> dict:
    found = [error for spoken in sound for error in errors(find(spoken), spoken.words)]
    known = sum(right is not None for spoken in sound for _, right in spoken.words)
    off = np.array(found) if found else np.array([np.nan])
    row = {
        "words": len(found), "found": round(len(found) / known, 3),
        "within_0.1_s": round(float((abs(off) <= 0.1).mean()), 3),
        "median_abs": round(float(np.median(abs(off))), 3), "median": round(float(np.median(off)), 3),
    }  # fmt: skip
    print(f"{name:<58} {row['words']:5} words ({row['found']:5.1%})  ≤ 0.1 s {row['within_0.1_s']:6.1%}  "
          f"median {row['median_abs']:.3f}, signed {row['median']:+.3f} s", flush=True)  # fmt: skip
    return {name: row}


def measure_all(data: Path, count: int) -> dict:
    conformer, whisper, table = load("asr-conformer-en"), load("whisper-mini"), {}
    fast, fast_whisper = prepare_for_inference(conformer), prepare_for_inference(whisper)
    for name, size in JOINED.items():
        sound = list(joined(data / "speech" / name, size, count))
        table |= measure(f"asr-conformer-en, {name} joined, text given", sound, partial(given, conformer, "en"))
        name_noisy = f"asr-conformer-en, {name} joined in noise, text given"
        table |= measure(name_noisy, list(map(noisy, sound)), partial(given, conformer, "en"))
        table |= measure(f"asr-conformer-en, {name} joined, recognised", sound, partial(recognised, fast, "en"))
    try:
        espeak = Espeak()
    except OSError as error:
        print(f"without espeak-ng: {error}")
        return table
    texts = data / "text" / "multi30k"
    sound = list(sentences(espeak, texts, "en", count, plain=True))
    table |= measure("asr-conformer-en, espeak-ng, text given", sound, partial(given, conformer, "en"))
    table |= measure("asr-conformer-en, espeak-ng, recognised", sound, partial(recognised, fast, "en"))
    for language in VOICES:
        sound = list(sentences(espeak, texts, language, count, plain=False))
        name = f"whisper-mini, espeak-ng {language}"
        table |= measure(f"{name}, attention alone, text given", sound, partial(given, whisper, language, sound=False))
        table |= measure(f"{name}, text given", sound, partial(given, whisper, language))
        table |= measure(f"{name}, recognised", sound, partial(recognised, fast_whisper, language))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with speech/ and text/multi30k/")
    parser.add_argument("--count", type=int, default=40, help="recordings of each set")
    args = parser.parse_args()
    result = {"count": args.count, "starts": measure_all(args.data, args.count)}
    (HERE / "words.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
