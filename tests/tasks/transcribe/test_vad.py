"""Voice activity detection against the silero-vad package."""

import itertools
import random
import warnings

import pytest
import torch

import multimodal
from benchmarks.studies.noises import KINDS
from benchmarks.studies.noises import clip as noise
from multimodal.errors import CheckpointError, UsageError
from multimodal.system.assets import asset
from multimodal.tasks.transcribe import vad
from multimodal.tasks.transcribe.vad import FRAME, SpeechDetector, VadOptions
from multimodal.tokens.audio.reading import read_audio
from tests.helpers.spread import spread


def heard(wave, size=10**9):
    detector = SpeechDetector()
    for piece in wave.split(size):
        detector.push(piece)
    return detector.probabilities()


@pytest.fixture(scope="module")
def package():
    """silero-vad's model and module; its import sets torch to one thread."""
    threads = torch.get_num_threads()
    import silero_vad

    torch.set_num_threads(threads)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit
        return silero_vad.load_silero_vad(), silero_vad


@pytest.fixture(scope="module")
def speech():
    return torch.cat([read_audio(asset("sample", name)) for name in ("speech.flac", "german.flac")])


@pytest.mark.ci
def test_probabilities_equal_the_package_s_model(package, speech):
    model, _ = package
    for wave in (speech, noise("white", 3.0, -20, 1), noise("music", 4.0, -10, 2), speech[:700]):
        model.reset_states()
        frames = torch.nn.functional.pad(wave, (0, -len(wave) % FRAME)).split(FRAME)
        expected = torch.tensor([model(frame, 16000).item() for frame in frames])
        assert (heard(wave) - expected).abs().max() < 1e-4
    assert heard(speech).max() > 0.9


@pytest.mark.ci
def test_pieces_of_any_size_give_the_same_as_the_whole(speech):
    whole = heard(speech)
    assert len(whole) == -(-len(speech) // FRAME)
    for size in (1, 160, 511, 512, 7001, 16000):
        some = speech[: 200 * size]
        assert (heard(some, size) - heard(some)).abs().max() < 1e-4
    detector = SpeechDetector()
    detector.push(speech[:1000])
    detector.probabilities()  # asking changes nothing
    detector.push(speech[1000:])
    assert (detector.probabilities() - whole).abs().max() < 1e-4
    detector = SpeechDetector()
    detector.push(torch.zeros(0))
    assert detector.probabilities().shape == (0,)
    assert vad.speech_spans(detector.probabilities(), 0, VadOptions()) == []
    with pytest.raises(ValueError, match="probabilities"):
        vad.speech_spans(torch.zeros(3), 3 * FRAME + 1, VadOptions())


def random_track(chance, frames):
    """Probabilities that stay high or low for a while, with dips."""
    track, level = [], 0.9
    while len(track) < frames:
        level = chance.choice([0.02, 0.2, 0.4, 0.55, 0.95])
        track += [min(1.0, max(0.0, level + chance.gauss(0, 0.1))) for _ in range(int(chance.expovariate(1 / 8)) + 1)]
    return torch.tensor(track[:frames])


def random_options(chance):
    threshold = chance.choice([0.3, 0.5, 0.7, 0.1])
    return {
        "threshold": threshold,
        "neg_threshold": chance.choice([None, None, threshold * 0.5, threshold]),
        "min_speech_duration_ms": chance.choice([0, 100, 250]),
        "max_speech_duration_s": chance.choice([float("inf"), 1.0, 2.5, 5.0]),
        "min_silence_duration_ms": chance.choice([0, 100, 160, 500, 2000]),
        "speech_pad_ms": chance.choice([0, 30, 100, 400]),
    }


@pytest.mark.parametrize("seed", range(4))
def test_spans_equal_the_package_s_over_random_probabilities(package, seed):
    from silero_vad.utils_vad import get_speech_timestamps_from_probs

    chance = random.Random(seed)
    for _ in range(100):
        frames, options = chance.randint(1, 300), random_options(chance)
        samples = frames * FRAME - chance.randint(0, FRAME - 1)
        track = random_track(chance, frames)
        expected = get_speech_timestamps_from_probs(track.tolist(), audio_length_samples=samples, **options)
        found = vad.speech_spans(track, samples, VadOptions(**options))
        assert found == [(span["start"], span["end"]) for span in expected], options


@pytest.mark.ci
def test_spans_of_recordings_equal_the_package_s(package, speech, shared_data):
    model, module = package
    chance = random.Random(0)
    lines = sorted((shared_data / "speech/speechocean762/audio/test").glob("*.opus"))[:2]
    an4 = sorted((shared_data / "speech/an4/audio/test").glob("*.opus"))[:2]
    pieces = [part for path in [*lines, *an4] for part in (read_audio(path), torch.zeros(9000))]
    for wave in (speech, torch.cat(pieces)):
        found = heard(wave)
        for _ in range(2):  # the package runs its model each time
            options = random_options(chance)
            expected = module.get_speech_timestamps(wave, model, **options)
            spans = vad.speech_spans(found, len(wave), VadOptions(**options))
            assert spans == [(span["start"], span["end"]) for span in expected]


@pytest.mark.parametrize("seed", range(2))
def test_windows_hold_all_speech_once_and_none_is_too_long(seed):
    chance = random.Random(100 + seed)
    for _ in range(80):
        frames = chance.randint(1, 600)
        samples = frames * FRAME - chance.randint(0, FRAME - 1)
        track, options = random_track(chance, frames), VadOptions(**random_options(chance) | {"neg_threshold": None})
        longest, gap = chance.choice([16000, 48000, 96000, 480000]), chance.choice([0, 8000, 10**9])
        if longest < 32 * options.speech_pad_ms + 2 * FRAME:
            with pytest.raises(UsageError, match="max_speech_duration_s"):
                vad.speech_windows(track, samples, options, longest, gap)
            continue
        pieces = vad.speech_windows(track, samples, options, longest, gap)
        limit = min(options.max_speech_duration_s, longest / 16000)
        spans = vad.speech_spans(track, samples, VadOptions(**vars(options) | {"max_speech_duration_s": limit}))
        assert all(0 < end - start <= longest for start, end in pieces)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))
        assert all(any(a <= start and end <= b for a, b in pieces) for start, end in spans)
        assert {start for start, _ in pieces} <= {start for start, _ in spans}


