"""Live sound over sockets."""

import base64
import contextlib
import json
import time
from pathlib import Path

import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import multimodal
from multimodal.errors import AudioError
from multimodal.serve.jobs.lane import Lane
from multimodal.serve.jobs.live import LiveRecording
from multimodal.serve.routes import live
from multimodal.system.assets import asset
from multimodal.tasks.transcribe.options import LiveOptions
from multimodal.tokens.audio.reading import read_audio
from tests.helpers.data.audio_files import first_words
from tests.helpers.spread import thin
from tests.serve.conftest import recorded

SPEECH = asset("sample", "speech.flac")


def samples(rate: int = 16_000, recording: Path | None = None) -> bytes:
    wave = read_audio(recording or first_words())
    if rate != 16_000:
        import torchaudio

        wave = torchaudio.functional.resample(wave, 16_000, rate)
    return (wave.clamp(-1, 1) * 32767).short().numpy().tobytes()


def socket(served, path: str):
    return connect(f"{served.url.replace('http', 'ws')}{path}", open_timeout=30, close_timeout=10)


def words(text: str) -> set[str]:
    return set(text.lower().split())


@pytest.fixture(scope="module")
def expected() -> str:
    return multimodal.transcribe(first_words(), "asr-conformer-en", compute_type="float32")["text"]


def test_plain_samples_give_partials_finals_and_a_summary(served, expected):
    with socket(served, "/v1/audio/stream?rate=16000") as own:
        data = samples()
        for first in range(0, len(data), 6400):
            own.send(data[first : first + 6400])
        own.send("end")
        events = [json.loads(message) for message in own]
    assert events[-1]["type"] == "summary"
    finals = [one for one in events if one["type"] == "final"]
    assert any(one["type"] == "partial" for one in events)
    said = " ".join(one["text"] for one in finals)
    assert len(words(said) & words(expected)) >= 0.7 * len(words(expected))
    assert all(0 <= one["start"] <= one["end"] for one in finals)


@pytest.mark.ci
def test_openais_realtime_events(served, expected):
    with socket(served, "/v1/realtime?intent=transcription") as own:
        ask = lambda event: own.send(json.dumps(event))
        created = json.loads(own.recv(30))
        assert created["type"] == "session.created"
        card = multimodal.load("asr-conformer-en").card["transcribe"]
        told = created["session"]["audio"]["input"]["turn_detection"]["threshold"]
        assert told == card["vad_threshold"] == 0.35
        update = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000},
                                      "transcription": {"model": "asr-conformer-en"}}}}  # fmt: skip
        ask({"type": "session.update", "session": update})
        assert json.loads(own.recv(30))["type"] == "session.updated"
        ask({"type": "nonsense", "event_id": "half \ud800"})
        error = json.loads(own.recv(30))["error"]
        assert (error["param"], error["event_id"]) == ("type", "half \ud800")
        data = samples(24_000)
        for first in range(0, len(data), 48_000):
            audio = base64.b64encode(data[first : first + 48_000]).decode()
            ask({"type": "input_audio_buffer.append", "audio": audio})
        ask({"type": "input_audio_buffer.commit"})
        deltas: dict[str, str] = {}
        said = []
        while len(words(" ".join(said)) & words(expected)) < 0.7 * len(words(expected)):
            event = json.loads(own.recv(60))
            if event["type"].endswith("delta"):
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
            elif event["type"].endswith("completed"):
                said.append(event["transcript"])
                assert deltas[event["item_id"]] == event["transcript"]
            else:
                assert event["type"] == "input_audio_buffer.committed"


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/v1/audio/stream?model=clip-vit-16", "cannot transcribe"),
        ("/v1/audio/stream?rate=7", "rate must be"),
        ("/v1/audio/stream?rate=" + "9" * 5000, "rate must be"),
        ("/v1/audio/stream?sample_rate=8000", "sample_rate: unknown option (known: model, rate, language)"),
        ("/v1/realtime?intent=conversation", "offers transcription"),
        ("/v1/realtime?model=whisper-9", "not served"),
    ],
)
def test_what_cannot_be_heard_is_said(served, path, part):
    with socket(served, path) as own:
        told = json.loads(own.recv(30))
        assert told["type"] == "error"
        assert part in told["error"]["message"]
        with pytest.raises(ConnectionClosed):
            own.recv(10)
    assert served.state.live == 0


