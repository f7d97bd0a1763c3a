"""Transcript files: equal to openai-whisper's, and whole whatever the text holds."""

import json
import random
import re
from pathlib import Path

import pytest

from multimodal.tasks.transcribe.writers import FORMATS, Layout, write_transcript
from tests.helpers.spread import thin

STYLES = ["txt", "vtt", "srt", "tsv"]
LAYOUTS = [
    {}, {"highlight_words": True}, {"max_line_width": 20}, {"max_line_width": 14, "max_line_count": 2},
    {"max_line_width": 30, "max_line_count": 1, "highlight_words": True}, {"max_words_per_line": 3},
    {"max_words_per_line": 2, "max_line_width": 9}, {"max_line_count": 1}, {"max_line_width": 1, "max_line_count": 1},
]  # fmt: skip


def drawn(seed: int, words: bool = True) -> dict:
    """A random transcript: pauses short and long, words of one letter to ten, some written together."""
    draw, time, segments = random.Random(seed), 0.0, []
    for number in range(draw.randrange(1, 12)):
        timings = []
        time += draw.choice([0.0, 0.5, 2.9, 4.0, 4000.0])
        for _ in range(draw.randrange(1, 9)):
            time += draw.choice([0.0, 0.0, 0.1234, 3.3])
            start, time = time, time + draw.choice([0.0, 0.07, 0.5])
            word = draw.choice([" ", " ", ""]) + "".join(draw.choices("abc'-&. ñ", k=draw.randrange(1, 10)))
            timings.append({"word": word, "start": start, "end": time, "probability": draw.random()})
        segment = {"id": number, "start": timings[0]["start"], "end": time, "text": "".join(t["word"] for t in timings)}
        segments.append({**segment, "words": timings} if words else segment)
    return {"text": "".join(s["text"] for s in segments), "segments": segments, "language": "en"}


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_every_layout_equals_openai_whispers(tmp_path, options, words):
    from whisper.utils import get_writer

    for style in STYLES:
        writer = get_writer(style, str(tmp_path))
        for seed in range(12):
            result = drawn(seed, words)
            writer(result, "talk.wav", **options)
            assert FORMATS[style](result, Layout(**options)).encode() == (tmp_path / f"talk.{style}").read_bytes()


HOSTILE = " one --> two\n\n00:00:09,000 --> 00:00:10,000\r\nthree\t<b> &lt; four "


def hostile(words: bool) -> dict:
    segment = {"id": 0, "start": 0.0, "end": 2.0, "text": HOSTILE}
    if words:  # the arrow falls apart into two words
        parts = re.findall(r"\s*(?:--|>|[^\s>-]+)", HOSTILE)
        segment["words"] = [{"word": p, "start": i / 50, "end": i / 50 + 0.02} for i, p in enumerate(parts)]
    return {"text": HOSTILE, "segments": [segment], "language": "en"}


LAYOUTS = [Layout(), Layout(highlight_words=True), Layout(max_line_width=12, max_line_count=3)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("words", [True, False])
def test_no_text_breaks_a_cue_a_line_or_a_row(words, layout):
    result = hostile(words)
    assert FORMATS["txt"](result, layout).count("\n") == 1
    assert [len(row.split("\t")) for row in FORMATS["tsv"](result, layout).splitlines()] == [3, 3]
    for style, head in (("srt", r"\d+\n"), ("vtt", "")):
        body = FORMATS[style](result, layout).removeprefix("WEBVTT\n\n")
        cues = body.removesuffix("\n\n").split("\n\n")
        assert "\r" not in body
        for cue in cues:
            times, *rest = re.sub(f"^{head}", "", cue).split("\n")
            assert re.fullmatch(r"[\d:.,]+ --> [\d:.,]+", times)
            assert rest
            assert all("-->" not in line for line in rest)
        if style == "vtt":
            assert set(re.findall("<[^>]*>", body)) <= {"<u>", "</u>"}
            assert re.sub("</?u>", "", body).count("&amp;lt;") == len(cues) or layout


def test_text_without_word_times_is_not_lost_among_words():
    result = drawn(3)
    result["segments"].append({"id": 99, "start": 9e4, "end": 9e4 + 1, "text": " the end", "words": []})
    assert FORMATS["srt"](result).endswith("--> 25:00:01,000\nthe end\n\n")


def test_speakers_are_named_and_never_share_a_cue():
    turns = [("channel 1", " Hello there.", 0.0), ("channel 2", " Hi.", 0.4), ("channel 2", " Yes?", 0.9)]
    segments = [
        {"id": i, "start": t, "end": t + 0.3, "text": text, "speaker": who} for i, (who, text, t) in enumerate(turns)
    ]
    result = {"text": "", "segments": segments, "language": "en"}
    assert FORMATS["txt"](result) == "[channel 1] Hello there.\n[channel 2] Hi.\n[channel 2] Yes?\n"
    assert FORMATS["tsv"](result).splitlines()[1] == "0\t300\t[channel 1] Hello there."
    assert "00:00:00,400 --> 00:00:00,700\n[channel 2] Hi.\n\n3\n" in FORMATS["srt"](result)
    assert "00:00.000 --> 00:00.300\n<v channel 1>Hello there.\n" in FORMATS["vtt"](result)
    for segment in segments:
        segment["words"] = [{"word": segment["text"], "start": segment["start"], "end": segment["end"]}]
    layout = Layout(max_line_width=40, max_line_count=2)
    filled = FORMATS["srt"](result, layout)  # cues go across segments, not across speakers
    assert filled == (
        "1\n00:00:00,000 --> 00:00:00,300\n[channel 1] Hello there.\n\n"
        "2\n00:00:00,400 --> 00:00:01,200\n[channel 2] Hi. Yes?\n\n"
    )


def test_nothing_heard_gives_valid_files(tmp_path):
    result = {"text": "", "segments": [], "language": "en", "duration": 3.0}
    layout = Layout(max_line_width=20, max_line_count=2, highlight_words=True)
    written = write_transcript(result, Path("a/silence.v2.wav"), tmp_path, "all", layout)
    contents = {path.name: path.read_text() for path in written}
    assert contents == {
        "silence.v2.txt": "", "silence.v2.vtt": "WEBVTT\n\n", "silence.v2.srt": "",
        "silence.v2.tsv": "start\tend\ttext\n", "silence.v2.json": json.dumps(result),
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == contents.keys()
