"""Figures of a Whisper-style model, for evaluate.py: error rates, languages found, BLEU into English, no speech.

    python recipes/evaluate.py --model whisper-mini --data en=speech/test-en.jsonl de=speech/test-de.jsonl noise

A set is a manifest of recordings in one language (train/clips.py), or the word `noise`: silence, white and pink
noise, tones and clicks of random level, `--noise` windows of each. A recording is one window, prepared as
`transcribe` does and decoded without times; the language is given for transcription and translation. Recordings
longer than the window are left out and counted. 4,000 sentences take about 100 s of one core.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.speech_windows import NOISES, noise, read_clips
from multimodal.data.loader import generator
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.errors import DataError
from multimodal.tasks.evaluate.scores import bleu, word_errors
from multimodal.tokens.audio.log_mel import HOP, log_mel, pad_or_trim
from multimodal.tokens.audio.reading import read_audio
from multimodal.train.objectives.multitask import STEP, listen, write
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class WhisperOptions:
    """Of a Whisper-style model."""

    language: str | None = None
    """of manifests that name none"""
    whisper_beams: int = 0
    """width of the search; 0: greedy"""
    noise: int = 100
    """windows of each kind of noise"""
    silent: float = 0.6
    """probability of no speech from which on there is none"""
    windows: int = 16
    """of a batch"""


def window_of(wave: Tensor, bands: int, size: int) -> Tensor:
    """The first window as `transcribe` hears it: silence follows the recording, and frames past its end are 0."""
    mel = log_mel(F.pad(wave, (0, size * HOP)), bands)
    return pad_or_trim(mel[:, : min(size, mel.shape[-1] - size)], size)


def encoded(checkpoint: Checkpoint, waves: Sequence[Tensor]) -> Tensor:
    config = checkpoint.model.config.encoder
    mels = [window_of(wave, config.bands, STEP * config.context) for wave in waves]
    return checkpoint.model.encoder(torch.stack(mels).to(checkpoint.model.encoder.positions.device))


def share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / max(1, len(hits)), 4)


@torch.inference_mode()
def noises(checkpoint: Checkpoint, options: WhisperOptions) -> dict[str, Any]:
    """Share of the windows of each kind of noise that are taken for no speech."""
    model, tokenizer, scores = checkpoint.model, checkpoint.tokenizer, {}
    samples = STEP * HOP * model.config.encoder.context
    for kind in NOISES:
        chance, found = generator("evaluation", kind), []
        for _ in range(0, options.noise, options.windows):
            waves = [noise(kind, samples, chance) for _ in range(options.windows)]
            found += listen(model, tokenizer, encoded(checkpoint, waves)).no_speech
        scores[kind] = share([value > options.silent for value in found])
    return {"no_speech": round(sum(scores.values()) / len(scores), 4)} | scores


@torch.inference_mode()
def multitask(
    checkpoint: Checkpoint, path: str, options: WhisperOptions, count: int | None, trust: Trust = OWN_FOLDER
) -> dict[str, Any]:
    """Scores of one set. Raises DataError for a manifest of several languages."""
    if path == "noise":
        return noises(checkpoint, options)
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    clips = list(evenly(read_clips(Path(path), options.language, trust), count))
    if len(languages := sorted({clip.language for clip in clips})) > 1:
        raise DataError(f"{path}: {len(languages)} languages ({', '.join(languages)}), one is needed")
    most = STEP * HOP * model.config.encoder.context
    heard = [(clip, wave) for clip in clips if len(wave := read_audio(clip.path)) <= most]
    if not heard:
        raise DataError(f"{path}: each of {len(clips)} recordings is longer than the window of {most / 16000} s")
    tasks = ["transcribe", "translate"] if all(clip.translation for clip, _ in heard) else ["transcribe"]
    texts: dict[str, list[str]] = {task: [] for task in tasks}
    found, silent = [], []
    for at in range(0, len(heard), options.windows):
        part = heard[at : at + options.windows]
        frames = encoded(checkpoint, [wave for _, wave in part])
        facts = listen(model, tokenizer, frames)
        found, silent = found + facts.languages, silent + facts.no_speech
        for task, own in texts.items():
            own += write(model, tokenizer, frames, languages * len(part), task, options.whisper_beams or None)
    wanted = [clip.text for clip, _ in heard]
    scores = {"utterances": len(heard), "too_long": len(clips) - len(heard)}
    scores |= word_errors(wanted, texts["transcribe"], languages[0])
    if "translate" in texts:
        scores["bleu"] = bleu([clip.translation for clip, _ in heard], texts["translate"])
    scores["language"] = share([code == languages[0] for code in found])
    scores["taken_for_no_speech"] = share([value > options.silent for value in silent])
    rows = zip(wanted, *texts.values(), strict=True)
    return scores | {"examples": [" | ".join(("wanted", *tasks)), *(" | ".join(row) for row in evenly(list(rows), 8))]}