@pytest.mark.parametrize("data", [b"\x1aE\xdf\xa3" + bytes(9999), recorded(torch.zeros(8000), 8000)])
def test_recordings_are_refused_in_place_of_samples(served, data):
    for path in ("/v1/audio/stream", "/v1/realtime"):
        with socket(served, path) as own:
            if path == "/v1/realtime":
                own.recv(30)
                own.send(json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()}))
                own.send(json.dumps({"type": "input_audio_buffer.commit"}))
            else:
                own.send(data)
            told = json.loads(own.recv(30))
            assert (told["type"], "stream: expected" in told["error"]["message"]) == ("error", True), told
            with pytest.raises(ConnectionClosed):
                own.recv(10)


@pytest.mark.ci
def test_one_live_recording_more_than_streams_is_refused(serve):
    own = serve(models=("asr-conformer-en",), streams=1)
    with socket(own, "/v1/audio/stream"):
        for path in ("/v1/audio/stream", "/v1/realtime"):
            with socket(own, path) as second:
                assert json.loads(second.recv(30))["error"]["code"] == "queue_full"
                with pytest.raises(ConnectionClosed) as closed:
                    second.recv(10)
                assert closed.value.rcvd.code == 1008


@pytest.mark.ci
def test_sockets_that_stay_silent_are_closed(served, monkeypatch):
    monkeypatch.setattr(live, "IDLE", 0.3)
    for path in ("/v1/audio/stream", "/v1/realtime"):
        with socket(served, path) as own:
            while (told := json.loads(own.recv(10)))["type"] == "session.created":
                pass
            assert "nothing came for 0.3 seconds" in told["error"]["message"]
            with pytest.raises(ConnectionClosed):
                own.recv(10)
    assert served.state.live == 0


@pytest.mark.parametrize(("rate", "seconds"), [(16_000, 60), (3_072_000, 2.73)])
def test_sound_that_waits_is_bounded_with_its_last_message(rate, seconds):
    recording = LiveRecording(multimodal.load("asr-conformer-en"), (lane := Lane("live")), LiveOptions(rate=rate),
                              lambda _: None)  # fmt: skip
    with pytest.raises(AudioError, match=f"more than {seconds} seconds"):
        recording.push(bytes(min(2 * 61 * rate, (16 << 20) + 2)))
    recording.drop()
    lane.stop()


def test_a_dropped_recording_gives_nothing_more():
    lane, given = Lane("live"), []
    recording = LiveRecording(multimodal.load("asr-conformer-en"), lane, LiveOptions(), given.append)
    recording.push(samples())
    while not given:
        time.sleep(0.01)
    recording.drop()
    before = len(given)
    while recording.thread.is_alive():
        time.sleep(0.01)
    lane.stop()
    assert len(given) <= before + 1  # one may have been on its way


def test_messages_that_are_no_samples_are_refused(served):
    with socket(served, "/v1/audio/stream") as own:
        own.send("hello")
        assert "expected samples" in json.loads(own.recv(30))["error"]["message"]


@contextlib.contextmanager
def session(served):
    """A realtime session: a function that sends an event, and one that gives the next answer."""
    with socket(served, "/v1/realtime?intent=transcription") as own:
        take = lambda: json.loads(own.recv(60))
        assert take()["type"] == "session.created"
        yield lambda kind, **fields: own.send(json.dumps({"type": kind} | fields)), take


def append(ask, data: bytes) -> None:
    ask("input_audio_buffer.append", audio=base64.b64encode(data).decode())


