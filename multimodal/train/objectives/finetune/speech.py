"""Fine-tuning on speech: a Conformer recognizer, and a model in Whisper's format."""

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from multimodal.data.batching import Batching, speech_plan
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.speech import SpeechCorpus
from multimodal.data.datasets.speech_windows import Curriculum, SpeechExample, SpeechWindows, curriculum
from multimodal.errors import CheckpointError, DataError
from multimodal.tasks.evaluate.scores import word_errors
from multimodal.tasks.evaluate.speech import whisper_windows
from multimodal.tasks.evaluate.speech.decoders import ErrorRates
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.train.objectives import augment_speech, multitask
from multimodal.train.objectives.finetune.job import FinetuningData, FinetuningJob
from multimodal.train.objectives.recognizer import Recognition, check_features, most_ids, warn_of_short
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)


def recognize(initial: Checkpoint, d: FinetuningData, cache: Path, seed: int) -> FinetuningJob:
    """Transcribe with a Conformer."""
    tokenizer = initial.required_tokenizer()
    check_features(initial)
    bands = initial.model.config.encoder.bands
    corpus = SpeechCorpus(d.data, cache, bands, columns=d.columns, trust=d.trust)
    held = SpeechCorpus([d.val], cache, bands, columns=d.columns, trust=d.trust) if d.val else None
    corpus.encode(tokenizer)
    warn_of_short(corpus, initial.model)
    plan = speech_plan(corpus.lengths, corpus.times, Batching(d.frames, easy=0), seed)
    terms = "joint" if initial.model.decoder is not None else "ctc"

    def measure(model: nn.Module, count: int | None) -> dict[str, float | None]:
        items = evenly(range(len(held)), count)
        written = [held.written(i) for i in items]
        return ErrorRates(initial, written, [held.frames(i) for i in items], "greedy")(model, 0)

    return FinetuningJob(
        Recognition(initial.model, tokenizer, terms), initial.model, (), corpus, plan,
        augment_speech.PrepareSpeech(augment_speech.SpeechAugmentation(), most_ids(initial.model)),
        augment_speech.collate,
        measure if held else None, lambda trained: replace(initial, model=trained),
    )  # fmt: skip


def transcribe(initial: Checkpoint, d: FinetuningData, cache: Path, seed: int) -> FinetuningJob:
    """Transcribe, and translate where the manifest has translations, in Whisper's format."""
    tokenizer, config = initial.tokenizer, initial.model.config
    if not isinstance(tokenizer, WhisperTokenizer):
        raise CheckpointError(
            f"{initial.source}: expected a tokenizer of Whisper's format, got {type(tokenizer).__name__}"
        )
    bands, window = config.encoder.bands, multitask.STEP * config.encoder.context
    clips = SpeechWindows(d.data, cache, bands, d.language, d.columns, d.trust)
    held = SpeechWindows([d.val], cache, bands, d.language, d.columns, d.trust) if d.val else None
    known = set(tokenizer.languages if tokenizer.multilingual else ("en",))
    if unknown := {clip.language for clip in clips.clips} - known:
        raise DataError(f"names the language {min(unknown)!r}, not one of the model's {len(known)}", argument="data")
    # a text too long for the decoder counts as a clip too long for the window
    room = config.decoder.context - multitask.MOST_PREVIOUS - 6  # control and time tokens
    sizes = zip(clips.lengths, clips.clips, strict=True)
    lengths = [size if _tokens(tokenizer, clip) <= room else window + 1 for size, clip in sizes]
    if min(lengths) > window:
        raise DataError(
            f"holds no recording of {len(lengths)} that fits {window / 100:g} s and {room} tokens of text",
            argument="data",
        )
    if held and min(held.lengths) > window:
        raise DataError(f"holds no recording of {len(held)} that fits {window / 100:g} s", argument="val")
    if left := sum(length > window for length in lengths):
        reason = f"over {window / 100:g} s or {room} tokens of text"
        log.warning("%d of %d recordings are left out: %s", left, len(lengths), reason)
    if held and (left := sum(length > window for length in held.lengths)):
        log.warning("%d of %d held-out recordings are not scored: over %g s", left, len(held), window / 100)
    shares = Curriculum(window, max(window, d.frames), len(clips), easy=0, short=window, pairs=0.0, noise=0.0, full=1.0)
    model = multitask.LetterCTC(initial.model, 0)  # a pretrained encoder needs no letter CTC
    model.head.requires_grad_(False)
    return FinetuningJob(
        multitask.Multitask(model), initial.model, (), clips,
        curriculum(shares, lengths, [clip.language for clip in clips.clips], seed),
        multitask.PrepareWindow(tokenizer, "", bands), multitask.collate,
        partial(_error_rates, held, tokenizer, window) if held else None,
        lambda trained: replace(initial, model=trained.speech),
    )  # fmt: skip


def _tokens(tokenizer: WhisperTokenizer, clip: SpeechExample) -> int:
    return max(len(tokenizer.encode(" " + text)) for text in (clip.text, clip.translation or ""))


@torch.inference_mode()
def _error_rates(
    held: SpeechWindows, tokenizer: WhisperTokenizer, window: int, model: nn.Module, count: int | None
) -> dict[str, float | None]:
    """Error rates of greedy transcripts, each in its clip's language, normalized for the most frequent one; clips
    longer than the window are skipped."""
    speech, wanted, texts, languages = model.speech, [], [], []
    for i in evenly([i for i, size in enumerate(held.lengths) if size <= window], count):
        mel = F.pad(held.mels[i].float(), (0, window - held.lengths[i])).to(next(model.parameters()).device)
        texts += whisper_windows.decode(speech, tokenizer, speech.encoder(mel[None]), [held.clips[i].language])
        wanted.append(held.clips[i].text)
        languages.append(held.clips[i].language)
    return word_errors(wanted, texts, Counter(languages).most_common(1)[0][0])
