"""URLs of clients: read from named hosts alone, into files that end with the request."""

import http.server
import threading

import httpx
import openai
import pytest

import multimodal
from multimodal.errors import UsageError
from multimodal.serve.options import ServeOptions
from tests.helpers.data.audio_files import first_words
from tests.serve.test_endpoints import png
from tests.serve.test_limits import refused


class Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        other = f"http://localhost:{self.server.server_port}/a.png"
        if moved := {"/moved": "/a.png", "/away": "http://example.org/a.png", "/inside": other}.get(self.path):
            self.send_response(302)
            self.send_header("location", moved)
            self.end_headers()
            return
        body = {"/a.png": png("green"), "/talk": first_words(), "/large": bytes(3_000_000)}.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


@pytest.fixture(scope="module")
def reader(serve, site):
    models = ("clip-vit-16", "asr-conformer-en", "any-mini")
    made = serve(models=models, allow_urls=(site.removeprefix("http://"), "refused.test"), max_upload_mb=2)
    with httpx.Client(base_url=made.url, timeout=60) as client:
        yield client
    assert list(made.state.folder.iterdir()) == []


@pytest.mark.ci
def test_media_of_named_hosts_are_read(reader, site):
    body = {"input": [{"image": f"{site}/moved"}]}
    vector = reader.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    expected = multimodal.Embedder("clip-vit-16", compute_type="float32").images([png("green")])[0]
    assert vector == pytest.approx(expected.tolist(), abs=1e-6)
    labels = ["a red wall", "a green wall"]
    scores = reader.post("/v1/classify", json={"images": [f"{site}/a.png"], "labels": labels}).json()["data"][0]
    assert scores["scores"] == multimodal.classify(png("green"), labels, compute_type="float32")[0]["scores"]
    heard = reader.post("/v1/audio/transcriptions", files={"url": (None, f"{site}/talk")}).json()["text"]
    assert heard.startswith("a young boy")
    both = reader.post("/v1/audio/transcriptions", files={"url": (None, f"{site}/talk"), "file": b"x"})
    refused(both, 400, "url: expected a file or a url, got both")
    with openai.OpenAI(base_url=f"{reader.base_url}/v1", api_key="none", max_retries=0) as asked:
        content = [
            {"type": "image_url", "image_url": {"url": f"{site}/a.png"}},
            {"type": "text", "text": "What is it?"},
        ]
        made = asked.chat.completions.create(messages=[{"role": "user", "content": content}], model="any-mini")
    assert made.choices[0].message.content == multimodal.ask("What is it?", png("green"), compute_type="float32")


@pytest.mark.parametrize(
    ("url", "status", "part"),
    [
        ("{site}/none", 400, "HTTP 404"),
        ("{site}/talk", 400, "images[0]: "),
        ("{site}/large", 413, "larger than 2 MB"),
        ("{site}/away", 400, "where it leads"),
        ("{site}/inside", 400, "where it leads"),
        ("http://localhost:1/a.png", 400, "does not read 'http://localhost"),
        ("http://169.254.169.254/latest", 400, "does not read 'http://169"),
        ("http://refused.test/a.png", 400, "cannot be read"),
        ("file:///etc/passwd", 400, "expected a data URL"),
        ("http://[::1", 400, "does not read"),
    ],
)
def test_what_is_not_read(reader, site, url, status, part):
    body = {"images": [url.format(site=site)], "labels": ["a", "b"]}
    refused(reader.post("/v1/classify", json=body), status, part)


def test_hosts_are_checked():
    with pytest.raises(UsageError, match="must be hosts"):
        ServeOptions(allow_urls=("http://example.org/path",))
