"""Bad input of the objects: one clear line each, and the items beside it keep their results."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from multimodal import Classifier, Embedder, Transcriber
from multimodal.errors import MultimodalError
from tests.helpers.folders import clip_and_asr

RED = np.full((40, 50, 3), 200, np.uint8)
TONE = 0.3 * np.sin(np.arange(16000) / 8).astype(np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Any]:
    folder = clip_and_asr(tmp_path_factory.mktemp("models"))
    return {
        "clip": folder / "clip",
        "classify": Classifier(folder / "clip", ["red", "blue"]),
        "embed": Embedder(folder / "clip"),
        "transcribe": Transcriber(folder / "asr", vad_filter=False),
    }


IMAGES = {
    "objects": (np.array([RED, None], object), "pass several images as a list"),
    "empty": (np.zeros((0, 4, 3), np.uint8), "without pixels"),
    "nan": (np.full((4, 4, 3), np.nan), "floats must be in [0, 1]"),
    "beyond 1": (np.full((4, 4, 3), 1.5), "floats must be in [0, 1] (got 1.5 to 1.5)"),
    "channels first": (np.zeros((3, 40, 50), np.uint8), "channels come last in an array"),
    "two channels": (np.zeros((40, 50, 2), np.uint8), "expected [H W], [H W 3] or [H W 4]"),
    "tensor with channels last": (torch.zeros(40, 50, 3), "channels come first in a tensor"),
    "tensor without data": (torch.zeros(3, 8, 8, device="meta"), "expected a dense tensor of numbers (got torch"),
    "list in a list": ([RED], "<list>: expected a path"),
}  # fmt: skip
AUDIO = {
    "objects": (np.array([TONE, None], object), "(got object)"),
    "empty": (np.zeros(0, np.float32), "expected at least one"),
    "nan": (np.where(np.arange(16000) == 9000, np.nan, TONE), "not a finite sample"),
    "infinite": (np.full(16000, np.inf), "not a finite sample"),
    "beyond 1": (TONE * 30000, "floats must be in [-1, 1]"),
    "no rate": ({"array": TONE}, "expected 'sampling_rate' beside 'array'"),
    "square": (np.zeros((100, 100), np.float32), "at most 16 channels"),
}  # fmt: skip
WRONG = [(kind, source, message) for kind, table in (("classify", IMAGES), ("embed", IMAGES), ("transcribe", AUDIO))
         for source, message in table.values()]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "message"), WRONG)
def test_a_bad_item_is_one_line_and_the_others_keep_their_results(made, kind, source, message):
    good = TONE if kind == "transcribe" else RED
    first, wrong, last = (result for _, result in made[kind].many([good, source, good]))
    assert isinstance(wrong, MultimodalError)
    assert message in str(wrong)
    assert "\n" not in str(wrong)
    assert np.allclose(first, last, atol=1e-6) if kind == "embed" else first == last
    if kind != "embed":
        with pytest.raises(type(wrong), match=r"^[^\n]*$"):
            made[kind]([source] if kind == "classify" else source)


class Ends:
    """An iterator without a length that ends early."""

    def __init__(self, count: int):
        self.left = count

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return RED


@pytest.mark.parametrize("count", [0, 1, 33])
def test_an_iterator_that_ends_early_gives_what_it_gave(made, count):
    assert [key for key, _ in made["classify"].many(Ends(count))] == list(range(count))


@pytest.mark.parametrize("items", ["a.png", b"a"])
def test_what_cannot_be_iterated_is_refused_at_the_call(made, items):
    with pytest.raises(MultimodalError, match="items expected"):
        made["classify"].many(items)


def test_an_iterable_that_cannot_begin_raises_its_own_error(made):
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        made["classify"].many(Broken())


def test_a_stop_of_the_callers_iterator_passes(made):
    def items() -> Iterator[np.ndarray]:
        yield RED
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(made["classify"].many(items()))


@pytest.mark.parametrize("column", ["image", "path", "bytes"])
def test_columns_of_bad_items_are_rows_with_errors(made, column):
    found = made["classify"]({column: np.array([None, 3], object), "id": np.array([1, 2])})
    assert found["id"].tolist() == [1, 2]
    assert all("expected a path" in error for error in found["error"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be an integer of at least 1 \(got 0\)"),
        ({"workers": -1}, r"workers must be an integer of at least 1 \(got -1\)"),
    ],
)
@pytest.mark.parametrize("kind", [Classifier, Embedder])
def test_numbers_that_cannot_be_are_refused_by_the_constructor(made, kind, settings, message):
    labels = {"labels": ["red"]} if kind is Classifier else {}
    with pytest.raises(MultimodalError, match=message):
        kind(made["clip"], **labels, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"native": -1}, r"native must be an integer of at least 0 \(got -1\)"),
        ({"batch_tokens": 0}, "batch_tokens must"),
        ({"normalize": False}, r"normalize must be True or None: vectors of a CLIP have length 1 .* \(got False\)"),
        ({"batchsize": 2}, r"option 'batchsize': unknown, did you mean batch_size\? \(known: model, pooling, "),
    ],
)
def test_an_embedders_own_numbers_are_refused_by_its_constructor(made, settings, message):
    with pytest.raises(MultimodalError, match=message):
        Embedder(made["clip"], **settings)


def test_an_empty_batch_has_an_empty_result(made):
    embed, width = made["embed"], made["embed"].images([RED]).shape[1]
    assert made["classify"]([]) == []
    for vectors in (embed.images([]), embed.texts([]), embed({"text": []})["vector"], embed({"image": []})["vector"]):
        assert (vectors.shape, vectors.dtype) == ((0, width), np.float32)


@pytest.mark.parametrize("kind", ["classify", "transcribe"])
def test_a_file_opened_as_text_is_one_line(made, kind):
    with pytest.raises(MultimodalError, match="<TextIOWrapper>: expected a file opened in binary mode"):
        made[kind](io.TextIOWrapper(io.BytesIO(bytes(range(256))), "utf-8"))


def test_a_series_and_a_mapping_of_items_say_how_they_are_passed(made):
    series = type("Series", (), {"iloc": None, "ndim": 1})()
    for kind in ("classify", "transcribe"):
        with pytest.raises(MultimodalError, match=r'as {"path": series}, or the series in many\(\) \(got Series\)'):
            made[kind](series)
    with pytest.raises(MultimodalError, match=r"as a list \(got .*\); with keys: mapping.items\(\) and keyed=True"):
        made["classify"].many({"x": "photo.jpg"})