def test_windows_join_over_short_pauses_only():
    frames = [1.0] * 50 + [0.0] * 10 + [1.0] * 50 + [0.0] * 40 + [1.0] * 30
    track, samples = torch.tensor(frames), len(frames) * FRAME
    options = VadOptions(min_silence_duration_ms=0, speech_pad_ms=0)
    spans = vad.speech_spans(track, samples, options)
    assert [(a // FRAME, b // FRAME) for a, b in spans] == [(0, 50), (60, 110), (150, 180)]
    for longest, gap, expected in (
        (200, 100, [(0, 180)]), (200, 20, [(0, 110), (150, 180)]), (105, 100, [(0, 50), (60, 110), (150, 180)]),
    ):  # fmt: skip
        windows = vad.speech_windows(track, samples, options, longest * FRAME, gap * FRAME)
        assert [(a // FRAME, b // FRAME) for a, b in windows] == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threshold", 0.0),
        ("threshold", 1.5),
        ("threshold", float("nan")),
        ("neg_threshold", 0.0),
        ("neg_threshold", 0.6),
        ("min_speech_duration_ms", -1),
        ("min_silence_duration_ms", -5),
        ("speech_pad_ms", -2),
        ("max_speech_duration_s", 0.8),
        ("max_speech_duration_s", float("nan")),
    ],
)
def test_values_that_cannot_be_are_refused(option, value):
    with pytest.raises(UsageError, match=rf"^{option} must .*{value:g}") as refused:
        VadOptions(**{option: value})
    assert "\n" not in str(refused.value)


@pytest.fixture
def fresh():
    vad.silero.cache_clear()
    yield
    vad.silero.cache_clear()


def test_missing_or_damaged_weights_are_named(fresh, monkeypatch, tmp_path):
    file = tmp_path / "model.safetensors"
    monkeypatch.setattr(vad, "asset", lambda *parts: file)
    whole = asset("silero-vad", "model.safetensors").read_bytes()
    for content, cause in ((None, "no such file"), (whole[:-9], "cannot be read as safetensors"),
                           (whole.replace(b"lstm.bias_hh", b"lstm.bias_hx"), "bias_h")):  # fmt: skip
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{cause}") as refused:
            SpeechDetector()
        assert "\n" not in str(refused.value)


def test_the_shipped_weights_equal_the_package_s(package):
    theirs, ours = package[0].state_dict(), vad.silero().state_dict()
    wide = [tensor for name, tensor in theirs.items() if name.startswith("_model.")]
    assert len(wide) == len(ours) == 15
    assert all(any(tensor.equal(other) for other in wide) for tensor in ours.values())


@pytest.mark.parametrize("kind", KINDS)
def test_noises_are_finite_repeatable_and_of_their_level(kind):
    wave = noise(kind, 3.0, -20, 5)
    assert wave.shape == (48000,)
    assert torch.equal(wave, noise(kind, 3.0, -20, 5))
    assert wave.isfinite().all()
    assert wave.abs().max() <= 1


SHIPPED = [("asr-conformer-en", {"vad_filter": True}), ("whisper-mini", {"vad_filter": True}),
           ("whisper-mini", {"no_speech_threshold": 0.2})]  # fmt: skip


@pytest.mark.filterwarnings("ignore:<samples>. silent", "ignore:<samples>. very quiet", "ignore:<samples>. clipped")
@pytest.mark.parametrize(("name", "options"), spread(SHIPPED, 2, pytest.mark.slow, pytest.mark.ci))
def test_the_shipped_models_write_nothing_where_nobody_speaks(name, options):
    model = multimodal.load(name)
    for number, kind in enumerate(KINDS):
        wave = noise(kind, 4.0 + number % 4, -6.0 * number - 3, number)
        result = multimodal.transcribe(wave, model, **options)
        assert result["text"] == "", kind
        assert [(row["start"], row["end"]) for row in result["skipped"]] == [(0.0, len(wave) / 16000)]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "options"), SHIPPED)
def test_speech_between_noise_is_still_written(name, options):
    model = multimodal.load(name)
    sample = "speech" if "conformer" in name else "german"
    wave = read_audio(asset("sample", f"{sample}.flac"))
    expected = asset("sample", f"{sample}.txt").read_text().strip()
    if sample == "german":  # the other's is tested with the shipped files
        assert multimodal.transcribe(wave, model, **options)["text"].strip() == expected
    around = torch.cat([noise("white", 6.0, -45, 0), wave, noise("pink", 6.0, -45, 1)])
    found = multimodal.transcribe(around, model, **options)["text"].lower().split()
    assert len(set(found) & set(expected.lower().split())) >= 0.7 * len(set(expected.lower().split()))
    assert len(found) <= 1.3 * len(expected.split())
