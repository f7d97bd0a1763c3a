"""Flags that `transcribe` and `evaluate asr` share: openai-whisper's by name, default and spelling of values, and ours.

Only what was given on the command line is in the namespace, so that a model's own defaults hold for the rest."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from multimodal.cli.parser import boolean, limited, number, or_none
from multimodal.inference.options import MachineOptions
from multimodal.system.options import add_flags
from multimodal.tasks.transcribe.options import RecognizerOptions, WhisperOptions
from multimodal.tasks.transcribe.writers import Layout

DECODING = ("task", "beam_size", "best_of", "patience", "length_penalty", "suppress_tokens", "suppress_blank",
            "sample_len", "initial_prompt", "carry_initial_prompt", "hotwords", "condition_on_previous_text",
            "seed")  # fmt: skip
CHECKS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold", "hallucination_silence_threshold",
          "remove_repetitions")  # fmt: skip
TIMES = ("clip_timestamps", "without_timestamps", "max_initial_timestamp", "word_timestamps", "token_logprobs",
         "prepend_punctuations", "append_punctuations", "snap_words_to_audio")  # fmt: skip
VOICE = ("vad_filter", "vad_threshold", "vad_min_speech_duration_ms", "vad_max_speech_duration_s",
         "vad_min_silence_duration_ms", "vad_speech_pad_ms", "audio_track", "split_channels")  # fmt: skip
LANGUAGE = ("language", "languages", "multilingual", "language_detection_segments")


def speed(g: Any) -> None:
    add_flags(g, WhisperOptions, ["device", "compute_type"])
    switch(g, "--fp16", "False: float32; True: automatic (default: True)")
    add_flags(g, WhisperOptions, ["batch_size", "batched"])
    add_flags(g, MachineOptions, ["threads"])


def decoding(g: Any) -> None:
    add_flags(g, WhisperOptions, DECODING)
    add_flags(g, RecognizerOptions, ["lm", "lm_weight", "lm_bonus", "target_language"])


def checks(g: Any) -> None:
    first = limited(number, lambda value: 0 <= value < math.inf, "0 or more")
    step = limited(number, lambda value: 0.01 <= value < math.inf, "0.01 or more")
    flag(g, "--temperature T", "first temperature of the sampling (default: 0)", first)
    flag(g, "--temperature_increment_on_fallback STEP",
         "raise the temperature by STEP, up to 1, while a text fails; None: no fallback (default: 0.2)",
         or_none(step))  # fmt: skip
    add_flags(g, WhisperOptions, CHECKS)
    add_flags(g, RecognizerOptions, ["confidence_threshold"])


def times(g: Any) -> None:
    add_flags(g, WhisperOptions, TIMES)
    add_flags(g, Layout)


def voice(g: Any) -> None:
    add_flags(g, WhisperOptions, VOICE)


def language(g: Any) -> None:
    add_flags(g, WhisperOptions, LANGUAGE)


def flag(
    g: Any,
    name: str,
    text: str,
    kind: Callable[[str], Any] = str,
    choices: list[str] | None = None,
    also: tuple[str, ...] = (),
) -> None:
    """`name`: the flag, a space and the metavar of its value. `also`: other spellings."""
    flag, metavar = name.split(" ")
    g.add_argument(flag, *also, metavar=metavar, type=kind, choices=choices, help=text, default=argparse.SUPPRESS)


def switch(g: Any, name: str, text: str) -> None:
    g.add_argument(name, metavar="BOOL", type=boolean, nargs="?", const=True, help=text, default=argparse.SUPPRESS)
