"""Loops, prompts that are read back, and the account of what was left out."""

import itertools

import pytest

from multimodal.tasks.transcribe import timeline
from multimodal.tasks.transcribe.options import WhisperOptions
from multimodal.tasks.transcribe.results import compression_ratio
from multimodal.tasks.transcribe.timeline import Span
from multimodal.tasks.transcribe.whisper.decode import DecodingResult
from multimodal.tasks.transcribe.whisper.hallucination import echoes_hotwords
from multimodal.tasks.transcribe.whisper.repetition import RepetitionLoop, find_loops, remove_repetitions
from multimodal.tasks.transcribe.whisper.windows import DecoderPrompt, fallback_reason, is_silent
from multimodal.tokens.text.vocabulary import tokenizer_from
from tests.helpers.tiny_whisper import THEIR_WARNINGS, whispers

pytestmark = THEIR_WARNINGS
EOT = 1000


@pytest.mark.parametrize(
    "text",
    [
        " no, no, no", " no, no, no, no, no, no", " ha ha ha ha", " ha ha ha ha ha ha ha ha", " 1 1 1 1",
        " 1 1 1 1 1 1 1 1 1 1", " 0 0 0 0 0 0 0 0 0 0 0 0", " very, very, very, very good", " 10000000000000",
        " Thank you. Thank you. Thank you.", " la la la la la la la", " we shall fight, we shall fight, we shall fight",
        " Tick tock, tick tock, tick tock, tick tock.",
    ],
)  # fmt: skip
def test_what_people_say_again_and_again_is_kept(text):
    tokens = tokenizer_from("whisper").encode(text)
    assert find_loops(tokens, repetitive=compression_ratio(text) > 2.4) == []


@pytest.mark.parametrize(
    ("once", "times", "before"),
    [(" Thank you very much.", 20, ""), (" ha", 100, " That is funny"), (" you", 60, ""),
     (" I don't know, but", 12, ""), ("1", 60, " It is"),
     (" See you in the next video, and do not forget to subscribe.", 6, " Good.")],
)  # fmt: skip
def test_loops_are_cut_to_their_first_occurrence(once, times, before):
    tokenizer = tokenizer_from("whisper")
    text = before + once * times
    tokens = tokenizer.encode(text)
    assert compression_ratio(text) > 2.4
    found = find_loops(tokens, repetitive=True)
    kept = [token for i, token in enumerate(tokens) if not any(loop.start <= i < loop.stop for loop in found)]
    assert len(kept) <= len(tokenizer.encode(before + once)) + 2
    assert tokenizer.decode(kept).startswith((before + once).rstrip("."))


def test_a_loop_within_much_other_text_needs_more_repeats():
    other = list(range(100, 160))
    for unit, times in (([1], 32), ([1, 2, 3, 4], 8)):
        tokens = other + unit * times + other
        assert find_loops(tokens, False) == [RepetitionLoop(60 + len(unit), 60 + len(unit) * times, len(unit))]
        fewer = other + unit * (times - 1) + other
        assert find_loops(fewer, False) == []
        assert find_loops(fewer, True)


def segment(start, end, tokens):
    return {"start": start, "end": end, "tokens": tokens, "text": ""}


def test_segments_of_a_loop_go_and_their_time_is_told():
    said = [segment(float(i), i + 1.0, [EOT + 50 * i, 1, 2, 3, 4, EOT + 50 * i + 50]) for i in range(12)]
    other = segment(12.0, 14.0, [EOT + 600, 7, 8, 9, EOT + 700])
    kept, cuts = remove_repetitions([*said, other], EOT, True)
    assert kept == [said[0], other]
    assert cuts == [(float(i), i + 1.0) for i in range(1, 12)]
    assert remove_repetitions([*said[:3], other], EOT, True) == ([*said[:3], other], [])


