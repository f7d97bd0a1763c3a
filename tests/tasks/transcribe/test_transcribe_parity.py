"""Whisper's loop against openai-whisper's, option by option."""

import inspect
from dataclasses import fields

import pytest
import torch

from multimodal.tasks.transcribe.options import WhisperOptions, options_for
from multimodal.tasks.transcribe.results import compression_ratio
from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.tasks.transcribe.whisper.decode import sampling_seed
from tests.helpers.spread import thin
from tests.helpers.tiny_whisper import COMMON, KEYS, THEIR_WARNINGS, sound, whispers

pytestmark = THEIR_WARNINGS


def reference(wave, attempts, seed=0, **options):
    """openai-whisper's result, its draws seeded as ours: `attempts` are the (seek, temperature) of our log."""
    from whisper.transcribe import transcribe as their_transcribe

    theirs, attempts = whispers()[0], iter(attempts)
    decode = type(theirs).decode

    def seeded(mel, chosen):
        seek, temperature = next(attempts)
        assert temperature == chosen.temperature
        torch.manual_seed(sampling_seed(seed, seek, temperature))
        return decode(theirs, mel, chosen)

    theirs.decode = seeded
    try:
        # openai-whisper appends to the list it is given
        copied = {name: list(value) if isinstance(value, list) else value for name, value in options.items()}
        return their_transcribe(theirs, wave.numpy(), fp16=False, **copied)
    finally:
        del theirs.decode


@thin(3, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"without_timestamps": True, "condition_on_previous_text": False, "initial_prompt": "some names"},
        {"language": "de", "task": "translate", "beam_size": 3, "initial_prompt": "hello there"},
        {"initial_prompt": "", "carry_initial_prompt": True},
        {"language": None, "no_speech_threshold": 1e-8},
        {"beam_size": 5, "patience": 2.0, "length_penalty": 0.6},
        {"temperature": 0.7, "seed": 3},
        {"temperature": (0.4, 1.0), "best_of": 3, "seed": 1},
        {"temperature": (0.0, 0.5, 0.9), "logprob_threshold": -0.5, "best_of": 2, "beam_size": 2},
        {"temperature": (0.0, 0.9), "compression_ratio_threshold": 0.9, "logprob_threshold": None},
        {"initial_prompt": "hello there", "carry_initial_prompt": True},
        {"initial_prompt": "hello there, " * 9, "carry_initial_prompt": True, "clip_timestamps": "30"},
        {"clip_timestamps": "3,11.5,20,41", "suppress_tokens": [257, 1000]},
        {"clip_timestamps": [5.0, 17.25, 30.0], "suppress_tokens": None},
        {"max_initial_timestamp": None, "suppress_blank": False, "sample_len": None},
        {"word_timestamps": True, "max_initial_timestamp": 0.2},
        {"word_timestamps": True, "hallucination_silence_threshold": 1.0},
        {"word_timestamps": True, "hallucination_silence_threshold": 0.1, "clip_timestamps": "3,6.5,20,21"},
    ],
)  # fmt: skip
def test_whisper_segments_equal_openai_whispers(timing, options):
    wave, options = sound(45 if "clip_timestamps" in options else 32), {**COMMON, **options}
    found = transcribe(wave, whispers()[1], compute_type="float32", remove_repetitions=False,
                       language_detection_segments=1, decode_log=True, **options)  # fmt: skip
    expected = reference(wave, [(entry["seek"], entry["temperature"]) for entry in found["log"]], **options)
    assert found["language"] == expected["language"]
    assert found["text"] == expected["text"]
    assert len(found["segments"]) == len(expected["segments"])
    assert bool(found["segments"]) != (options.get("no_speech_threshold") == 1e-8)
    words = {"words"} if options.get("word_timestamps") else set()
    for ours, other in zip(found["segments"], expected["segments"], strict=True):
        assert ours.keys() == KEYS | words
        for key in ("id", "seek", "text", "tokens", "temperature", "compression_ratio"):
            assert ours[key] == other[key], key
        # where one position of the encoder is left, openai-whisper's words have no number for a time
        close = 0.021 if words and not ours["words"] else 0
        assert (ours["start"], ours["end"]) == pytest.approx((other["start"], other["end"]), abs=close)
        assert ours["avg_logprob"] == pytest.approx(other["avg_logprob"], abs=1e-4)
        assert ours["no_speech_prob"] == pytest.approx(other["no_speech_prob"], abs=1e-6)
        for word, their_word in zip(ours.get("words", []), other["words"] if words else [], strict=True):
            assert word == pytest.approx({**their_word, "word": word["word"]}, abs=1e-4)
            assert all(word[key] == their_word[key] for key in ("word", "start", "end"))


def chosen(**given):
    return options_for(whispers()[1], given)


def test_names_and_defaults_are_openai_whispers():
    from whisper.decoding import DecodingOptions
    from whisper.transcribe import transcribe

    theirs = {name: p.default for name, p in inspect.signature(transcribe).parameters.items()}
    theirs |= {field.name: field.default for field in fields(DecodingOptions)}
    ours = {name: own.default for name, own in WhisperOptions.declared.items()}
    written = {"suppress_tokens": (-1,), "clip_timestamps": (0.0,), "temperature": theirs["temperature"]}
    for name in theirs.keys() & (ours.keys() - written.keys()):
        assert ours[name] == theirs[name], name
    left = {"model", "audio", "verbose", "decode_options", "prompt", "prefix", "fp16"}
    assert theirs.keys() - ours.keys() == left
    assert chosen(suppress_tokens=theirs["suppress_tokens"], clip_timestamps=theirs["clip_timestamps"]) == chosen()
    assert chosen(temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)) == chosen()


def test_compression_ratio_equals_openai_whispers():
    from whisper.utils import compression_ratio as reference_ratio

    for text in ("", "a", "la la la la la la la la la", "ünïcode"):
        assert compression_ratio(text) == reference_ratio(text)
