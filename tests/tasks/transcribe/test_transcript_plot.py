"""The image of a transcript: whole, within its size, and with any text."""

import io
import math

import pytest
import torch
from PIL import Image

from multimodal.tasks.figures import MISSING, fonts, shown
from multimodal.tasks.transcribe import plot
from multimodal.tasks.transcribe.plot import plot_transcript, rows, spoken
from tests.helpers.data.sets import wav


def result(seconds: float, words: list[str] | None = None, **more) -> dict:
    step = seconds / max(1, len(words or []))
    timings = [
        {"word": f" {w}", "start": i * step, "end": i * step + step, "probability": i / len(words)}
        for i, w in enumerate(words or [])
    ]
    segment = {"id": 0, "start": 0.0, "end": seconds, "text": " ".join(words or []), "avg_logprob": -0.5}
    return {"text": "", "segments": [{**segment, "words": timings}] if words else [], "language": "en",
            "duration": seconds, "transcribed": [[0.0, seconds]], "skipped": [], "damaged": [], **more}  # fmt: skip


def pixels(data: bytes) -> torch.Tensor:
    image = Image.open(io.BytesIO(data))
    image.load()
    return torch.tensor(list(image.convert("RGB").tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.05, (0.1, 1, 0.0)), (5.0, (5.0, 1, 0.0)), (12.0, (12.0, 1, 0.0)), (60.0, (12.0, 5, 0.0)),
     (500.0, (25.0, 20, 0.0)), (600.0, (30.0, 20, 0.0)), (3600.0, (30.0, 20, 3000.0))],
)  # fmt: skip
def test_rows_are_readable_and_bounded(seconds, expected):
    length, count, left_out = rows(seconds)
    assert (length, count, left_out) == pytest.approx(expected)
    assert length * count + left_out >= seconds - 1e-6


@pytest.mark.ci
def test_words_spans_and_probabilities_are_drawn():
    sound, word = wav(6.0), {"word": "x", "start": 1.0, "end": 5.0}
    skips = [{"start": 2.0, "end": 4.0, "reason": "silence"}]
    skipped = result(6.0, transcribed=[[0.0, 2.0], [4.0, 6.0]], skipped=skips)
    plain, shaded = (pixels(plot_transcript(r, sound, "a.wav")) for r in (result(6.0), skipped))
    one = result(6.0, ["x"])
    red, green = (
        pixels(plot_transcript(
            one | {"segments": [one["segments"][0] | {"words": [word | {"probability": p}]}]}, sound, "a.wav"
        ))
        for p in (0.0, 1.0)
    )  # fmt: skip
    assert {image.shape[1] for image in (plain, shaded, red, green)} == {1600}
    for other in (shaded, red):
        assert (plain != other).any(-1).float().mean() > 0.01
    changed = (red != green).any(-1)
    assert red[changed].float().mean(0)[0] > green[changed].float().mean(0)[0]  # improbable words are red


@pytest.mark.ci
def test_any_text_and_name_can_be_drawn():
    """Formula marks, control letters, scripts and emoji that fonts lack; warnings are errors here."""
    words = ["$5", "$\\frac{", "日本語", "नमस्ते", "\U0001f600", "مرحبا", "a\nb", "\x07", "<b>", "\U000e0041"]
    data = plot_transcript(result(5.0, words), wav(5.0), "dir/$x_\n日本.wav")
    assert pixels(data).shape[0] > 100
    assert shown("a\n b\U000e0041") == f"a b{MISSING}"
    assert fonts("abc") == ["DejaVu Sans"]


def test_segments_stand_for_words_without_times_and_speakers_are_named():
    one = {"id": 0, "start": 1.0, "end": 2.0, "text": " yes", "avg_logprob": math.log(0.5), "speaker": "channel 2"}
    two = {"id": 1, "start": 0.0, "end": 0.5, "text": " ", "avg_logprob": 0.0}
    (word,) = spoken({"segments": [one, two]})
    assert word == {"word": "[channel 2] yes", "start": 1.0, "end": 2.0, "probability": pytest.approx(0.5),
                    "speaker": "channel 2"}  # fmt: skip


@pytest.mark.ci
def test_sound_that_ends_early_and_long_recordings_are_drawn_in_part(monkeypatch):
    damage = [{"start": 3.0, "end": 6.0, "what": "the recording ends early"}]
    pixels(plot_transcript(result(6.0, ["one"], damaged=damage), wav(3.0, promised=6.0), "a.wav"))
    height = pixels(plot_transcript(result(36.0, ["one"]), wav(1.0), "a.wav")).shape[0]
    monkeypatch.setattr(plot, "ROWS", 2)
    assert pixels(plot_transcript(result(1000.0, ["one"]), wav(1.0), "a.wav")).shape[0] < height
