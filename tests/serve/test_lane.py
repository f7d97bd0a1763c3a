"""Jobs of many clients share a model's thread: batches, turns, failures, ends."""

import threading
import time

import pytest

from multimodal import transcribe
from multimodal.errors import TextError
from multimodal.serve.jobs.lane import GATHER, BusyError, CancelledJobError, Job, Lane, Work, one_request
from multimodal.serve.jobs.speech import TranscriptionJob
from multimodal.serve.models import Models
from multimodal.serve.options import ServeOptions
from multimodal.weights.load import load
from tests.helpers.data.sets import wav
from tests.weights.speech.test_canary import folder


@pytest.fixture
def lane():
    made = Lane("test", width=4, most=6)
    yield made
    made.stop()


class Model:
    """Doubles numbers; notes its batches, the first of which waits for `go`."""

    def __init__(self):
        self.batches, self.go = [], threading.Event()

    def __call__(self, payloads: list) -> list:
        self.batches.append(list(payloads))
        assert self.go.wait(10)
        if bad := [one for one in payloads if isinstance(one, str)]:
            raise TextError(f"{bad[0]}: no number")
        return [2 * one for one in payloads]


def submit(lane: Lane, model: Model, payload, key="a"):
    return lane.submit(one_request(Work(key, payload, model)))


def blocked(lane: Lane, model: Model):
    """Keep the lane at work until `model.go`."""
    first = submit(lane, model, 0, "first")
    while not model.batches:
        time.sleep(0.001)
    return first


def test_requests_that_wait_share_a_batch_by_key(lane):
    model = Model()
    futures = [blocked(lane, model), *(submit(lane, model, n, "a" if n < 3 else "b") for n in range(1, 5))]
    model.go.set()
    assert [one.result(5) for one in futures] == [0, 2, 4, 6, 8]
    assert model.batches == [[0], [1, 2], [3, 4]]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*the text was cut")
def test_recordings_in_other_languages_share_no_batch(lane, tmp_path):
    canary, model = load(folder(tmp_path / "canary")), Model()
    options = [{"language": code, "vad_filter": False, "decode_log": True} for code in ("en", "de")]
    expected = [transcribe(wav(1.0), canary, **one)["log"] for one in options]
    blocked(lane, model)
    futures = [lane.submit(TranscriptionJob(canary, wav(1.0), one)) for one in options]
    model.go.set()
    assert [one.result(10)["log"] for one in futures] == expected
    assert expected[0] != expected[1]


def test_an_answer_does_not_wait_for_the_next_batch():
    lane, model, ended = Lane("test", width=2), Model(), []

    def serve(payloads: list) -> list:
        ended.append([one.done() for one in futures])
        return payloads

    blocked(lane, model)
    futures = [lane.submit(one_request(Work("a", n, serve))) for n in range(4)]
    model.go.set()
    assert [one.result(5) for one in futures] == list(range(4))
    assert ended == [[False] * 4, [True, True, False, False]]
    lane.stop()


def test_a_batch_waits_a_moment_for_jobs_in_the_making(lane):
    model = Model()
    model.go.set()
    with lane.expecting():
        first = submit(lane, model, 1)
        time.sleep(0.005)
        second = submit(lane, model, 2)
    assert (first.result(5), second.result(5), model.batches) == (2, 4, [[1, 2]])
    with lane.expecting():
        time.sleep(2 * GATHER)
        begun = time.monotonic()
        assert submit(lane, model, 3).result(5) == 6  # that one takes long
        assert time.monotonic() - begun < GATHER


def test_a_request_that_fails_ends_its_own_job_alone(lane):
    model = Model()
    futures = [blocked(lane, model), submit(lane, model, 1), submit(lane, model, "x"), submit(lane, model, 2)]
    model.go.set()
    assert [futures[i].result(5) for i in (1, 3)] == [2, 4]
    with pytest.raises(TextError, match="x: no number"):
        futures[2].result(5)
    assert submit(lane, model, 5).result(5) == 10


def test_a_long_job_leaves_room_for_short_ones(lane):
    model, order = Model(), []

    def window(number: int):
        answer = yield Work("window", number, model)
        order.append(number)
        return answer

    first = blocked(lane, model)
    long = Job(window(n) for n in range(100, 140))
    ended = lane.submit(long)
    short = submit(lane, model, 7, "window")
    short.add_done_callback(lambda _: order.append("short"))
    model.go.set()
    first.result(5)
    ended.result(5)
    assert order.index("short") < 8
    assert max(map(len, model.batches)) <= 4


def test_a_full_lane_refuses_and_says_when_to_try_again(lane):
    model = Model()
    futures = [blocked(lane, model), *(submit(lane, model, n) for n in range(5))]
    with pytest.raises(BusyError, match="6 requests wait") as refused:
        submit(lane, model, 9)
    assert refused.value.seconds >= 1
    model.go.set()
    assert [one.result(5) for one in futures] == [0, 0, 2, 4, 6, 8]
    assert submit(lane, model, 9).result(5) == 18


def test_a_cancelled_job_stops_at_its_next_request(lane):
    model, closed = Model(), []

    def stream():
        try:
            for n in range(1000):
                yield Work("long", n, model)
        finally:
            closed.append(True)

    job = Job(iter([stream()]))
    future = lane.submit(job)
    while not model.batches:
        time.sleep(0.001)
    job.cancel()
    model.go.set()
    with pytest.raises(CancelledJobError):
        future.result(5)
    assert closed
    assert len(model.batches) == 1
    assert submit(lane, model, 3).result(5) == 6


def test_faults_of_a_job_do_not_stop_the_thread(lane):
    model = Model()
    model.go.set()

    class Faulty(Job):
        def ended(self, value):
            raise RuntimeError("fault")

    def stream():
        return (yield Work("a", 1, model))

    def broken():
        raise RuntimeError("cannot open")
        yield

    for job in (Faulty(iter([stream()])), Job(broken())):
        with pytest.raises(RuntimeError):
            lane.submit(job).result(5)
    assert submit(lane, model, 3).result(5) == 6
    assert lane.open == 0


def test_a_process_computes_with_as_many_threads_as_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    models = Models(ServeOptions(models="gpt-mini", device="cpu", threads=3))
    models.load_all()
    models.stop()
    assert asked == [3]