@thin(4, pytest.mark.ci)
@thin(2, pytest.mark.slow)
@pytest.mark.parametrize(
    ("settings", "key", "got"),
    [
        ("str", "session", "'str'"),
        ([1], "session", "[1]"),
        ({"audio": "x"}, "session.audio", "'x'"),
        ({"audio": {"input": [1]}}, "session.audio.input", "[1]"),
        ({"audio": {"input": {"format": "pcm16"}}}, "session.audio.input.format", "'pcm16'"),
        ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "session.audio.input.format.type", "'audio/pcmu'"),
        ({"audio": {"input": {"format": {"rate": 7}}}}, "session.audio.input.format.rate", "7"),
        ({"input_audio_format": "g711_ulaw"}, "session.input_audio_format", "'g711_ulaw'"),
        ({"turn_detection": "server_vad"}, "session.turn_detection", "'server_vad'"),
        ({"turn_detection": {"type": "semantic_vad"}}, "session.turn_detection.type", "'semantic_vad'"),
        (
            {"audio": {"input": {"noise_reduction": {"type": "near_field"}}}},
            "session.audio.input.noise_reduction",
            "'near_field'",
        ),
        ({"input_audio_noise_reduction": {"type": "far_field"}}, "session.input_audio_noise_reduction", "'far_field'"),
        ({"input_audio_noise_reduction": {}}, "session.input_audio_noise_reduction", "should be null"),
        ({"include": ["item.input_audio_transcription.logprobs"]}, "session.include", "'item.input_audio"),
        ({"turn_detection": {"silence_duration_ms": "500"}}, "session.turn_detection.silence_duration_ms", "'500'"),
        ({"input_audio_transcription": {"model": 5}}, "session.input_audio_transcription.model", "5"),
        ({"input_audio_transcription": {"model": ["a"]}}, "session.input_audio_transcription.model", "['a']"),
        ({"input_audio_transcription": {"model": "whisper-9"}}, "session.input_audio_transcription.model", "whisper-9"),
        ({"input_audio_transcription": {"prompt": "names"}}, "session.input_audio_transcription.prompt", "'names'"),
        (
            {"audio": {"input": {"transcription": {"language": "de"}}}},
            "session.audio.input.transcription.language",
            "'de'",
        ),
        ({"turn_detection": {"threshold": 2}}, "session.turn_detection.threshold", "2"),
        (
            {"audio": {"input": {"turn_detection": {"prefix_padding_ms": -1}}}},
            "session.audio.input.turn_detection.prefix_padding_ms",
            "-1",
        ),
        ({"turn_detection": {"create_response": 1}}, "session.turn_detection.create_response", "1"),
        ({"turn_detection": {"idle_timeout_ms": 6000}}, "session.turn_detection.idle_timeout_ms", "6000"),
        ({"turn_detection": {"eagerness": "low"}}, "session.turn_detection.eagerness", "'low'"),
        ({"modalities": ["text", "audio"]}, "session.modalities.1", "'audio'"),
        ({"type": "realtime"}, "session.type", "'realtime'"),
        ({"instructions": "be brief"}, "session.instructions", "'be brief'"),
    ],
)
def test_refused_settings_are_named(served, settings, key, got):
    with session(served) as (ask, take):
        ask("session.update", session=settings, event_id="event-7")
        error = take()["error"]
        assert (error["param"], got in error["message"], error["event_id"]) == (key, True, "event-7"), error
        ask("transcription_session.update", session={"input_audio_format": "pcm16", "include": []})
        assert take()["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}


def test_a_session_is_told_as_it_is(served):
    turns = {"type": "server_vad", "threshold": 0.25, "prefix_padding_ms": 300, "silence_duration_ms": 700}
    spoken = {"model": "asr-conformer-en", "language": "en", "prompt": None}
    told = {"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": spoken, "turn_detection": turns}
    with session(served) as (ask, take):
        ask("session.update", session={"type": "transcription", "audio": {"input": told}})
        given = take()["session"]
        assert given["audio"]["input"] == told
        ask("session.update", session=given | {"audio": {"input": {"turn_detection": {"silence_duration_ms": 900}}}})
        assert take()["session"]["audio"]["input"] == told | {"turn_detection": turns | {"silence_duration_ms": 900}}


@pytest.mark.parametrize("type", ["session.update", "transcription_session.update"])
def test_settings_without_effect_are_taken(served, type):
    """As OpenAI's clients send them with others; nulls are left out, so a language stays."""
    unused = {"idle_timeout_ms": None, "create_response": True, "interrupt_response": False, "eagerness": "auto"}
    echoed = {"id": "sess_1", "object": "realtime.transcription_session", "expires_at": 0, "client_secret": None,
              "type": None, "modalities": ["text"], "instructions": None, "include": None}  # fmt: skip
    spoken = {"model": None, "language": None, "prompt": None}
    nulls = {"format": {"type": None, "rate": None}, "transcription": spoken, "noise_reduction": None}
    turns = {"type": "server_vad", "threshold": None, "silence_duration_ms": 900}
    with session(served) as (ask, take):
        ask(type, session={"input_audio_transcription": {"language": "en"}, "audio": None})
        assert take()["session"]["audio"]["input"]["transcription"]["language"] == "en"
        given = {"audio": {"input": nulls, "output": None}, "input_audio_transcription": None}
        ask(type, session=echoed | given | {"turn_detection": turns | unused})
        own = take()["session"]["audio"]["input"]
    assert own["transcription"] == {"model": "asr-conformer-en", "language": "en", "prompt": None}
    assert (own["turn_detection"]["silence_duration_ms"], own["format"]["rate"]) == (900, 24_000)


@pytest.mark.ci
def test_refused_settings_change_nothing(served, expected):
    with session(served) as (ask, take):
        wrong = {"format": {"rate": 8000}, "transcription": {"model": "whisper-9"}}
        ask("session.update", session={"audio": {"input": wrong}})
        assert take()["error"]["code"] == "model_not_found"
        append(ask, samples(24_000))
        ask("input_audio_buffer.commit")
        said = ""
        while len(words(said) & words(expected)) < 0.7 * len(words(expected)):
            event = take()
            assert event["type"] != "error", event
            said += f" {event['transcript']}" if event["type"].endswith("completed") else ""


def test_each_commit_is_answered(served):
    with session(served) as (ask, take):
        items = []
        for _ in range(2):
            ask("input_audio_buffer.commit")
            assert take()["error"]["code"] == "input_audio_buffer_commit_empty"
            append(ask, bytes(48_000))
            ask("input_audio_buffer.commit")
            committed, completed = take(), take()
            assert committed["type"] == "input_audio_buffer.committed"
            assert committed["previous_item_id"] == (items[-1] if items else None)
            assert completed["type"] == "conversation.item.input_audio_transcription.completed"
            assert (completed["item_id"], completed["transcript"]) == (committed["item_id"], "")
            items.append(completed["item_id"])
        assert items[0] != items[1]
        append(ask, bytes(4800))
        ask("input_audio_buffer.clear")
        assert take()["type"] == "input_audio_buffer.cleared"
        ask("input_audio_buffer.commit")
        assert take()["error"]["code"] == "input_audio_buffer_commit_empty"


@pytest.mark.ci
def test_without_turn_detection_a_commit_is_an_item(served):
    """Its sound may end inside a sample, whose rest comes after the commit."""
    data, cut = samples(24_000, SPEECH), 6 * 48_000 + 1
    whole = LiveRecording(multimodal.load("asr-conformer-en"), (lane := Lane("live")), LiveOptions(rate=24_000),
                          (given := []).append)  # fmt: skip
    for part in (data[: cut - 1], data[cut - 1 :]):
        whole.push(part)
        whole.commit()
    whole.close()
    whole.thread.join(60)
    lane.stop()
    ends = [place for place, one in enumerate(given) if one is None]
    parts = given[: ends[0]], given[ends[0] + 1 : ends[1]]
    expected = [" ".join(one.text for one in part if one.kind == "final") for part in parts]
    assert sum(one is not None and one.kind == "final" for one in given) > 2  # pauses within the items
    with session(served) as (ask, take):
        ask("session.update", session={"audio": {"input": {"turn_detection": None}}})
        assert take()["session"]["audio"]["input"]["turn_detection"] is None
        found = []
        for part in (data[:cut], data[cut:]):
            append(ask, part)
            ask("input_audio_buffer.commit")
            committed, delta, completed = take(), take(), take()
            assert committed["type"] == "input_audio_buffer.committed"
            assert committed["item_id"] == delta["item_id"] == completed["item_id"]
            assert delta["delta"] == completed["transcript"]
            found.append(completed["transcript"])
    assert found == expected


def test_messages_that_are_no_json_are_refused(served):
    with socket(served, "/v1/realtime") as own:
        own.recv(30)
        for text in ("[" * 100_000, "9" * 5000, "{", "[1]", b"\0\0"):
            own.send(text)
            assert "expected a JSON object" in json.loads(own.recv(30))["error"]["message"]
