"""Pages of a report: escaping, bounds, and images that are gone."""

import base64
import io
import re

import pytest
import torch
from PIL import Image

from multimodal.tasks.report.media import figure, recording, thumbnails
from multimodal.tasks.report.page import MOST_LETTERS, MOST_ROWS, Section, write_page
from multimodal.tasks.report.style import POLICY, SEEK
from multimodal.tokens.audio.reading import read_audio
from tests.helpers.commands import Page

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>' \" & \x1b[31m"


def test_every_text_is_escaped_wherever_it_stands(tmp_path):
    section = Section(EVIL, [(EVIL, "b"), (EVIL, 1.0)], [EVIL])
    write_page(tmp_path / "a.html", EVIL, [section, Section("more", lines=[EVIL])])
    page = Page.of(tmp_path / "a.html")
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count("<script>alert(1)</script>") == 7
    assert "\x1b" not in (tmp_path / "a.html").read_text()


def test_the_policy_allows_the_one_script_and_nothing_from_elsewhere(tmp_path):
    import hashlib

    write_page(tmp_path / "a.html", "a", [])
    text = (tmp_path / "a.html").read_text()
    assert f'content="{POLICY}"' in text
    digest = base64.b64encode(hashlib.sha256(SEEK.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in POLICY
    assert POLICY.startswith("default-src 'none'")
    assert "prefers-color-scheme:dark" in text
    assert "width=device-width" in text


@pytest.mark.parametrize("ending", ["html", "md"])
def test_a_page_is_bounded_and_says_what_is_left_out(tmp_path, ending):
    rows = [("a", "b"), *((n, "x" * 9) for n in range(MOST_ROWS + 7))]
    lines = [f"line {n}" for n in range(MOST_ROWS + 4321)]
    path = tmp_path / f"a.{ending}"
    write_page(path, "a", [Section("table", rows), Section("list", lines=lines), Section("long", lines=["y" * 10**6])])
    text = path.read_text()
    assert "7 more rows are left out." in text
    assert "4,321 more lines are left out." in text
    assert len(re.search("y{9,}", text)[0]) < MOST_LETTERS
    assert len(text) < 100_000


def test_images_that_are_gone_are_one_warning_and_an_empty_place(tmp_path, recwarn):
    Image.new("RGB", (900, 300), "red").save(tmp_path / "a.png")
    (tmp_path / "c.png").write_bytes(b"no image")
    found = thumbnails(["a", "b", "c", "a"], lambda name: tmp_path / f"{name}.png")
    assert list(found) == ["a"]
    (warning,) = recwarn
    assert str(warning.message).startswith(f"cannot show 2 of 3 images ({tmp_path}/b.png: ")
    kind, data = found["a"].split(",")
    assert kind == "data:image/webp;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (256, 85)
    assert "cannot be shown" in figure(found.get("b"), "b")


def test_a_recording_is_small_and_keeps_its_length():
    wave = torch.sin(torch.arange(48_000) * 0.1) / 2
    uri = recording(wave)
    kind, data = uri.split(",")
    assert kind == "data:audio/webm;base64"
    assert len(data) < 20_000
    heard = read_audio(base64.b64decode(data))
    assert abs(len(heard) - len(wave)) < 400
    assert (heard[1000:47_000] - wave[1000:47_000]).abs().max() < 0.1
