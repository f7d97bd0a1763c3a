"""Whisper's tasks on single windows: language identification, transcription, translation into English, no speech.

Each recording is one window, decoded without timestamps, thresholds or fallbacks; its language is given to the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.speech_windows import NOISES, noise, read_clips
from multimodal.data.loader import generator
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns
from multimodal.decoding import logits, sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.errors import DataError, UsageError, demand
from multimodal.inference.modules import inference_mode
from multimodal.models.whisper import Whisper
from multimodal.tasks.evaluate.scores import bleu, chrf, normalizer, word_errors
from multimodal.tasks.evaluate.speech.options import NoiseOptions
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel, pad_or_trim
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.weights.encode import evaluating
from multimodal.weights.folder import Checkpoint

STRIDE = 2  # mel frames per encoder frame
NO_SPEECH = 0.6  # probability of <|nospeech|> above which a window counts as silent
BATCH = 16  # windows


@dataclass(frozen=True)
class WindowOptions:
    """`language`: of manifests that name none. `beam_size` 1 is greedy. `normalizer`, `keep_marks`: see
    `scores.normalizer`."""

    language: str | None = None
    beam_size: int = 1
    normalizer: str | None = None
    keep_marks: bool = False

    def __post_init__(self):
        demand("beam_size", self.beam_size, self.beam_size >= 1, "1 or more")
        normalizer(self.normalizer or "basic", self.keep_marks)  # refused before an hour of work


class LanguageGuess(NamedTuple):
    """Per window: the code of the most probable language, and the probability of no speech."""

    languages: list[str]
    no_speech: list[float]


@inference_mode()
def identify(model: Whisper, tokenizer: WhisperTokenizer, frames: Float[Tensor, "B T D"]) -> LanguageGuess:
    """Language and no-speech probability from the token after <|startoftranscript|>; `frames`: encoder output."""
    start = torch.full((len(frames), 1), tokenizer.sot, device=frames.device)
    scores = model.decoder(start, frames)[:, 0]
    best = scores[:, list(tokenizer.language_tokens)].argmax(-1).tolist()
    silence = logits.no_speech_probability(scores, tokenizer.no_speech).tolist()
    return LanguageGuess([tokenizer.languages[i] for i in best], silence)


@inference_mode()
def decode(
    model: Whisper, tokenizer: WhisperTokenizer, frames: Float[Tensor, "B T D"], languages: Sequence[str],
    task: str = "transcribe", beam_size: int = 1,
) -> list[str]:  # fmt: skip
    """Text of each window, without timestamps."""
    starts = [tokenizer.sot_sequence(language, task, False) for language in languages]
    prompt = torch.tensor(starts, device=frames.device)
    never = logits.suppress([i for i in tokenizer.control if i != tokenizer.eot])
    step, cache = sampling.cross_attention_step(model.decoder, frames), model.decoder.new_cache()
    common = {"eos": tokenizer.eot, "max_new": model.config.decoder.context // 2, "processors": [never]}
    if beam_size > 1:
        output = beam_search(step, prompt, cache, beams=beam_size, **common)
    else:
        output = sampling.greedy(step, prompt, cache, **common)
    return [tokenizer.decode(ids).strip() for ids in output.ids]


def whisper_of(checkpoint: Checkpoint) -> Whisper:
    """The model. Raises UsageError where it is not in Whisper's format."""
    if not isinstance(checkpoint.model, Whisper) or not isinstance(checkpoint.tokenizer, WhisperTokenizer):
        raise UsageError(f"model {checkpoint.source}: expected a Whisper model, got {checkpoint.kind}")
    return checkpoint.model


def window_frames(model: Whisper) -> int:
    """Mel frames of the model's window."""
    return STRIDE * model.config.encoder.context


def encode(model: Whisper, waves: Sequence[Float[Tensor, "_"]]) -> Float[Tensor, "B T D"]:
    """Encoder output of windows padded as `transcribe` pads them: silence after the audio, zero frames past its end."""
    size, bands = window_frames(model), model.config.encoder.bands
    mels = [log_mel(F.pad(wave, (0, size * HOP)), bands) for wave in waves]
    mels = [pad_or_trim(mel[:, : min(size, mel.shape[-1] - size)], size) for mel in mels]
    return model.encoder(torch.stack(mels).to(model.encoder.positions.device))


@inference_mode()
def evaluate_noise(checkpoint: Checkpoint, windows: int = NoiseOptions.windows.default) -> dict[str, Any]:
    """Share of `windows` generated windows of each kind of noise that the model takes for no speech."""
    model, shares = whisper_of(checkpoint), {}
    for kind in NOISES:
        random, silence = generator("evaluation", kind), []
        for _ in range(0, windows, BATCH):
            waves = [noise(kind, window_frames(model) * HOP, random) for _ in range(BATCH)]
            with evaluating(model):
                silence += identify(model, checkpoint.tokenizer, encode(model, waves)).no_speech
        shares[kind] = _share([value > NO_SPEECH for value in silence])
    return {"no_speech": round(sum(shares.values()) / len(shares), 4)} | shares


@inference_mode()
def evaluate_windows(
    checkpoint: Checkpoint, manifest: str, options: WindowOptions | None = None, limit: int | None = None,
    trust: Trust = OWN_FOLDER, columns: ListColumns = USUAL,
) -> dict[str, Any]:  # fmt: skip
    """WER and CER of the transcripts, accuracy of language identification and share of recordings taken for no speech;
    BLEU and chrF of translations into English where every line has a `translation`. Recordings longer than the window
    are left out and counted. Raises DataError for a manifest of several languages."""
    options, model, tokenizer = options or WindowOptions(), whisper_of(checkpoint), checkpoint.tokenizer
    clips = list(evenly(read_clips(manifest, options.language, trust, columns), limit))
    if len(languages := sorted({clip.language for clip in clips})) > 1:
        raise DataError(f"{manifest}: expected one language, got {len(languages)} ({', '.join(languages)})")
    longest = window_frames(model) * HOP
    items = [(clip, wave) for clip in clips if len(wave := clip.wave()) <= longest]
    if not items:
        raise DataError(f"{manifest}: all {len(clips)} recordings are longer than the window of {longest / RATE} s")
    tasks = ["transcribe", "translate"] if all(clip.translation for clip, _ in items) else ["transcribe"]
    texts: dict[str, list[str]] = {task: [] for task in tasks}
    identified, silence = [], []
    for first in range(0, len(items), BATCH):
        part = items[first : first + BATCH]
        with evaluating(model):
            frames = encode(model, [wave for _, wave in part])
            guess = identify(model, tokenizer, frames)
            for task, hypotheses in texts.items():
                hypotheses += decode(model, tokenizer, frames, languages * len(part), task, options.beam_size)
        identified, silence = identified + guess.languages, silence + guess.no_speech
    figures = {"utterances": len(items), "too_long": len(clips) - len(items)}
    figures |= word_errors(
        [clip.text for clip, _ in items], texts["transcribe"], languages[0], options.normalizer, options.keep_marks
    )
    if "translate" in texts:
        references = [clip.translation for clip, _ in items]
        figures |= {"bleu": bleu(references, texts["translate"]), "chrf": chrf(references, texts["translate"])}
    figures["language"] = _share([code == languages[0] for code in identified])
    figures["taken_for_no_speech"] = _share([value > NO_SPEECH for value in silence])
    return figures


def _share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / max(1, len(hits)), 4)
