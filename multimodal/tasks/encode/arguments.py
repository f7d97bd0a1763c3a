"""Keyword arguments of the tasks, for editors and type checkers. A test holds their names equal to the options, which
have defaults, limits and help, and to the constructors."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch

from multimodal.tasks.encode.prompts import Templates


class DecodingArguments(TypedDict, total=False):
    """`DecodingOptions`."""

    max_new_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    no_repeat_ngram: int
    beam_size: int
    length_penalty: float
    seed: int


class CaptionArguments(DecodingArguments, total=False):
    """`CaptionOptions`."""

    num_captions: int
    prompt: str


class GenerateArguments(DecodingArguments, total=False):
    """`GenerateOptions`."""

    min_p: float
    early_stopping: bool
    num_return: int
    batch_size: int
    stop: str | Sequence[str]
    on_long: str


class PromptArguments(GenerateArguments, total=False):
    """`PromptOptions`."""

    chat: bool
    system: str | None


class AskArguments(GenerateArguments, total=False):
    """`GenerateOptions` and `VideoOptions`."""

    every_s: float | None
    max_frames: int | None
    scenes: float | None


class TranscribeArguments(TypedDict, total=False):
    """`WhisperOptions` and `RecognizerOptions`."""

    language: str | None
    task: str
    beam_size: int | None
    word_timestamps: bool
    token_logprobs: bool
    clip_timestamps: str | Sequence[float]
    vad_filter: bool
    vad_threshold: float
    vad_min_speech_duration_ms: float
    vad_max_speech_duration_s: float
    vad_min_silence_duration_ms: float
    vad_speech_pad_ms: float
    split_channels: bool
    decode_log: bool
    compute_type: str
    device: str | None
    batch_size: int
    on_truncated: str
    audio_track: int | None
    temperature: float | Sequence[float]
    best_of: int | None
    patience: float | None
    length_penalty: float | None
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    condition_on_previous_text: bool
    initial_prompt: str | None
    carry_initial_prompt: bool
    hotwords: str | None
    without_timestamps: bool
    max_initial_timestamp: float | None
    suppress_blank: bool
    suppress_tokens: str | Sequence[int] | None
    sample_len: int | None
    prepend_punctuations: str
    append_punctuations: str
    hallucination_silence_threshold: float | None
    snap_words_to_audio: bool
    languages: Sequence[str] | None
    language_detection_segments: int
    multilingual: bool
    batched: bool
    remove_repetitions: bool
    seed: int
    confidence_threshold: float | None
    lm: str | Path | tuple | None
    lm_weight: float
    lm_bonus: float
    target_language: str | None


class FillMaskArguments(TypedDict, total=False):
    """`FillMaskOptions`, without `top_k`."""

    iterations: int
    beam_size: int
    max_new_tokens: int | None


class TagArguments(TypedDict, total=False):
    """`TagOptions`."""

    merge: str
    overlap: int


class AnswerArguments(TypedDict, total=False):
    """`AnswerOptions`."""

    top_k: int
    null: bool
    max_answer_tokens: int
    window: int
    overlap: int


class TranslateArguments(TypedDict, total=False):
    """`TranslateOptions`."""

    beam_size: int
    length_penalty: float
    early_stopping: bool
    repetition_penalty: float
    no_repeat_ngram: int
    max_new_tokens: int | None
    batch_size: int
    on_long: str


class MachineArguments(TypedDict, total=False):
    device: str | torch.device | None
    compute_type: str


class ClipArguments(TypedDict, total=False):
    """`ClipOptions`."""

    every_s: float | None
    max_frames: int | None
    scenes: float | None
    per_clip: bool


class ImageArguments(MachineArguments, ClipArguments, total=False):
    batch_size: int
    workers: int | None
    urls: bool


class CaptionerArguments(CaptionArguments, ImageArguments, total=False):
    """`Captioner`."""


class ClassifierArguments(ImageArguments, total=False):
    """`Classifier`, without its labels."""

    templates: Templates | None
    classifier: str | Path | None
    threshold: float | None
    scores: str | None
    top: int | None
    native: int | None


class EmbedderArguments(ImageArguments, total=False):
    """`Embedder`."""

    pooling: str | None
    prompt: str | None
    normalize: bool | None
    batch_tokens: int | None
    native: int | None


class AskerArguments(AskArguments, MachineArguments, total=False):
    """`Asker`."""

    urls: bool


class GeneratorArguments(PromptArguments, MachineArguments, total=False):
    """`Generator`."""


class TaggerArguments(TagArguments, MachineArguments, total=False):
    """`Tagger`."""


class AnswererArguments(AnswerArguments, MachineArguments, total=False):
    """`Answerer`."""


class TranslatorArguments(TranslateArguments, MachineArguments, total=False):
    """`Translator`, without its languages."""
