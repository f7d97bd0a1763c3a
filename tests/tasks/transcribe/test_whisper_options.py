"""Options: names, values and where their defaults come from."""

from dataclasses import replace

import numpy as np
import pytest

from multimodal.errors import CheckpointError, UsageError
from multimodal.tasks.transcribe.options import RecognizerOptions, VadOptions, WhisperOptions, options_for
from tests.helpers.tiny_whisper import tiny_hybrid, whispers

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def whisper(**given):
    return options_for(whispers()[1], given)


def test_defaults_that_stand_elsewhere_are_the_same():
    assert WhisperOptions().vad() == VadOptions()
    changed = WhisperOptions(vad_threshold=0.3, vad_speech_pad_ms=20.0).vad()
    assert (changed.threshold, changed.speech_pad_ms) == (0.3, 20.0)


@pytest.mark.parametrize("kind", [WhisperOptions, RecognizerOptions])
def test_every_default_is_a_value_that_may_be_given(kind):
    defaults = {name: own.default for name, own in kind.declared.items()}
    assert kind.checked(defaults) == defaults


def test_values_are_read_from_texts_lists_and_whole_numbers():
    found = whisper(
        temperature=1, clip_timestamps="1.5, 7", suppress_tokens="5,-1", languages=["German", "en"], language="DE",
        no_speech_threshold=1, suppress_blank=False,
    )  # fmt: skip
    assert found.temperature == (1.0,)
    assert found.clip_timestamps == (1.5, 7.0)
    assert found.suppress_tokens == (5, -1)
    assert (found.language, found.languages) == ("de", ("de", "en"))
    assert isinstance(found.no_speech_threshold, float)
    assert whisper(suppress_tokens="").suppress_tokens == ()
    assert whisper(clip_timestamps="").clip_timestamps == (0.0,)
    given = whisper(beam_size=np.int64(2), patience=np.float32(1.5), temperature=np.float64(0))
    assert (given.beam_size, given.patience, given.temperature) == (2, 1.5, (0.0,))
    assert type(given.beam_size) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 3}, "'beams': unknown"),
        ({"patience": 2.0}, "patience 2 needs a beam_size"),
        ({"patience": 0.01, "beam_size": 5}, "patience 0.01 of beam_size 5 waits for no beam"),
        ({"patience": 0.0, "beam_size": 2}, r"patience must be a number above 0 \(got 0.0\)"),
        ({"temperature": ()}, "temperature needs at least one"),
        ({"temperature": "warm"}, "temperature must be a list"),
        ({"temperature": -0.1}, r"temperature must .*-0.1"),
        ({"temperature": float("nan")}, r"temperature must .*nan"),
        ({"beam_size": 0}, r"beam_size must be an integer of at least 1 \(got 0\)"),
        ({"beam_size": 2.5}, "beam_size must be an integer .*2.5"),
        ({"best_of": True}, "best_of"),
        ({"task": "summarize"}, "summarize"),
        ({"language": "klingon"}, "^language 'klingon' is not one of Whisper's 100"),
        ({"language": "auto"}, "left out, it is detected"),
        ({"languages": []}, "languages needs at least one"),
        ({"language": "en", "languages": "de,fr"}, "language 'en' is not one of"),
        ({"language": "en", "multilingual": True}, "multilingual"),
        ({"length_penalty": 1.5}, r"length_penalty must be a number in \[0, 1\] \(got 1.5\)"),
        ({"clip_timestamps": "9,3"}, "clip_timestamps"),
        ({"clip_timestamps": [-1.0]}, "clip_timestamps"),
        ({"suppress_tokens": "a"}, "suppress_tokens"),
        ({"initial_prompt": 3}, "initial_prompt must be a string"),
        ({"word_timestamps": 1}, "word_timestamps must be True or False"),
        ({"hallucination_silence_threshold": 2.0}, "needs word_timestamps"),
        ({"seed": -1}, "seed"),
        ({"compute_type": "int4"}, "compute_type"),
        ({"on_truncated": "ignore"}, "on_truncated"),
        ({"vad_filter": True, "vad_threshold": 2.0}, "vad_threshold"),
        ({"lm": "x.arpa"}, "lm is for models other than Whisper"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(options, message):
    with pytest.raises(UsageError, match=message) as raised:
        whisper(**options)
    assert "\n" not in str(raised.value)


def test_a_ctc_model_has_its_own_options():
    joint = tiny_hybrid()
    found = options_for(joint, {"beam_size": 2, "temperature": 0, "initial_prompt": None, "batched": True})
    assert found == RecognizerOptions(beam_size=2)
    for name, value in (("initial_prompt", "x"), ("temperature", 0.5), ("hotwords", "a"), ("best_of", 2)):
        with pytest.raises(UsageError, match=f"{name} is for Whisper models, not for joint.*got {value!r}"):
            options_for(joint, {name: value})


def test_a_cards_options_stand_between_the_given_and_the_defaults():
    card = {"transcribe": {"no_speech_threshold": 0.3, "temperature": [0.0, 0.5], "beam_size": 3}}
    checkpoint = replace(whispers()[1], card=card)
    found = options_for(checkpoint, {"beam_size": None, "seed": 2})
    expected = WhisperOptions(no_speech_threshold=0.3, temperature=(0.0, 0.5), seed=2)
    assert found == expected


@pytest.mark.parametrize(
    ("table", "message"),
    [({"beams": 2}, "'beams': unknown"), ({"beam_size": 0}, "beam_size must be")],
)
def test_a_cards_faults_are_the_checkpoints(table, message):
    with pytest.raises(CheckpointError, match=f"card, transcribe: .*{message}"):
        options_for(replace(whispers()[1], card={"transcribe": table}), {})


def test_a_card_names_a_shipped_language_model_and_the_caller_another_or_none():
    joint, own = tiny_hybrid(), {"lm": "asr-lm-en", "lm_weight": 0.5, "lm_bonus": 1.0}
    joint = replace(joint, card={"transcribe": own})
    assert options_for(joint, {}) == RecognizerOptions(**own)
    assert options_for(joint, {"lm_weight": 0.2}) == RecognizerOptions(**own | {"lm_weight": 0.2})
    assert options_for(joint, {"beam_size": 1}) == RecognizerOptions(beam_size=1)
    assert options_for(joint, {"lm": None}) == RecognizerOptions()
    assert options_for(joint, {"lm": "words.arpa"}) == RecognizerOptions(lm="words.arpa")
    with pytest.raises(UsageError, match="asr-lm-en: needs a beam_size above 1"):
        options_for(joint, {"lm": "asr-lm-en", "beam_size": 1})
    for other in ("words.arpa", "owner/name", "/tmp"):
        with pytest.raises(CheckpointError, match="card, transcribe: lm must be a shipped model"):
            options_for(replace(joint, card={"transcribe": {"lm": other}}), {})
