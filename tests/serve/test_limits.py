"""Bad requests get a status and one line; nothing is left of them."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from multimodal.serve.jobs.lane import Work, one_request
from multimodal.serve.uploads import SMALL
from multimodal.system.assets import asset
from tests.helpers.commands import run
from tests.helpers.data.audio_files import first_words
from tests.helpers.spread import thin
from tests.serve.conftest import MODELS
from tests.serve.test_endpoints import data_url, png

SPEECH = asset("sample", "speech.flac")
JSON = {"content-type": "application/json"}
AUDIO = "/v1/audio/transcriptions"


def refused(answer: httpx.Response, status: int, *parts: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for part in parts:
        assert part in error["message"]
    assert "\n" not in error["message"]
    assert "/assets" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"temperature": "x"}, ["temperature: expected a number (got 'x')"]),
        ({"temperature": "7"}, ["temperature: must be in 0 to 1 (got 7)"]),
        ({"response_format": "xml"}, ["response_format: must be one of json", "'xml'"]),
        ({"language": "klingon"}, ["klingon"]),
        ({"timestamp_granularities[]": "letter"}, ["timestamp_granularities: must be word or segment"]),
        ({"timestamp_granularities[]": "word"}, ["need response_format verbose_json (got json)"]),
        ({"stream": "perhaps"}, ["stream: must be true or false"]),
        ({"colour": "red"}, ["colour: unknown field"]),
        ({"stream": "true", "response_format": "srt"}, ["events are json, text or verbose_json (got srt)"]),
        ({"chunking_strategy": "bogus"}, ["chunking_strategy: must be auto (got 'bogus')"]),
        ({"chunking_strategy[type]": "server_vad"}, ["chunking_strategy: must be auto (got 'server_vad')"]),
        ({"include[]": "words"}, ["include: must be logprobs"]),
        ({"include[]": "logprobs", "response_format": "srt"}, ["need response_format json"]),
        ({"prompt": "names"}, ["prompt is for Whisper models", "(got 'names')"]),
    ],
)
def test_fields_are_checked(client, fields, parts):
    refused(client.post(AUDIO, files={"file": SPEECH.read_bytes()}, data=fields), 400, *parts)


@pytest.mark.ci
def test_fields_in_the_address_are_refused(client):
    answer = client.post(f"{AUDIO}?response_format=srt", files={"file": SPEECH.read_bytes()})
    refused(answer, 400, "response_format: must be a field of the form")
    answer = client.post(f"{AUDIO}?api-version=2024-06-01", files={"file": first_words()})
    assert answer.status_code == 200, answer.text


def test_uploads_are_judged_by_content(client):
    zipped = b"PK\x03\x04" + bytes(2000)
    refused(client.post(AUDIO, files={"file": ("talk.wav", zipped)}), 400, "file: ")
    refused(client.post(AUDIO, files={"file": ("../../etc/passwd", b"")}), 400, "file: ")
    refused(client.post(AUDIO, files={"file": zipped}, data={"stream": "true"}), 400, "file: ")
    refused(client.post(AUDIO, data={"model": "x"}), 415, "expected multipart/form-data")
    refused(client.post(AUDIO, files={"other": b"x"}), 400, "other: unknown field")
    form = {"content-type": "multipart/form-data; boundary=x"}
    refused(client.post(AUDIO, content=b"--y\r\nnonsense", headers=form), 400, "form cannot be read")
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    refused(client.post("/v1/classify", files={"images": svg}, data={"labels": ["a", "b"]}), 400, "images[0]: ")


def test_models_and_paths_that_are_not_there(client):
    refused(client.post(AUDIO, files={"file": SPEECH.read_bytes()}, data={"model": "whisper-1"}), 404,
            "'whisper-1': not served", *MODELS)  # fmt: skip
    refused(client.post("/v1/embeddings", json={"input": "a", "model": "gpt-mini"}), 404, "cannot embed")
    refused(client.get("/v1/nothing"), 404, "not found")
    refused(client.get("/v1/models/whisper-1"), 404, "'whisper-1': not served", *MODELS)
    refused(client.get(AUDIO), 405, "method not allowed")
    refused(client.get("/page/../../../etc/passwd"), 404)
    refused(client.post("/v1/search", json={"text": "a"}), 404, "no index")


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize(
    ("path", "body", "parts"),
    [
        ("embeddings", "{", ["body: is not valid JSON (expecting property name", "at character 1)"]),
        ("embeddings", '{"input": null}', ["input: input should be a valid string (got None)"]),
        ("embeddings", '{"input": []}', ["input: expected 1 to 2048 (got 0)"]),
        ("embeddings", '{"input": ["a", {"image": "data:image/png;base64,AAAA"}]}', ["not both at once"]),
        ("embeddings", '{"input": {"image": "http://127.0.0.1/a.png"}}', ["expected a data URL"]),
        ("embeddings", '{"input": {"image": "/etc/passwd"}}', ["expected a data URL"]),
        ("embeddings", '{"input": {"image": "data:image/png;base64,AAAA"}}', ["input[0]: 3 bytes: not a"]),
        ("embeddings", '{"input": ["a", " "]}', ["input[1]: is empty"]),
        ("embeddings", '{"input": "a", "dimensions": 7000}', ["dimensions: sentence-mini has 192"]),
        ("embeddings", '{"input": "a", "dimensions": 0}', ["dimensions"]),
        ("embeddings", '{"input": ["a", [123456789]]}', ["input[1]: token id 123456789"]),
        ("embeddings", '{"input": [5, 6, 7], "model": "sentence-mini"}', ["input[0]: expected token ids as"]),
        ("embeddings", json.dumps({"input": ["a", "a dog " * 200], "model": "sentence-mini"}),
         ["input[1]: has 402 tokens, this model's maximum context length is 128"]),
        ("embeddings", json.dumps({"input": "a dog " * 200, "model": "clip-vit-16"}), ["maximum context length is"]),
        ("embeddings", '{"input": {"image": "data:image/png;base64,"}}', ["input[0]: is empty"]),
        ("chat/completions", '{"messages": []}', ["messages"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "stream_options": {}}',
         ["stream_options: needs stream true"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "seed": 9223372036854775808}', ["seed"]),
        ("chat/completions", '{"messages": [{"role": "tool", "content": "a"}]}', ["role", "'tool'"]),
        ("chat/completions", '{"messages": [{"role": ["user"], "content": "a"}]}', ["role", "['user']"]),
        ("chat/completions", '{"messages": [{"role": "assistant", "content": "a", "name": null, "tool_calls": [{}]}]}',
         ["messages[0].tool_calls: is not offered"]),
        ("chat/completions", '{"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]}',
         ["messages[0].reasoning_content: is not offered"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "stop": "\\ud800"}',
         ["stop must be strings of UTF-8"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 10000000000}',
         ["max_tokens: input should be less than"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": '
         '{"url": "file:///etc/passwd"}}]}]}', ["expected a data URL"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": [{"type": "image", "path": "/etc/passwd"}]}]}',
         ["expected one of text"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "temperature": "x"}', ["temperature"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}',
         ["top_logprobs: needs logprobs"]),
        ("chat/completions", '{"model": "any-mini", "messages": [{"role": "user", "content": [{"type": "text", "text": '
         '"a"}, {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}]}',
         ["messages[0].content[1]: 3 bytes: not a readable image"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "n": 2, "temperature": 0}',
         ["n: 2 answers at temperature 0"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"123456789": 1}}',
         ["123456789 is not among"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"1": 101}}',
         ["logit_bias"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"x": 1}}',
         ["logit_bias.x: input should be a valid integer"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "response_format": '
         '{"type": "json_object"}}', ["response_format: must be text", "'json_object'"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "max_tokens": ' + "9" * 5000 + "}",
         ["body: cannot be read (Exceeds the limit (4300 digits)"]),
        ("chat/completions", '{"messages": ' + "[" * 100_000, ["body: cannot be read (maximum recursion depth"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a", "\\ud800": 1}]}',
         [r"messages[0].\ud800: is not"]),
        ("translate", '{"input": "a", "source": "en", "target": "xx"}', ["xx"]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}',
         ["tools: is not offered (got ["]),
        ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, '
         '"max_completion_tokens": 9}', ["max_tokens: expected max_completion_tokens, 9 (got 5)"]),
        ("translate", json.dumps({"input": ["a", "a dog runs. " * 90], "source": "en", "target": "de"}),
         ["input[1]: 'a dog runs.", "tokens, the model's context leaves"]),
        ("translate", json.dumps({"input": ["a"] * 2049}), ["input: expected 1 to 2048 texts (got 2049)"]),
        ("classify", "{", ["body: is not valid JSON (", "line 1 column 1)"]),
        ("classify", json.dumps({"images": [data_url(png()), "data:image/png;base64,AAAA"], "labels": ["a"]}),
         ["images[1]: 3 bytes: not a readable image"]),
        ("classify", json.dumps({"images": [data_url(png())]}), ["labels are needed, as model clip-vit-16 has none"]),
        ("classify", json.dumps({"images": [data_url(png())], "labels": ["a", "a very long thing " * 20]}),
         ["labels[1]: 'a", "tokens, this model's maximum context length is 32"]),
    ],
)  # fmt: skip
def test_bodies_are_checked(client, path, body, parts):
    refused(client.post(f"/v1/{path}", content=body, headers=JSON), 400, *parts)


def test_json_is_named_so(client):
    form = {"content-type": "application/x-www-form-urlencoded"}  # curl's -d
    for path in ("embeddings", "chat/completions", "translate"):
        refused(client.post(f"/v1/{path}", content="{}", headers=form), 415, "expected content-type application/json")


@pytest.mark.ci
def test_json_is_smaller_than_uploads(client, served):
    many = b'{"input": [' + b"{}," * 600_000 + b"{}]}"
    refused(client.post("/v1/embeddings", content=many, headers=JSON), 413, "the body has more than 1000000 values")
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
        head = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        raw.sendall(f"{head}content-length: 128000001\r\n\r\n".encode())
        assert b"413" in raw.recv(100)
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
        raw.sendall(f"{head}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(1000), b""))
    assert b" 400 " in answer
    assert b"expected content-length or transfer-encoding" in answer


@pytest.mark.parametrize(
    ("fields", "files", "part"),
    [
        ({"top": ["1", "2"]}, ["images"], "top: expected one value, got 2"),
        ({"model": ["clip-vit-16", "x"]}, ["images"], "model: expected one value, got 2"),
        ({"colour": "red"}, ["images"], "colour: extra inputs are not permitted"),
        ({}, ["images", "mask"], "mask: expected no file"),
        ({"images": "data:image/png;base64,AAAA"}, ["images"], "images: expected files in a form"),
        ({"templates": "clip81"}, ["images"], "(one of none, clip80, clip7, or prompts with {})"),
    ],
)
def test_a_form_drops_nothing(client, fields, files, part):
    sent = [(name, png()) for name in files]
    refused(client.post("/v1/classify", files=sent, data={"labels": ["a", "b"]} | fields), 400, part)


def test_a_server_without_keys_answers_its_own_pages_alone(serve):
    served = serve(models=("sentence-mini",), cors=("https://a.example",))
    own = served.url.removeprefix("http://")
    ask = lambda **headers: httpx.get(f"{served.url}/v1/models", headers=headers)
    for headers in ({}, {"origin": f"http://{own}"}, {"origin": "https://a.example"}, {"host": "[::1]:8000"},
                    {"host": "LOCALHOST"}, {"host": "a.example", "origin": "https://a.example"}):  # fmt: skip
        assert ask(**headers).status_code == 200, headers
    for host in ("b.example", f"b.example:{own.partition(':')[2]}", "127.0.0.1.b.example"):
        refused(ask(host=host, origin=f"http://{host}"), 403, "host: without API keys expected localhost (got")
    for origin in ("https://b.example", "null", "http://127.0.0.1:1"):
        refused(ask(origin=origin), 403, "origin: without API keys expected this server's own page (got")
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://{own}/v1/audio/stream", origin="https://b.example")


def test_keys_sizes_and_queues(serve):
    served = serve(models=("sentence-mini",), api_key=("first", "second"), max_upload_mb=0.1, queue=1,
                   cors=("https://a.example",))  # fmt: skip
    origin = {"origin": "https://a.example"}
    asked = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    before = httpx.options(f"{served.url}/v1/embeddings", headers=asked)  # a browser's, without the key
    assert (before.status_code, before.headers["access-control-allow-headers"]) == (200, "authorization")
    allowed = lambda answer: answer.headers.get("access-control-allow-origin")
    assert allowed(before) == allowed(httpx.post(f"{served.url}/v1/embeddings", headers=origin)) == origin["origin"]
    assert allowed(httpx.get(f"{served.url}/health", headers={"origin": "https://b.example"})) is None
    ask = lambda **more: httpx.post(f"{served.url}/v1/embeddings", json={"input": "a"}, timeout=30, **more)
    refused(ask(), 401, "no valid key")
    refused(ask(headers={"authorization": "Bearer third"}), 401)
    assert httpx.get(f"{served.url}/health").status_code == 200
    refused(httpx.get(f"{served.url}/metrics"), 401)
    own = {"authorization": "Bearer second"}
    assert ask(headers=own).status_code == 200
    large = json.dumps({"input": "a" * 200_000})
    refused(httpx.post(f"{served.url}/v1/embeddings", content=large, headers=own | JSON), 413, "larger than 0.1 MB")
    parts = iter([large.encode()] * 2)  # chunked: its length is not told
    refused(httpx.post(f"{served.url}/v1/embeddings", content=parts, headers=own | JSON), 413, "larger than 0.1 MB")
    gate, lane = threading.Event(), served.state.models.served["sentence-mini"].lane
    waiting = lane.submit(one_request(Work("other", None, lambda _: [gate.wait(30)])))
    busy = ask(headers=own)
    gate.set()
    assert waiting.result(5)
    refused(busy, 429, "wait already")
    assert int(busy.headers["retry-after"]) >= 1
    assert ask(headers=own).status_code == 200


def test_a_full_queue_refuses_a_stream_by_its_status(serve):
    served = serve(models=("gpt-mini",), queue=1)
    gate, lane = threading.Event(), served.state.models.served["gpt-mini"].lane
    waiting = lane.submit(one_request(Work("other", None, lambda _: [gate.wait(30)])))
    body = {"messages": [{"role": "user", "content": "A man"}], "stream": True}
    busy = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=30)
    gate.set()
    assert waiting.result(5)
    refused(busy, 429, "wait already")
    assert int(busy.headers["retry-after"]) >= 1


def test_no_file_stays_and_a_client_that_leaves_ends_its_work(served, client):
    folder = served.state.folder
    assert list(folder.iterdir()) == []
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
        head = f"POST {AUDIO} HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
        raw.sendall(f"{head}content-length: 10000000\r\n\r\n".encode())
        raw.sendall(b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(SMALL + 5000))
        time.sleep(0.2)
        assert list(folder.iterdir())
    deadline = time.monotonic() + 5
    while list(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(folder.iterdir()) == []
    lane = served.state.models.served["gpt-mini"].lane
    body = {"messages": [{"role": "user", "content": "A man"}], "max_tokens": 400, "stream": True, "model": "gpt-mini"}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 5
    while lane.open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lane.open


@pytest.mark.ci
def test_sigterm_finishes_what_runs_and_ends_with_0():
    command = [sys.executable, "-m", "multimodal", "serve", "--port", "0", "--models", "gpt-mini"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        url = process.stderr.readline().split()[-1]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        body = {"messages": [{"role": "user", "content": "A man"}], "max_tokens": 120, "stream": True}

        def answer(_: int) -> str:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as made:
                lines = made.iter_lines()
                next(lines)
                begun.release()
                return [line for line in lines if line][-1]

        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(4) as pool:
            ends = [pool.submit(answer, n) for n in range(4)]
            assert all(begun.acquire(timeout=30) for _ in ends)
            process.terminate()
            while httpx.get(f"{url}/health").json()["status"] == "ready":
                time.sleep(0.01)
            refused(httpx.post(f"{url}/v1/chat/completions", json=body), 503, "stopping")
            assert [one.result() for one in ends] == ["data: [DONE]"] * 4
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_flags_are_checked(capsys):
    for flags, told in ((["--host", "0.0.0.0"], "--host 0.0.0.0: an API key is needed"),
                        (["--alias", "whisper-1=whisper-tiny"], "--alias"),
                        (["--port", "0", "--index", "a=/nowhere"], "/nowhere")):  # fmt: skip
        code, _, err = run(capsys, "serve", *flags)
        assert (code > 0, told in err.splitlines()[-1], "serving at" in err) == (True, True, False)
