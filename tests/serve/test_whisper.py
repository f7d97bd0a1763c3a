"""A Whisper model behind the server: its own fields, and live sound."""

import base64
import json

import httpx
import pytest
from websockets.sync.client import connect

from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.weights.folder import save_folder
from tests.helpers.tiny_whisper import THEIR_WARNINGS, sound, whispers
from tests.serve.conftest import recorded

pytestmark = THEIR_WARNINGS


@pytest.fixture(scope="module")
def whisper(serve, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    save_folder(whispers()[1], folder / "tiny")
    return serve(models=(str(folder / "tiny"),), alias=(f"whisper-1={folder / 'tiny'}",))


def test_whisper_is_transcribed_translated_and_scored(whisper):
    recording = recorded(sound(4))
    ask = lambda path, **fields: httpx.post(
        f"{whisper.url}/v1/audio/{path}", files={"file": recording}, timeout=60,
        data={"model": "whisper-1", "response_format": "verbose_json", "temperature": "0.2"} | fields,
    ).json()  # fmt: skip
    found = ask("transcriptions", language="de", prompt="Grüße", **{"include[]": "logprobs"})
    options = {"language": "de", "initial_prompt": "Grüße", "temperature": 0.2, "token_logprobs": True}
    expected = transcribe(recording, whispers()[1], **options)
    assert (found["language"], found["text"]) == ("german", expected["text"].strip())
    assert [one["tokens"] for one in found["segments"]] == [one["tokens"] for one in expected["segments"]]
    text = "".join(one["token"] for one in found["logprobs"])
    assert text.strip() == found["text"]
    translated = ask("translations", language="de")
    assert (translated["task"], translated["language"]) == ("translate", "english")


@pytest.mark.ci
def test_joined_deltas_are_the_text(whisper):
    recording = recorded(sound(32))
    form = {"files": {"file": recording}, "data": {"stream": "true", "language": "en", "temperature": "0.2"}}
    answer = httpx.post(f"{whisper.url}/v1/audio/transcriptions", timeout=60, **form).text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: {")]
    segments = transcribe(recording, whispers()[1], language="en", temperature=0.2)["segments"]
    assert any(not one["text"].startswith(" ") for one in segments[1:])
    assert "".join(one["delta"] for one in events[:-1]) == events[-1]["text"]


@pytest.mark.ci
def test_whisper_hears_live_sound(whisper):
    data = (sound(2, 1) * 32767).short().numpy().tobytes()
    with connect(f"{whisper.url.replace('http', 'ws')}/v1/realtime", open_timeout=30) as own:
        ask = lambda event: own.send(json.dumps(event))
        audio = {"format": {"rate": 16_000}, "transcription": {"model": "whisper-1", "language": "fr"},
                 "turn_detection": {"threshold": 0.0}}  # fmt: skip
        ask({"type": "session.update", "session": {"audio": {"input": audio}}})
        ask({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})
        ask({"type": "input_audio_buffer.commit"})
        events = [json.loads(own.recv(60))]
        while not events[-1]["type"].endswith("completed"):
            events.append(json.loads(own.recv(60)))
    kinds = [one["type"].rpartition(".")[2] for one in events]
    assert kinds[:2] + kinds[-1:] == ["created", "updated", "completed"]
    assert {"committed", "delta"} <= set(kinds)
    assert events[-1]["transcript"]