def test_a_loop_inside_a_segment_shortens_it():
    tokens = [EOT, 5, 6, *[1, 2] * 49, EOT + 500]
    (kept,), cuts = remove_repetitions([segment(10.0, 20.0, tokens)], EOT, True)
    assert kept == segment(10.0, 10.4, [EOT, 5, 6, 1, 2, EOT + 500])
    assert cuts == [(10.4, 20.0)]
    (whole,), cuts = remove_repetitions([segment(0.0, 10.0, [*[1, 2] * 40, *range(5, 25)])], EOT, True)
    assert (whole["start"], whole["end"], whole["tokens"]) == (0.0, 10.0, [1, 2, *range(5, 25)])
    assert cuts == [(pytest.approx(0.2), pytest.approx(8.0))]


def test_fallback_and_silence_are_openai_whispers():
    options = WhisperOptions()
    cases = {(-0.5, 0.1, "a b c"): (None, False), (-1.5, 0.1, "a b c"): ("avg_logprob", False),
             (-1.5, 0.9, "a b c"): (None, True), (-0.5, 0.9, "a b c"): (None, False),
             (-0.5, 0.1, "ab " * 60): ("compression_ratio", False)}  # fmt: skip
    for (logprob, silence, text), expected in cases.items():
        result = DecodingResult([], text, logprob, silence, 0.0)
        assert (fallback_reason(result, options), is_silent(result, options)) == expected


def test_hotwords_are_not_printed_on_silence():
    options = WhisperOptions(hotwords="Kubernetes, Istio")
    for text, silence, expected in (("Kubernetes.", 0.9, True), ("Istio, Kubernetes", 0.9, True),
                                    ("Kubernetes", 0.1, False), ("Kubernetes runs", 0.9, False)):  # fmt: skip
        assert is_silent(DecodingResult([], text, -0.1, silence, 0.0), options) == expected
        assert not is_silent(DecodingResult([], text, -0.1, silence, 0.0), WhisperOptions())
    assert not echoes_hotwords("", "Istio")
    assert not echoes_hotwords("Istio", None)


def test_hotwords_stand_beside_the_text_as_in_faster_whisper():
    """Its `WhisperModel.get_prompt`: the first 223 tokens of the hot words, then the last 223 of the text."""
    tokenizer, half = whispers()[1].tokenizer, 448 // 2 - 1
    for words, text in itertools.product((0, 3, 50), (0, 10, 400)):
        hotwords = " ".join(["Müller"] * words)
        own = tokenizer.encode(" " + hotwords)[:half] if words else []
        prompt = DecoderPrompt.of(tokenizer, WhisperOptions(hotwords=hotwords)).tokens(list(range(text)), True, 448)
        assert prompt == [*own, *range(text)[-half:]]


def test_accounts_tile_a_recording():
    spans = [Span(0, 320), Span(960, 1600, "silence"), Span(320, 960), Span(1600, 1600)]
    assert timeline.tiled(spans, 1700) == [Span(0, 960), Span(960, 1700, "silence")]
    assert timeline.tiled([], 100) == [Span(0, 100, "silence")]
    for broken in ([Span(0, 10), Span(20, 100)], [Span(0, 60), Span(50, 100)], [Span(0, 100)]):
        with pytest.raises(ValueError, match="coverage"):
            timeline.tiled(broken, 100 if broken[-1].start else 800)


def test_later_spans_lie_on_top_and_channels_are_heard_where_any_is():
    overlaid = timeline.overlaid(10, 50, [Span(0, 20, "a"), Span(15, 30, "b"), Span(45, 40, "c")])
    assert overlaid == [Span(10, 15, "a"), Span(15, 30, "b"), Span(30, 50)]
    one, two = [Span(0, 50, "silence"), Span(50, 90)], [Span(0, 20), Span(20, 90, "no_speech")]
    for channels in ([one, two], [two, one]):
        assert timeline.union(channels) == [Span(0, 20), Span(20, 50, "no_speech"), Span(50, 90)]
    dropped = [[Span(0, 90, reason)] for reason in ("silence", "unlikely", "no_speech")]
    assert timeline.union(dropped) == [Span(0, 90, "unlikely")]
    assert timeline.coverage(one) == {
        "duration": 90 / 16000, "transcribed": [[50 / 16000, 90 / 16000]],
        "skipped": [{"start": 0.0, "end": 50 / 16000, "reason": "silence"}],
    }  # fmt: skip
