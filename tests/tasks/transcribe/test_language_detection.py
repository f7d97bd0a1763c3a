"""Language identification over windows, against openai-whisper and on the shipped model."""

import pytest
import torch
import torch.nn.functional as F

import multimodal
from benchmarks.studies.noises import clip as noise
from multimodal.errors import UsageError
from multimodal.system.assets import asset
from multimodal.tasks.transcribe.vad import SpeechDetector
from multimodal.tasks.transcribe.whisper.language import allowed_codes, combine, language_probabilities
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from tests.helpers.tiny_whisper import whispers

LEAKS = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # openai-whisper's open file
SIZE = 6 * RATE  # samples of a window of whisper-mini


@pytest.mark.filterwarnings(*LEAKS)
def test_probabilities_equal_openai_whispers():
    theirs, checkpoint = whispers()
    torch.manual_seed(0)
    mel = torch.randn(2, 80, 3000)
    expected = theirs.detect_language(mel)[1]
    with torch.inference_mode():
        found = language_probabilities(checkpoint.model, checkpoint.tokenizer, checkpoint.model.encoder(mel))
    for own, other in zip(found, expected, strict=True):
        assert own.keys() == other.keys()
        assert sum(own.values()) == pytest.approx(1)
        assert max(abs(own[code] - other[code]) for code in own) < 1e-5
        assert combine([(own, 1.0)])[0] == max(other, key=other.get)


def test_a_model_of_one_language_has_it(monkeypatch):
    tokenizer = WhisperTokenizer(multilingual=False)
    (found,) = language_probabilities(whispers()[1].model, tokenizer, torch.zeros(1, 4, 16))
    assert found == {"en": 1.0}
    assert allowed_codes(tokenizer, ["English"]) == ("en",)
    with pytest.raises(UsageError, match="'de'"):
        allowed_codes(tokenizer, ["de"])


@pytest.fixture(scope="module")
def mini():
    return multimodal.load("whisper-mini")


def weighted(mini, wave):
    """(probabilities, share of speech) of each window of a recording."""
    windows = wave.split(SIZE)
    mels = torch.stack([log_mel(F.pad(w, (0, SIZE - len(w))), 80)[:, : SIZE // HOP] for w in windows])
    found = language_probabilities(mini.model, mini.tokenizer, mini.model.encoder(mels))
    weights = []
    for window in windows:
        detector = SpeechDetector()
        detector.push(window)
        weights.append(detector.probabilities().mean().item())
    return list(zip(found, weights, strict=True))


@pytest.mark.ci
@torch.inference_mode()
def test_sound_without_speech_in_front_does_not_change_the_language(mini):
    german, english = (read_audio(asset("sample", name)) for name in ("german.flac", "speech.flac"))
    code, sure = combine(weighted(mini, german))
    assert code == "de"
    assert sure > 0.9
    assert combine(weighted(mini, english[:SIZE]))[0] == "en"
    for kind in ("silence", "white", "music", "hum"):
        before = torch.cat([noise(kind, 6.0, -10, seed) for seed in range(4)])
        code, surely = combine(weighted(mini, torch.cat([before, german])))
        assert code == "de", kind
        assert surely > 0.8, kind


@torch.inference_mode()
def test_only_allowed_languages_are_considered(mini):
    windows = weighted(mini, read_audio(asset("sample", "german.flac")))
    assert combine(windows, ["de"]) == ("de", pytest.approx(1))
    code, sure = combine(windows, ["fr", "cs"])
    own = windows[0][0]
    assert code in ("fr", "cs")
    assert sure == pytest.approx(own[code] / (own["fr"] + own["cs"]))
    assert allowed_codes(mini.tokenizer, None) is None
    assert allowed_codes(mini.tokenizer, ["German", "de", "CS"]) == ("de", "cs")


def test_windows_count_by_their_speech():
    one, other = {"en": 0.9, "de": 0.1}, {"en": 0.2, "de": 0.8}
    assert combine([(one, 1.0), (other, 0.0)]) == ("en", pytest.approx(0.9))
    assert combine([(one, 0.5), (other, 1.5)]) == ("de", pytest.approx((0.05 + 1.2) / 2))
    assert combine([(one, 0.0), (other, 0.0)]) == ("en", pytest.approx(0.55))
    assert combine([({"en": 0.0, "de": 0.0, "fr": 1.0}, 1.0)], ["de", "en"]) == ("de", pytest.approx(0.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mini: allowed_codes(mini.tokenizer, ["de", "ja"]), "'ja' is not one of the model's 4"),
        (lambda mini: allowed_codes(mini.tokenizer, ["klingon"]), "klingon"),
        (lambda mini: allowed_codes(mini.tokenizer, []), "at least one language"),
        (lambda mini: combine([]), "at least one window"),
        (lambda mini: combine([({"en": 1.0}, -1.0)]), "-1"),
        (lambda mini: combine([({"en": 1.0}, float("nan"))]), "nan"),
        (lambda mini: combine([({"en": 1.0}, 1.0)], ["de"]), "'de'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(mini, call, message):
    with pytest.raises(UsageError, match=message) as refused:
        call(mini)
    assert "\n" not in str(refused.value)
