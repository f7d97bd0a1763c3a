"""Word timing: the shipped models' word starts against known ones.

    python benchmarks/studies/words.py --data ../shared/data

Two kinds of reference. Recordings of a set joined with pauses of 0.2 to 0.6 s, plain and in white noise at -50 dB: the
first word of each begins at its cut plus its leading silence, up to where 4 of 5 frames of 10 ms are within 30 dB of
its loudest. And sentences of Multi30k by libespeak-ng (skipped if absent), which reports each word's start in speech
without pauses.

"text given" aligns the known text; "recognized" is `transcribe` with `word_timestamps` and counts the recognized words.
Prints and saves in `words.json`: words, share of starts within 0.1 s, median of the absolute and of the signed error
(seconds). Takes about a minute of one core.
"""

import argparse
import ctypes
import difflib
import gzip
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.conformer import ConformerCTC
from multimodal.tasks.transcribe.conformer.words import ctc_words
from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.tasks.transcribe.whisper.words import alignment_heads, find_alignment
from multimodal.tasks.transcribe.word_times import WordTiming, mel_level, snap_to_audio, wave_level
from multimodal.tokens.audio.features import speech_features
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel, pad_or_trim
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

JOINED = {"fsdd": 6, "an4": 3, "ljspeech": 2}  # recordings in one
VOICES = {"en": ["gmw/en-US", "gmw/en"], "de": ["gmw/de"], "fr": ["roa/fr"], "cs": ["zlw/cs"]}
LONGEST = 5.9  # seconds: the window of whisper-mini


class SpokenWords(NamedTuple):
    wave: Tensor
    words: list[tuple[str, float | None]]  # with start in seconds, if known


