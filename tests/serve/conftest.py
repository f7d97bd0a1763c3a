"""A server of the small shipped models, in a thread."""

import functools
import io
import threading
import time
import wave as wav
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import httpx._transports.default as transports
import pytest

from multimodal.serve.options import ServeOptions
from multimodal.serve.run import ServerProcess, configuration, listening

# each client, also that of `httpx.get`, would read the machine's certificates: 30 ms
transports.create_ssl_context = functools.cache(transports.create_ssl_context)
MODELS = ("asr-conformer-en", "clip-vit-16", "sentence-mini", "gpt-mini", "translator-mini", "any-mini")


def recorded(wave, rate: int = 16_000) -> bytes:
    """A WAV file of samples."""
    file = io.BytesIO()
    with wav.open(file, "wb") as made:
        made.setparams((1, 2, rate, 0, "NONE", ""))
        made.writeframes((wave * 32767).short().numpy().tobytes())
    return file.getvalue()


class Served(NamedTuple):
    url: str
    process: ServerProcess

    @property
    def state(self):
        return self.process.config.loaded_app.app.state.server


@pytest.fixture(scope="session")
def serve():
    """Start a server with options; return it once it is ready."""
    running = []

    def start(**values) -> Served:
        options = ServeOptions(**{"port": 0, "models": MODELS, "compute_type": "float32"} | values)
        bound = listening(options)
        made = ServerProcess(configuration(options))
        thread = threading.Thread(target=made.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        else:
            pytest.fail("the server is not ready after 60 s")
        running.append((made, thread))
        return Served(url, made)

    yield start
    for made, thread in running:
        made.should_exit = True
        thread.join(20)


@pytest.fixture(scope="session")
def served(serve) -> Iterator[Served]:
    return serve()


@pytest.fixture
def client(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as made:
        yield made
