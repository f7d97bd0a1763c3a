"""Streams side by side."""

import pytest

from multimodal.errors import AudioError
from multimodal.tasks.transcribe.scheduler import run
from multimodal.tasks.transcribe.whisper.windows import within_clip


def count(name, requests, log=None):
    """Asks for as many squares as `requests` holds and returns their sum."""
    total = 0
    for request in requests:
        total += yield request
        if log is not None:
            log.append(name)
    return name, total


def failing(requests):
    for request in requests:
        _ = yield request
    raise AudioError("b.wav: broken")


class Squares:
    def __init__(self):
        self.batches = []

    def __call__(self, requests):
        self.batches.append(list(requests))
        return [request**2 for request in requests]


@pytest.mark.parametrize("width", [1, 2, 3, 9])
def test_results_are_the_same_whatever_the_width(width):
    serve = Squares()
    streams = [count("a", [1, 2, 3]), count("b", []), count("c", [4]), failing([7]), count("d", [5, 6])]
    found = list(run(streams, serve, width))
    (error,) = [result for result in found if not isinstance(result, tuple)]
    assert isinstance(error, AudioError)
    assert sorted(result for result in found if result is not error) == [("a", 14), ("b", 0), ("c", 16), ("d", 61)]
    assert max(map(len, serve.batches)) == min(width, 4)
    assert sorted(request for batch in serve.batches for request in batch) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([(5, 7), (7, 9)], [(5, 7), (7, 8)]),
        ([(5, 6), (8, 9)], [(5, 6), (6, 8)]),  # in the padding after the clip: between the last end and the clip's
        ([(5, 9), (9, 9.5)], [(5, 6.5), (6.5, 8)]),
        ([(8, 9), (9, 10)], [(4, 6), (6, 8)]),
        ([], []),
    ],
)
def test_segments_in_the_padding_after_a_clip_keep_a_duration(given, expected):
    segments = [{"start": start, "end": end} for start, end in given]
    within_clip(segments, 4.0, 8.0)
    assert [(own["start"], own["end"]) for own in segments] == expected


def test_a_result_is_there_as_soon_as_its_stream_has_ended():
    streams = [count("long", [1, 2, 3]), count("short", [4]), count("empty", [])]
    assert [name for name, _ in run(streams, Squares(), 3)] == ["empty", "short", "long"]


def test_streams_are_taken_when_a_place_is_free():
    taken = []

    def streams():
        for i in range(6):
            taken.append(i)
            yield count(i, [i, i])

    results = run(streams(), Squares(), 2)
    assert next(results) == (0, 0)
    assert taken == [0, 1]
    assert next(results) == (1, 2)
    assert taken == [0, 1]
    assert [name for name, _ in results] == [2, 3, 4, 5]


def test_requests_of_one_key_wait_for_each_other():
    serve = Squares()
    streams = [count("a", [1, 20]), count("b", [21, 2]), count("c", [3, 22]), count("d", [31])]
    keys = {1: None, 2: None, 3: None, 20: 20, 21: 20, 22: 20, 31: 30}
    assert {name for name, _ in run(streams, serve, 4, keys.get)} == {"a", "b", "c", "d"}
    assert serve.batches == [[1, 3], [20, 21, 22], [2], [31]]


def test_an_error_that_is_none_of_ours_is_not_hidden():
    def broken():
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(run([broken()], Squares(), 1))
