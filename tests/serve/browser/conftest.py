"""Chromium on the page of one server, which asks for a key. Its microphone hears the shipped recording."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from multimodal.cli.main import main
from multimodal.system.assets import asset

KEY = "a-key-of-the-tests"
MODELS = ("asr-conformer-en", "clip-vit-16", "any-mini", "gpt-mini", "whisper-mini")
COLOURS = ("red", "green", "blue", "white")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update",
         "disable-sync", "use-fake-device-for-media-stream", "use-fake-ui-for-media-stream")  # fmt: skip


@pytest.fixture(scope="session")
def pictured(tmp_path_factory) -> Path:
    """A folder with images, one colour each."""
    folder = tmp_path_factory.mktemp("pictured")
    for number, colour in enumerate(COLOURS):
        made = Image.fromarray(np.random.default_rng(number).integers(0, 60, (60, 80, 3), np.uint8))
        Image.blend(made, Image.new("RGB", made.size, colour), 0.8).save(folder / f"{colour}.png")
    return folder


@pytest.fixture(scope="session")
def microphone(tmp_path_factory) -> Path:
    """The shipped recording as Chromium wants it: WAV at 48 kHz."""
    path = tmp_path_factory.mktemp("microphone") / "speech.wav"
    resampler = av.AudioResampler("s16", "mono", 48_000)
    with av.open(str(asset("sample", "speech.flac"))) as read, av.open(str(path), "w") as written:
        stream = written.add_stream("pcm_s16le", rate=48_000, layout="mono")
        for frame in [*read.decode(audio=0), None]:
            for part in resampler.resample(frame):
                written.mux(stream.encode(part))
        written.mux(stream.encode(None))
    return path


@pytest.fixture(scope="session")
def paged(serve, pictured, tmp_path_factory) -> Any:
    index = tmp_path_factory.mktemp("index") / "own.index"
    with pytest.raises(SystemExit, match="0"):
        main(["index", str(pictured), "--output", str(index), "--quiet"])
    return serve(models=MODELS, index=(f"own={index}",), api_key=(KEY,))


@pytest.fixture(scope="module")  # its event loop would be in the way of other files' tests
def browser(microphone) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    options = [*QUIET, f"use-file-for-fake-audio-capture={microphone}%noloop"]
    options += ["no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=[f"--{one}" for one in options])
        yield made
        made.close()


@pytest.fixture
def open_page(browser, paged) -> Iterator[Callable[..., Any]]:
    """Open the page at a tab. At the end: no request went to another origin, and no script or policy failed."""
    contexts, foreign, failures = [], [], []

    def start(tab: str = "", key: str | None = KEY, ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.on("request", lambda one: foreign.append(one.url))
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('key', '{key}')")
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("websocket", lambda one: foreign.append(one.url.replace("ws://", "http://")))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("dialog", lambda dialog: failures.append(dialog.message))
        page.on("console", lambda one: failures.append(one.text) if "Content Security" in one.text else None)
        page.goto(f"{paged.url}/#{tab}")
        if ready:
            page.wait_for_selector("#state.ready")
        return page

    yield start
    for context in contexts:
        context.close()
    own = (paged.url, "blob:", "data:")
    assert [url for url in foreign if not url.startswith(own)] == []
    assert failures == []
