"""Transcription of whole recordings with both kinds of model."""

import io
import itertools
import math
import wave as wav
from dataclasses import replace

import pytest
import torch

from multimodal.errors import AudioError, CheckpointError, UsageError
from multimodal.system.assets import asset
from multimodal.tasks.transcribe import timeline
from multimodal.tasks.transcribe.transcribe import transcribe, transcribe_many
from multimodal.tasks.transcribe.whisper.windows import DecoderPrompt
from multimodal.tokens.audio.reading import read_audio
from tests.helpers.spread import thin
from tests.helpers.tiny_whisper import COMMON, KEYS, RATE, THEIR_WARNINGS, sound, tiny_hybrid, whispers

pytestmark = THEIR_WARNINGS
HYBRID = {"vad_filter": False, "beam_size": 1, "logprob_threshold": None}  # random weights are never confident


def whisper(wave, checkpoint=None, **options):
    return transcribe(wave, checkpoint or whispers()[1], **{**COMMON, **options})


def same(one, other):
    """The same result but for the last digits of figures, which a batch's size may change."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == pytest.approx(other, abs=1e-4) if isinstance(one, float) else one == other


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("batched", [False, True])
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("options", [
    {"beam_size": 3, "language": None, "languages": ["de", "en", "fr"]},
    {"temperature": (0.0, 1.0), "best_of": 2, "hotwords": "x y", "multilingual": True, "language": None},
    {"word_timestamps": True, "initial_prompt": "a b c d e", "condition_on_previous_text": False},
])  # fmt: skip
def test_batch_size_changes_nothing(options, batched):
    waves = [sound(seconds, seed) for seed, seconds in enumerate((31, 2, 3))]
    options = {**COMMON, "sample_len": 5, **options, "decode_log": True, "batched": batched}
    alone = [result for _, result in transcribe_many(waves, whispers()[1], batch_size=1, **options)]
    found = list(transcribe_many(reversed(waves), whispers()[1], batch_size=2, **options))
    assert [key for key, _ in found] == [0, 1, 2]
    assert all(any(len(entry["tokens"]) > 2 for entry in result["log"]) for result in alone)
    for one, (_, other) in zip(alone, reversed(found), strict=True):
        assert same(one, other)


def tiles(result, samples):
    spans = sorted([*result["transcribed"], *([s["start"], s["end"]] for s in result["skipped"])])
    assert result["duration"] == samples / RATE
    assert spans[0][0] == 0
    assert spans[-1][1] == result["duration"]
    assert all(one[1] == other[0] and one[0] < one[1] for one, other in itertools.pairwise([*spans, [spans[-1][1]] * 2])
               if one != other)  # fmt: skip
    return {skipped["reason"] for skipped in result["skipped"]}


@thin(2, pytest.mark.slow, pytest.mark.ci)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("options", "reasons"), [
    ({}, {"silence"}), ({"clip_timestamps": "2,9.5,12,90"}, {"clip", "silence"}),
    ({"vad_filter": True, "vad_threshold": 0.05, "clip_timestamps": "0.1"}, {"clip", "silence"}),
    ({"no_speech_threshold": 1e-8}, {"no_speech", "silence"}),
    ({"word_timestamps": True, "hallucination_silence_threshold": 0.5}, {"silence", "hallucination"}),
])  # fmt: skip
def test_every_second_is_transcribed_or_skipped_for_a_reason(options, reasons, batched):
    wave = torch.cat([sound(14.003), torch.zeros(65 * RATE), sound(7.377)])
    found = tiles(whisper(wave, batched=batched, **options), len(wave))
    assert found == reasons or found | {"hallucination"} == reasons
    assert tiles(whisper(wave[:100], batched=batched, **options), 100) == {"silence"}


def always(monkeypatch, tokens):
    """A model that returns the same tokens for every window."""
    from multimodal.tasks.transcribe.whisper import decode as whisper_decode

    def decode(checkpoint, options, requests):
        return [whisper_decode.DecodingResult(tokens, checkpoint.tokenizer.decode(tokens), -0.1, 0.0, r.temperature)
                for r in requests]  # fmt: skip

    monkeypatch.setattr(whisper_decode, "decode", decode)


def test_loops_are_removed_and_reported(monkeypatch):
    tokenizer = whispers()[1].tokenizer
    begin, text = tokenizer.timestamp_begin, tokenizer.encode(" Thank you very much.")
    spans = [token for i in range(14) for token in (begin + 100 * i, *text, begin + 100 * (i + 1))]
    always(monkeypatch, spans)
    found = whisper(sound(30), temperature=(0.0, 0.5), decode_log=True)
    assert found["text"] == " Thank you very much."
    assert [(s["start"], s["end"]) for s in found["segments"]] == [(0.0, 2.0)]
    assert found["transcribed"] == [[0.0, 2.0], [28.0, 30.0]]
    assert found["skipped"] == [{"start": 2.0, "end": 28.0, "reason": "repetition"}]
    assert [entry["fallback"] for entry in found["log"]] == ["compression_ratio"] * 2
    assert whisper(sound(30), remove_repetitions=False)["text"] == " Thank you very much." * 14


def test_text_after_the_last_timestamp_is_decoded_again_in_batched_windows(monkeypatch):
    tokenizer = whispers()[1].tokenizer
    begin, word = tokenizer.timestamp_begin, tokenizer.encode(" word")
    always(monkeypatch, [begin, *word, begin + 500, begin + 500, *word])
    for batched in (False, True):
        found = whisper(sound(25), batched=batched)
        assert [segment["seek"] for segment in found["segments"]] == [0, 1000, 2000]
        assert found["text"] == " word word word"


def test_the_prompt_holds_what_fits():
    text = list(range(100, 130))
    plain, carried = DecoderPrompt([1, 2], [], False), DecoderPrompt([1, 2], [], True)
    assert plain.tokens(text[:3], False, 40) == [1, 2, 100, 101, 102]
    assert plain.tokens(text, False, 40) == text[-19:]
    assert plain.tokens(text[:3], True, 40) == text[:3]
    assert carried.tokens(text, True, 40) == [1, 2, *text[-17:]]
    assert DecoderPrompt([], list(range(30)), True).tokens(text, False, 40) == [*range(19), *text[-6:]]


def test_hotwords_lead_the_prompt_of_every_window():
    plain, hot = (whisper(sound(32), decode_log=True, sample_len=4, **o) for o in ({}, {"hotwords": "Kubernetes"}))
    count = len(whispers()[1].tokenizer.encode(" Kubernetes"))
    assert plain["log"][0]["prompt_tokens"] == 0
    assert hot["log"][0]["prompt_tokens"] == count
    assert all(entry["prompt_tokens"] >= count for entry in hot["log"])
    assert plain["text"] != hot["text"]


@pytest.mark.ci
def test_the_log_has_every_attempt():
    options = {"temperature": (0.0, 0.4, 0.9), "sample_len": 4, "no_speech_threshold": None, "logprob_threshold": 100.0}
    found = whisper(sound(3), decode_log=True, **options)
    assert [entry["temperature"] for entry in found["log"]] == [0.0, 0.4, 0.9]
    assert {entry["fallback"] for entry in found["log"]} == {"avg_logprob"}
    assert found["segments"][0]["temperature"] == 0.9
    last = found["log"][-1]
    assert (last["seek"], last["tokens"][:3]) == (0, found["segments"][0]["tokens"][:3])
    assert {"avg_logprob", "compression_ratio", "no_speech_prob", "text", "prompt_tokens"} <= last.keys()
    assert whisper(sound(3), decode_log=True, **options) == found  # repeatable
    assert whisper(sound(3), decode_log=True, seed=1, **options)["log"] != found["log"]
    assert "log" not in whisper(sound(3))


@pytest.mark.ci
def test_language_is_found_among_the_allowed_over_the_whole_recording():
    wave = sound(31)
    assert 0 < whisper(wave, language=None, sample_len=2)["language_probability"] < 1
    several = whisper(wave, language=None, sample_len=2, languages=["Polish", "de"], multilingual=True)
    assert several["language"] in ("pl", "de")
    assert {segment["language"] for segment in several["segments"]} <= {"pl", "de"}
    assert "language_probability" not in whisper(wave, language="pl", sample_len=2)
    with pytest.raises(UsageError, match="'yue'"):
        whisper(wave, language=None, languages=["yue"])


def test_whisper_without_its_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match="vocabulary"):
        whisper(sound(1), replace(whispers()[1], tokenizer=None))


def wav_bytes(samples):
    """Samples [C T] as a 16-bit file."""
    file = io.BytesIO()
    with wav.open(file, "wb") as out:
        out.setnchannels(len(samples))
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((samples.T * 32768).round().to(torch.int16).numpy().tobytes())
    return file.getvalue()


@pytest.mark.parametrize("kind", ["whisper", "hybrid"])
def test_channels_are_speakers(kind):
    left, right = torch.cat([sound(4), torch.zeros(8 * RATE)]), torch.cat([torch.zeros(6 * RATE), sound(6, 1)])
    options = COMMON if kind == "whisper" else HYBRID
    checkpoint = whispers()[1] if kind == "whisper" else tiny_hybrid()
    given = {"clip_timestamps": "0,4,6,12", **options}
    found = transcribe(wav_bytes(torch.stack([left, right])), checkpoint, split_channels=True, **given)
    quantised = [(channel * 32768).round() / 32768 for channel in (left, right)]
    alone = [transcribe(channel, checkpoint, **given) for channel in quantised]
    for name, own in zip(("channel 1", "channel 2"), alone, strict=True):
        segments = [s for s in found["segments"] if s["speaker"] == name]
        assert segments
        assert [s["text"] for s in segments] == [s["text"] for s in own["segments"]]
    starts = [segment["start"] for segment in found["segments"]]
    assert starts == sorted(starts)
    assert [segment["id"] for segment in found["segments"]] == list(range(len(starts)))
    assert tiles(found, 12 * RATE) == {"clip"}
    for own, channel in zip(alone, found["channels"], strict=True):
        assert {name: channel[name] for name in ("duration", "transcribed", "skipped")} == {
            name: own[name] for name in ("duration", "transcribed", "skipped")
        }


@pytest.mark.filterwarnings("ignore:.*silent")
def test_the_language_is_that_of_the_channel_with_most_text(monkeypatch):
    languages = {0: ("fr", 0.4), 1: ("de", 0.9)}
    monkeypatch.setattr("multimodal.tasks.transcribe.sessions._identify", lambda source, *_: languages[source.channel])
    for order in (1, -1):
        wave = torch.stack([torch.zeros(4 * RATE), sound(4)][::order])
        found = whisper(wave.numpy(), language=None, split_channels=True)
        assert {segment["speaker"] for segment in found["segments"]} == {f"channel {2 if order == 1 else 1}"}
        assert (found["language"], found["language_probability"]) == languages[1 if order == 1 else 0]
        assert [one["language"] for one in found["channels"]][::order] == [None, found["language"]]


def test_an_error_stands_in_its_files_place_and_the_others_go_on(tmp_path, monkeypatch):
    total = timeline.coverage
    monkeypatch.setattr(timeline, "coverage", lambda spans: total(spans if spans[-1].stop != RATE else []))
    (tmp_path / "broken.wav").write_bytes(b"RIFF nothing")
    broken = [tmp_path / "broken.wav", torch.zeros(0), tmp_path / "absent.wav", sound(1)]
    sources = [sound(2), *broken, sound(3), (44100, torch.tensor([0.1, -0.1] * 5))]
    for checkpoint, options in ((whispers()[1], COMMON), (tiny_hybrid(), HYBRID)):
        found = [result for _, result in transcribe_many(sources, checkpoint, batch_size=3, **options)]
        assert [type(result) for result in found] == [dict, *[AudioError] * 4, dict, dict]
        assert "broken.wav" in str(found[1])
        assert found[-1]["duration"] == 4 / RATE
        assert same(found[0], transcribe(sources[0], checkpoint, **options))
        with pytest.raises(AudioError, match=r"absent\.wav"):
            transcribe(tmp_path / "absent.wav", checkpoint, **options)


def test_recordings_are_opened_when_their_turn_comes():
    taken = []

    def sources():
        for seed in range(5):
            taken.append(seed)
            yield sound(1, seed)

    results = transcribe_many(sources(), whispers()[1], batch_size=2, **COMMON)
    assert taken == []
    next(results)
    assert len(taken) < 5
    with pytest.raises(UsageError, match="beams"):  # at the call, before anything is read
        transcribe_many(sources(), whispers()[1], beams=2)


def test_a_short_recording_need_not_wait_for_a_long_one():
    waves = [sound(33), sound(2)]
    for in_order, expected in ((True, [0, 1]), (False, [1, 0])):
        found = transcribe_many(waves, whispers()[1], batch_size=2, in_order=in_order, **COMMON)
        assert [key for key, _ in found] == expected


@pytest.mark.ci
def test_words_snap_to_the_audio():
    wave = torch.cat([torch.zeros(RATE), read_audio(asset("sample", "german.flac"))])
    common = {"vad_filter": False, "word_timestamps": True}
    loose, fitted = (transcribe(wave, "whisper-mini", snap_words_to_audio=on, **common) for on in (False, True))
    assert loose["text"] == fitted["text"]
    first, moved = (result["segments"][0]["words"][0]["start"] for result in (loose, fitted))
    assert first < 0.9
    assert moved == pytest.approx(1.05, abs=0.03)  # the first sound of the recording is at 0.05 s


def test_a_hybrid_models_gates_are_accounted_for():
    sure = transcribe(sound(6), tiny_hybrid(), **HYBRID)
    assert sure["text"]
    gates = {"confidence_threshold": (1.0, "unlikely"), "logprob_threshold": (0.0, "unlikely"),
             "no_speech_threshold": (-1.0, "no_speech")}  # fmt: skip
    for gate, (value, reason) in gates.items():
        gated = transcribe(sound(6), tiny_hybrid(), **{**HYBRID, gate: value})
        assert (gated["text"], gated["skipped"]) == ("", [{"start": 0.0, "end": 6.0, "reason": reason}])


@pytest.mark.parametrize("options", [{"batched": False}, {"batched": True}, {}])
def test_progress_and_segments_are_reported(options):
    seconds, segments = [], []
    checkpoint, options = (whispers()[1], {**COMMON, **options}) if options else (tiny_hybrid(), HYBRID)
    wave = sound(62)
    found = transcribe(wave, checkpoint, batch_size=3, **options,
                       on_progress=lambda key, done, total: seconds.append((key == 0, done, total)),
                       on_segments=lambda key, new: segments.extend(new))  # fmt: skip
    assert [{k: v for k, v in s.items() if k != "id"} for s in found["segments"]] == segments
    assert len(seconds) > 1
    assert seconds == sorted(seconds)
    assert seconds[-1] == (True, 62.0, 62.0)


def test_a_hybrid_transcript_has_whispers_shape():
    wave = torch.cat([sound(18), torch.zeros(9 * RATE)])
    result = transcribe(wave, tiny_hybrid(), word_timestamps=True, decode_log=True, **HYBRID)
    assert result["language"] == "en"
    assert result["text"] == " ".join(segment["text"] for segment in result["segments"])
    assert [segment["id"] for segment in result["segments"]] == list(range(len(result["segments"])))
    assert tiles(result, len(wave)) >= {"silence"}
    assert [segment.keys() for segment in result["segments"]] == [KEYS | {"words"}] * len(result["segments"])
    assert result["segments"][-1]["end"] <= 18.1
    assert {"seek", "start", "end", "avg_logprob", "no_speech_prob", "tokens", "text"} <= result["log"][0].keys()
    for batch_size in (1, 5):
        again = transcribe(wave, tiny_hybrid(), batch_size=batch_size, word_timestamps=True, decode_log=True, **HYBRID)
        assert same(again, result)


def test_tokens_have_log_probabilities():
    plain = {"suppress_tokens": (), "suppress_blank": False, "without_timestamps": True, "sample_len": 6}
    found = whisper(sound(31), token_logprobs=True, beam_size=2, **plain)
    for one in found["segments"]:  # nothing is suppressed, and no window ends by itself
        assert sum(one["token_logprobs"]) / 7 == pytest.approx(one["avg_logprob"], abs=1e-5)
    hybrid = transcribe(sound(8), tiny_hybrid(), word_timestamps=True, token_logprobs=True, **HYBRID)
    (segment, *_) = hybrid["segments"]
    assert len(segment["token_logprobs"]) == len(segment["tokens"])
    mean = sum(map(math.exp, segment["token_logprobs"])) / len(segment["tokens"])
    words = [word["probability"] for word in segment["words"]]
    assert min(words) - 1e-9 <= mean <= max(words) + 1e-9


def test_a_hybrid_models_clips_and_voice():
    clip = transcribe(sound(12), tiny_hybrid(), clip_timestamps="3,9.5", **HYBRID)
    assert clip["segments"]
    assert all(3 <= segment["start"] < segment["end"] <= 9.5 for segment in clip["segments"])
    assert tiles(clip, 12 * RATE) == {"clip"}
    noise = transcribe(torch.randn(RATE * 5) * 0.01, tiny_hybrid(), vad_filter=True)
    assert (noise["text"], noise["transcribed"]) == ("", [])


@pytest.mark.filterwarnings("ignore:<samples>. silent")
def test_silence_gives_no_text():
    for checkpoint, options in ((tiny_hybrid(), HYBRID), (whispers()[1], COMMON), (whispers()[1], {"batched": True})):
        found = transcribe(torch.zeros(RATE * 33), checkpoint, **options)
        assert (found["text"], found["segments"]) == ("", [])
        assert found["skipped"] == [{"start": 0.0, "end": 33.0, "reason": "silence"}]


@pytest.mark.ci
def test_files_give_the_same_as_samples(tmp_path):
    samples = (sound(33) * 20000).round() / 32768
    (tmp_path / "a.wav").write_bytes(wav_bytes(samples[None]))
    for checkpoint, options in ((tiny_hybrid(), HYBRID), (whispers()[1], COMMON)):
        assert transcribe(tmp_path / "a.wav", checkpoint, **options) == transcribe(samples, checkpoint, **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"language": "de"}, "'de'"), ({"task": "translate"}, "translate"), ({"batch_size": 0}, "batch_size"),
    ({"device": "moon"}, "device 'moon'"), ({"initial_prompt": "x"}, "initial_prompt"),
])  # fmt: skip
def test_options_that_a_hybrid_model_lacks_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        transcribe(sound(1), tiny_hybrid(), **options)


def test_a_token_that_the_model_lacks_is_refused():
    with pytest.raises(UsageError, match="suppress_tokens: 99999 is not one of the 51865 tokens"):
        transcribe(sound(1), whispers()[1], suppress_tokens=[-1, 99999])


def test_without_removal_digital_silence_is_decoded_as_in_openai_whisper():
    wave = torch.cat([sound(1), torch.zeros(32 * RATE)])
    reasons = [
        tiles(whisper(wave, remove_repetitions=cut, no_speech_threshold=None), len(wave)) for cut in (True, False)
    ]
    assert reasons == [{"silence"}, set()]


@pytest.mark.parametrize("options", [{"vad_filter": True, "vad_threshold": 0.01}, {"batched": True}])
def test_times_of_speech_do_not_pass_its_end(options):
    """A random model writes times anywhere in its 30 s."""
    wave = sound(33)
    found = whisper(wave, **options)
    starts = [segment["start"] for segment in found["segments"]]
    assert starts == sorted(starts)
    assert starts
    assert all(segment["start"] <= segment["end"] <= 33 for segment in found["segments"])


WIDE = torch.backends.cpu.get_cpu_capability() != "AVX2"  # else oneDNN rounds a row by the number of rows beside it
ROUNDED = pytest.mark.skipif(not WIDE, reason="float32 products without AVX-512 depend on the batch in their last bits")


@pytest.mark.ci
@pytest.mark.parametrize("compute_type", [pytest.param("float32", marks=ROUNDED), "int8"])
def test_results_have_the_same_bits_in_any_batch(compute_type):
    waves = [sound(seconds, seed) for seed, seconds in enumerate((62, 31, 40))]  # so prompts of unlike length meet
    options = {**COMMON, "compute_type": compute_type, "remove_repetitions": False, "without_timestamps": True,
               "beam_size": 2, "no_speech_threshold": None}  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several share sums in another way
    try:
        alone, together = (
            [result for _, result in transcribe_many(waves, whispers()[1], batch_size=size, **options)]
            for size in (1, 3)
        )
    finally:
        torch.set_num_threads(threads)
    assert alone == together
    assert [len(result["segments"]) for result in alone] == [3, 2, 2]


def test_time_tokens_cannot_be_suppressed_where_times_are_written():
    with pytest.raises(UsageError, match="suppress_tokens: 50364 is a time"):
        whisper(sound(1), suppress_tokens=[50364])
    whisper(sound(1), suppress_tokens=[50364], without_timestamps=True)
