"""Faults of clients and machines: each gets a status and one line, the server lives, and no file is left."""

import contextlib
import errno
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image

from multimodal.serve import guard, protocol, uploads
from multimodal.serve.uploads import SMALL, UploadFolder
from multimodal.system.assets import asset
from tests.helpers.spread import spread
from tests.serve.test_endpoints import data_url
from tests.serve.test_limits import AUDIO, refused

SPEECH = asset("sample", "speech.flac").read_bytes()
HEAD = f"POST {AUDIO} HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
PART = '--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'


@pytest.fixture(autouse=True)
def unharmed(served):
    """The server answers, and has kept nothing."""
    yield
    assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200
    deadline = time.monotonic() + 5
    while list(served.state.folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(served.state.folder.iterdir()) == []


@contextlib.contextmanager
def line(served):
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20) as made:
        yield made


def answer(made: socket.socket) -> tuple[int, dict]:
    with http.client.HTTPResponse(made) as found:
        found.begin()
        return found.status, json.loads(found.read())["error"]


def bomb(edge: int) -> bytes:
    made = io.BytesIO()
    Image.new("1", (edge, edge)).save(made, "PNG")
    return made.getvalue()


@pytest.mark.ci
def test_a_full_disk_is_told(client, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(uploads.Path, "open", lambda *_: Full())
    refused(client.post(AUDIO, files={"file": SPEECH * (1 + SMALL // len(SPEECH))}), 507, "disk is full")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sent", "status", "part"),
    [
        (f"{HEAD}content-length: 40\r\n\r\n{PART}" + "a" * 4000, 400, "file: "),  # more than it says
        (f"{HEAD}content-length: -1\r\n\r\n", 400, "no valid HTTP"),
        (f"{HEAD}content-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "no valid HTTP"),
        (f"{HEAD}transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "no valid HTTP"),
        (f"{HEAD}content-length: 99999999999999\r\n\r\n", 413, "larger than"),
        (f"{HEAD}cookie: {'a' * 1_000_000}\r\n\r\n", 431, "headers are too large"),
        (f"{HEAD}cookie: {'a' * 70_000}\r\n\r\n", 431, "headers are too large"),
        (HEAD + "x: abcdefg\r\n" * 9000 + "\r\n", 431, "headers are too large"),
        (f"{HEAD}content-length: 1\r\n\r\na".replace("=x", f"={'x' * 257}"), 400, "form cannot be read (Boundary"),
        (f"{HEAD}content-length: 1\r\n\r\na".replace("; boundary=x", ""), 400, "multipart/form-data has no boundary"),
        ("\0\1\2 nonsense\r\n\r\n", 400, "no valid HTTP"),
    ],
)
def test_requests_that_lie(served, sent, status, part):
    with line(served) as made:
        made.sendall(sent.encode())
        found, error = answer(made)
    assert (found, "\n" in error["message"]) == (status, False), error
    assert part in error["message"]


@pytest.mark.ci
def test_slow_and_silent_senders_are_dropped(served, monkeypatch):
    for module, name, value in ((guard, "PATIENCE", 0.4), (protocol, "HEAD", 0.8)):
        monkeypatch.setattr(module, name, value)
    with line(served) as slow, line(served) as silent, line(served) as half, line(served) as headless:
        for one in (slow, silent):
            one.sendall(f"{HEAD}content-length: 100000\r\n\r\n{PART}".encode())
        half.sendall(HEAD.encode())
        for _ in range(8):
            slow.sendall(b"a")
            time.sleep(0.1)
        assert [answer(one)[0] for one in (slow, silent)] == [408, 408]
        assert half.recv(10) == headless.recv(10) == b""


@pytest.mark.ci
def test_a_thousand_half_open_connections(served, client):
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            made = stack.enter_context(line(served))
            if number % 2:
                made.sendall(b"GET /health HTTP/1.1\r\nhost")
        began = time.monotonic()
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200
        assert time.monotonic() - began < 2


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:text. exceeds")
def test_a_client_that_leaves_stops_its_work(served):
    lane = served.state.models.served["gpt-mini"].lane
    body = json.dumps({"messages": [{"role": "user", "content": "A"}], "max_tokens": 500, "model": "gpt-mini"})
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with line(served) as made:
        made.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        while not lane.open:
            time.sleep(0.001)
    gone = time.monotonic()
    while lane.open and time.monotonic() < gone + 5:
        time.sleep(0.01)
    assert time.monotonic() - gone < 1.5


@pytest.mark.ci
@pytest.mark.parametrize("edge", [7100, 13_000])
def test_images_that_are_bombs(client, edge):
    image = bomb(edge)
    assert len(image) < 3_000_000
    began = time.monotonic()
    labels = {"labels": ["a", "b"]}
    refused(client.post("/v1/classify", files={"images": image}, data=labels), 400, "images[0]", f"{edge}x{edge}")
    refused(client.post("/v1/embeddings", json={"input": {"image": data_url(image)}}), 400, f"{edge}x{edge}")
    content = [{"type": "image_url", "image_url": {"url": data_url(image)}}]
    message = {"messages": [{"role": "user", "content": content}], "model": "any-mini"}
    refused(client.post("/v1/chat/completions", json=message), 400, f"{edge}x{edge}")
    assert time.monotonic() - began < 3


@pytest.mark.ci
def test_ten_megabytes_of_text(client):
    text = "a dog runs. " * 870_000
    refused(client.post("/v1/embeddings", json={"input": text, "model": "sentence-mini"}), 400, "maximum context")
    message = {"messages": [{"role": "user", "content": text}], "model": "any-mini"}
    refused(client.post("/v1/chat/completions", json=message), 400, "messages: 10440000 characters")
    refused(client.post(AUDIO, files={"file": SPEECH}, data={"prompt": text + text}), 413, "more than 10 MB of text")


NAMES = [*(f'="{one}"' for one in ("a\0b", "../../../etc/a", "/etc/passwd", "C:\\a", "%2e%2e%2fa", "")), "*=UTF-8''a"]


@pytest.mark.parametrize("name", spread(NAMES, 7, pytest.mark.slow, pytest.mark.ci))
def test_file_names_say_nothing(client, name):
    field = f'form-data; name="file"; filename{name}'.encode()
    body = b"--x\r\nContent-Disposition: " + field + b"\r\n\r\n" + SPEECH + b"\r\n--x--\r\n"
    made = client.post(AUDIO, content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert made.status_code == 200, made.text


@pytest.mark.ci
def test_folders_of_crashed_servers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(uploads.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "multimodal-serve-crashed").mkdir()
    (tmp_path / "multimodal-serve-crashed" / "upload").write_bytes(b"a")
    (tmp_path / "multimodal-serve-link").symlink_to(tmp_path)
    first, second = UploadFolder(), UploadFolder()
    assert set(tmp_path.iterdir()) == {first.path, second.path, tmp_path / "multimodal-serve-link"}
    first.remove()
    second.remove()


def ready(url: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail("the server is not ready")


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(one) for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_under_load(tmp_path):
    command = [sys.executable, "-m", "multimodal", "serve", "--port", "0", "--models", "gpt-mini", "--workers", "2"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        url = process.stderr.readline().split()[-1]
        ready(url)
        while len(list(tmp_path.glob("multimodal-serve-*"))) < 3:  # one is of the counts of both
            time.sleep(0.1)
        message = {"messages": [{"role": "user", "content": "A man"}], "model": "gpt-mini", "max_tokens": 40}
        ended, faults = threading.Event(), []

        def load(_: int) -> int:
            count = 0
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20, timeout=30) as asked:
                while not ended.is_set():
                    try:
                        assert asked.chat.completions.create(**message).choices[0].message.content
                        count += 1
                    except openai.APIError as error:
                        faults.append(error)
            return count

        with ThreadPoolExecutor(8) as pool:
            counts = [pool.submit(load, n) for n in range(8)]
            time.sleep(2)
            before = children(process.pid)
            os.kill(before[0], signal.SIGKILL)
            deadline = time.monotonic() + 60
            while len(set(children(process.pid)) - {before[0]}) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
            ready(url)
            time.sleep(4)
            ended.set()
            assert all(one.result(60) > 0 for one in counts)
        assert faults == []
        assert before[0] not in children(process.pid)
        assert len(children(process.pid)) == 2
        process.terminate()
        assert process.wait(30) == 0
    assert list(tmp_path.glob("multimodal-serve-*")) == []


@pytest.mark.slow
def test_files_of_a_killed_server_are_gone_after_its_restart(tmp_path):
    command = [sys.executable, "-m", "multimodal", "serve", "--port", "0", "--models", "asr-conformer-en"]
    for _ in range(2):
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            url = process.stderr.readline().split()[-1]
            ready(url)
            (folder,) = tmp_path.glob("multimodal-serve-*")
            assert list(folder.iterdir()) == []
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as made:
                made.sendall(f"{HEAD}content-length: 10000000\r\n\r\n{PART}{'a' * 2 * SMALL}".encode())
                while not list(folder.iterdir()):
                    time.sleep(0.02)
                process.kill()
            process.wait(20)
        assert list(folder.iterdir())