def onset(wave: Tensor) -> float:
    level = wave[: len(wave) // HOP * HOP].unflatten(0, (-1, HOP)).square().mean(1).sqrt()
    loud = F.pad((level >= level.max() * 10 ** (-30 / 20)).float(), (0, 4))
    return int((loud.unfold(0, 5, 1).sum(-1) >= 4).nonzero()[0, 0]) * HOP / RATE


def joined(folder: Path, size: int, count: int) -> Iterator[SpokenWords]:
    """`count` recordings, each of `size` others with a pause before each."""
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
        self.library, self.parts, self.starts = ctypes.CDLL("libespeak-ng.so.1"), [], {}
        self.rate = self.library.espeak_Initialize(2, 0, None, 0)  # 2: synchronous, audio goes to the callback
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
        self.callback = kind(self._receive)  # kept alive: the library has its address only
        self.library.espeak_SetSynthCallback(self.callback)

    def _receive(self, samples, count: int, events) -> int:
        if samples and count > 0:
            self.parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        for event in itertools.takewhile(lambda event: event.type, map(events.__getitem__, itertools.count())):
            if event.type == 1:  # a word begins
                self.starts[event.text_position - 1] = event.sample / self.rate
        return 0

    def say(self, text: str, voice: str, pace: int, pitch: int) -> SpokenWords:
        from torchaudio.functional import resample

        self.parts.clear()
        self.starts.clear()
        if self.library.espeak_SetVoiceByName(voice.encode()):
            raise OSError(f"espeak-ng has no voice {voice}")
        self.library.espeak_SetParameter(1, pace, 0)
        self.library.espeak_SetParameter(3, pitch, 0)
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
        wave = torch.from_numpy(np.concatenate(self.parts).astype(np.float32) / 32768)
        words = [(match.group(), self.starts.get(match.start())) for match in re.finditer(r"\S+", text)]
        return SpokenWords(resample(wave, self.rate, RATE), words)


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


Starts = list[tuple[str, float]]


@torch.inference_mode()
def align_text(wave: Tensor, text: str, model: ConformerCTC, tokenizer: Tokenizer) -> list[WordTiming]:
    """Align a known text, spelled as the model spells it, with a 16 kHz waveform, and snap the words to the audio."""
    encoder = model.config.encoder
    frames, _, _ = model.encode(*speech_features(encoder.features, [wave], encoder.bands))
    logprobs = model.ctc_logits(frames)[0].float().log_softmax(-1)
    words = ctc_words(logprobs, tokenizer.encode(" " + text), tokenizer, model.config.blank, encoder.seconds)
    return snap_to_audio(words, wave_level(wave))


def align(checkpoint: Checkpoint, language: str, spoken: SpokenWords) -> Starts:
    """Starts of the known words, by forced alignment or by attention."""
    text = " ".join(word for word, _ in spoken.words)
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    if checkpoint.kind == "joint_conformer":
        return [(timing.word, timing.start) for timing in align_text(spoken.wave, text, model, tokenizer)]
    size = 2 * model.config.encoder.context
    mel = log_mel(F.pad(spoken.wave, (0, size * HOP)), model.config.encoder.bands)
    mel = mel[:, : mel.shape[-1] - size]
    with torch.inference_mode():
        features = model.encoder(pad_or_trim(mel, size)[None])[0]
    ids, heads = tokenizer.encode(" " + text), alignment_heads(checkpoint)
    timings = find_alignment(model, tokenizer, features, ids, mel.shape[1], language, heads=heads)
    return [(timing.word, timing.start) for timing in snap_to_audio(timings, mel_level(mel))]


def recognize(checkpoint: Checkpoint, language: str, spoken: SpokenWords) -> Starts:
    result = transcribe(spoken.wave, checkpoint, language=language, word_timestamps=True)
    return [(word["word"], word["start"]) for segment in result["segments"] for word in segment["words"]]


def errors(starts: Starts, reference: list[tuple[str, float | None]]) -> list[float]:
    """Errors of words that are in both texts and have a known start. A part without a leading space belongs to the word
    before it (Whisper's "l", "'objectif")."""
    first = [i for i, (word, _) in enumerate(starts) if word.startswith(" ")] + [len(starts)]
    words = [("".join(word for word, _ in starts[a:b]), starts[a][1]) for a, b in itertools.pairwise(first)]
    texts = [[re.sub(r"[^\w']", "", word.lower()) for word, _ in text] for text in (words, reference)]
    blocks = difflib.SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks()
    pairs = [(words[a + i][1], reference[b + i][1]) for a, b, length in blocks for i in range(length)]
    return [start - right for start, right in pairs if right is not None]


def measure(name: str, recordings: list[SpokenWords], find: Callable[[SpokenWords], Starts]) -> dict:
    off = np.array([error for spoken in recordings for error in errors(find(spoken), spoken.words)] or [np.nan])
    known = sum(right is not None for spoken in recordings for _, right in spoken.words)
    row = {
        "words": int(np.isfinite(off).sum()), "found": round(np.isfinite(off).sum() / known, 3),
        "within_0.1_s": round(float((abs(off) <= 0.1).mean()), 3),
        "median_abs": round(float(np.median(abs(off))), 3), "median": round(float(np.median(off)), 3),
    }  # fmt: skip
    print(f"{name:<58} {row['words']:5} words ({row['found']:5.1%})  ≤ 0.1 s {row['within_0.1_s']:6.1%}  "
          f"median {row['median_abs']:.3f}, signed {row['median']:+.3f} s", flush=True)  # fmt: skip
    return {name: row}


def measure_all(data: Path, count: int) -> dict:
    models = {name: load(name) for name in ("asr-conformer-en", "whisper-mini")}
    fast, table = {name: prepare_for_inference(model) for name, model in models.items()}, {}

    def both(model: str, name: str, language: str, recordings: list[SpokenWords]) -> None:
        nonlocal table
        table |= measure(f"{model}, {name}, text given", recordings, partial(align, models[model], language))
        table |= measure(f"{model}, {name}, recognized", recordings, partial(recognize, fast[model], language))

    conformer = "asr-conformer-en"
    for name, size in JOINED.items():
        recordings = list(joined(data / "speech" / name, size, count))
        both(conformer, f"{name} joined", "en", recordings)
        in_noise = f"{conformer}, {name} joined in noise, text given"
        table |= measure(in_noise, list(map(noisy, recordings)), partial(align, models[conformer], "en"))
    try:
        espeak = Espeak()
    except OSError as error:
        print(f"without espeak-ng: {error}")
        return table
    texts = data / "text" / "multi30k"
    both(conformer, "espeak-ng", "en", list(sentences(espeak, texts, "en", count, plain=True)))
    for language in VOICES:
        recordings = list(sentences(espeak, texts, language, count, plain=False))
        both("whisper-mini", f"espeak-ng {language}", language, recordings)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with speech/ and text/multi30k/")
    parser.add_argument("--count", type=int, default=40, help="recordings of each set")
    args = parser.parse_args()
    result = {"count": args.count, "starts": measure_all(args.data, args.count)}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
