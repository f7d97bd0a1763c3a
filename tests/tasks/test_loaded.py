"""Objects that load once: the same results as the functions, keys and order, errors in their place, threads."""

import inspect
import io
import pickle
from collections.abc import Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

import multimodal
from multimodal import Answerer, Asker, Captioner, Classifier, Embedder, Generator, Tagger, Transcriber, Translator
from multimodal.errors import AudioError, CheckpointError, DataError, ImageError, MultimodalError, TextError, UsageError
from multimodal.tasks.caption.options import CaptionOptions
from multimodal.tasks.encode import arguments as typed
from multimodal.tasks.encode.columns import source_column
from multimodal.tasks.encode.loaded import Items, check_on_error
from multimodal.tasks.text.options import AnswerOptions, GenerateOptions, TagOptions, TranslateOptions
from multimodal.tasks.transcribe.options import RecognizerOptions, WhisperOptions
from multimodal.tokens.text.tokenizer import TextCut, texts_of
from tests.helpers.folders import every_kind
from tests.helpers.spread import thin

pytestmark = pytest.mark.filterwarnings("ignore:text 1 has a translation that was cut", "ignore:.*the caption is empty")

RED, BLUE = (np.full((40, 50, 3), colour, np.uint8) for colour in ([255, 0, 0], [0, 0, 255]))
TONE = 0.3 * torch.sin(torch.arange(24000) / 8)


class Frame:
    """A frame like pandas': two dimensions, iterating over the names of its columns."""

    ndim = 2

    def __init__(self, **columns: list[str]):
        self.columns = columns

    def __iter__(self):
        return iter(self.columns)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    every_kind(folder)
    return folder


@pytest.fixture(scope="module")
def made(models):
    """An object of each class, with a call."""
    return {
        "classifier": (Classifier(models / "clip", ["red", "blue"]), lambda one: one(RED)),
        "captioner": (Captioner(models / "captioner", min_tokens=1, max_new_tokens=4), lambda one: one([RED, BLUE])),
        "embedder": (Embedder(models / "clip"), lambda one: one.images([RED]).tolist() + one.texts("red").tolist()),
        "generator": (Generator(models / "lm", max_new_tokens=4), lambda one: one("ab")),
        "translator": (Translator(models / "translator", "de", "en", beam_size=1), lambda one: one(["ab", ""])),
        "transcriber": (Transcriber(models / "asr", vad_filter=False), lambda one: one(TONE)),
    }


@pytest.mark.parametrize(("call", "cause"), [
    (
        lambda: inspect.unwrap(Classifier.__init__)(Classifier.__new__(Classifier), ["red"]),
        r"\['red'\]; for labels: labels=",
    ),
    (lambda: multimodal.translate("x", "de", "en"), "'de': is a language; name languages as source="),
])  # fmt: skip
def test_arguments_in_the_wrong_order_are_explained(call, cause):
    with pytest.raises(UsageError, match=cause):
        call()


KINDS = ("classifier", "captioner", "embedder", "generator", "translator", "transcriber")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_loads_its_own_model(kind, made):
    one, call = made[kind]
    again = pickle.loads(pickle.dumps(one))
    assert call(again) == call(one)
    assert again.__dict__.keys() == one.__dict__.keys()


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_queue(kind, made):
    one, call = made[kind]
    expected = call(one)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: call(one), range(8))) == [expected] * 8


@pytest.mark.parametrize("kind", [list, iter, lambda labels: dict.fromkeys(labels).keys()])
def test_a_pickle_has_the_arguments_of_the_construction(models, kind):
    labels = kind(["red", "blue"])
    one = Classifier(models / "clip", labels)
    if kind is list:
        labels[0] = "green"
    assert pickle.loads(pickle.dumps(one)).labels == one.labels == ["red", "blue"]
    assert issubclass(type("Mixed", (Classifier, Sized), {}), Classifier)  # as frameworks do


def test_a_pickle_of_a_missing_model_names_it(models, tmp_path):
    moved = tmp_path / "moved"
    moved.symlink_to(models / "clip")
    data = pickle.dumps(Classifier(moved, ["a"]))
    moved.unlink()
    again = pickle.loads(data)  # an error here would break a process pool, which reports no cause
    for use in (lambda: again(RED), lambda: again.many([RED])):
        with pytest.raises(MultimodalError, match="moved") as failed:
            use()
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)


def test_objects_own_their_weights(models):
    checkpoint = multimodal.load(models / "clip")
    one = Classifier(checkpoint, ["red", "blue"])
    before = one(RED)
    with torch.no_grad():
        for parameter in checkpoint.model.parameters():
            parameter.zero_()
    assert one(RED) == before


@pytest.mark.ci
def test_functions_equal_objects(models, made):
    assert multimodal.classify(RED, ["red", "blue"], models / "clip") == made["classifier"][0](RED)
    assert multimodal.caption(RED, models / "captioner", min_tokens=1, max_new_tokens=4) == made["captioner"][0](RED)
    assert multimodal.generate("ab", models / "lm", max_new_tokens=4) == made["generator"][0]("ab")
    expected = made["translator"][0]("ab")
    assert multimodal.translate("ab", models / "translator", "de", "en", beam_size=1) == expected
    assert multimodal.transcribe(TONE, models / "asr", vad_filter=False) == made["transcriber"][0](TONE)


def image_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["classifier", "captioner", "embedder"])
def test_many_images_keep_their_order_and_their_errors(kind, made, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(image_bytes(RED))
    items = [path, "absent.png", BLUE, image_bytes(RED), 3] * 20
    found = list(made[kind][0].many(items))
    assert [key for key, _ in found] == [
        item if isinstance(item, str | Path) else number for number, item in enumerate(items)
    ]
    assert [isinstance(result, ImageError) for _, result in found] == [False, True, False, False, True] * 20
    assert "absent.png: no such file" in str(found[1][1])


def test_keys_are_given_as_pairs(made):
    one = made["classifier"][0]
    assert [key for key, _ in one.many([("x", RED), ((1, 2), BLUE)], keyed=True)] == ["x", (1, 2)]
    for items, message in (
        ([("x", RED), ([], BLUE)], r"item 1: the key must be hashable \(got \[\]\)"),
        ([("x", RED), RED], r"item 1: expected \(key, source\)"),
    ):
        results = one.many(items, keyed=True)
        assert next(results)[0] == "x"
        with pytest.raises(UsageError, match=message):
            next(results)


@pytest.mark.parametrize("kind", ["classifier", "captioner", "embedder", "transcriber"])
def test_what_the_callers_generator_raises_comes_after_the_results(kind, made):
    def items():
        yield from [TONE if kind == "transcriber" else RED] * 3
        raise OSError("mine")

    results = made[kind][0].many(items())
    assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="mine"):
        next(results)


def test_on_error_raises_at_the_item(made):
    results = made["classifier"][0].many([RED, "absent.png", BLUE], on_error="raise")
    next(results)
    with pytest.raises(ImageError, match="absent"):
        next(results)
    with pytest.raises(UsageError, match="on_error must be return or raise"):
        check_on_error("skip")
    for items in ("a.png", {"a.png": RED}, Frame(text=["a", "b"])):
        with pytest.raises(UsageError, match="items expected several items"):
            made["classifier"][0].many(items)
    with pytest.raises(UsageError, match=r"prompts expected an iterable \(got 5\)"):
        Items(5, keyed=False, name="prompts")


def test_a_long_iterable_is_read_as_it_is_needed(made):
    taken = []

    def items():
        for number in range(1000):
            taken.append(number)
            yield RED

    results = made["classifier"][0].many(items())
    next(results)
    results.close()
    assert len(taken) <= 3 * 32 + 1


def test_urls_need_the_flag(made):
    (result,) = (result for _, result in made["classifier"][0].many(["https://example.org/a.png"]))
    assert isinstance(result, DataError)
    assert "URLs are read with urls=True" in str(result)
    with pytest.raises(DataError, match="urls=True"):
        made["transcriber"][0]("https://example.org/a.wav")


def test_transcripts_of_arrays(made):
    one = made["transcriber"][0]
    expected = one(TONE)
    items = [("tensor", TONE), ("pair", (16000, TONE.numpy())), ("none", np.zeros(0, np.float32)), ("no", "no.wav")]
    found = dict(one.many(items, keyed=True, in_order=False))
    assert found["tensor"] == found["pair"] == expected
    assert all(isinstance(found[key], AudioError) for key in ("none", "no"))
    assert one((TONE.numpy(), 16000)) == one((16000, TONE)) == expected
    assert one(TONE.numpy(), sampling_rate=8000)["duration"] == pytest.approx(3, abs=0.01)


def test_vectors_have_length_one(made, models):
    one = made["embedder"][0]
    images, texts = one.images([RED, BLUE]), one.texts(["red", "blue"])
    for vectors in (images, texts):
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert [type(result) for _, result in one.many(["red", "", 3, "blue"], "text")] == [
        np.ndarray, TextError, TextError, np.ndarray,
    ]  # fmt: skip
    np.testing.assert_allclose(np.stack([vector for _, vector in one.many(["red", "blue"], "text")]), texts, atol=1e-6)
    checkpoint = multimodal.load(models / "clip")
    np.testing.assert_allclose(checkpoint.encode_image([RED, BLUE]).numpy(), images, atol=1e-5)
    np.testing.assert_allclose(checkpoint.encode_text(["red", "blue"]).numpy(), texts, atol=1e-5)
    checkpoint.model.half()
    np.testing.assert_allclose(checkpoint.encode_image([RED, BLUE]).numpy(), images, atol=5e-3)
    with pytest.raises(UsageError, match="expected a CLIP"):
        Embedder(models / "lm").images([RED])


def test_a_checkpoints_first_steps(models):
    clip, asr = multimodal.load(models / "clip"), multimodal.load(models / "asr")
    assert clip.preprocess(RED).shape == (3, 32, 32)
    assert clip.tokenize(["a", "bcd"]).shape == clip.tokenize("bcd").repeat(2, 1).shape
    with pytest.raises(UsageError, match="expected a CLIP or ViT"):
        asr.encode_image(RED)
    with pytest.raises(UsageError, match="expected a CLIP"):
        asr.encode_text("a")
    with pytest.raises(CheckpointError, match=r"^expected a model of kind vit, .* \(got Sequential\)"):
        Classifier(replace(clip, model=torch.nn.Sequential(clip.model)), ["a"])
    with pytest.raises(UsageError, match=r"images must hold at least one image \(got 0\)"):
        clip.encode_image([])
    context = clip.model.config.text.context
    with pytest.warns(TextCut, match=f"cut to {context} tokens"):
        assert clip.tokenize("a dog " * 500).shape == (1, context)
    array = np.array(["a", "bcd"])
    assert clip.tokenize(array).equal(clip.tokenize(["a", "bcd"]))
    assert clip.encode_text(array).equal(clip.encode_text(["a", "bcd"]))


@pytest.mark.parametrize(
    "texts", [{"a", "b"}, frozenset("ab"), {"a": 1}, np.array("a dog"), np.array([["a"]]), Frame(a=["b"]), 5, b"a"]
)
def test_texts_without_an_order_are_refused(texts):
    with pytest.raises(TextError, match="texts: expected a list of texts"):
        texts_of(texts, "texts")


def test_a_probe_and_a_model_loaded_in_inference_mode_can_be_trained(models):
    with torch.inference_mode():
        checkpoint = multimodal.load(models / "clip")
    features = torch.cat([checkpoint.encode_image([RED, BLUE]), checkpoint.encode_text(["red", "blue"])])
    probe = torch.nn.Linear(features.shape[1], 2)
    probe(features).sum().backward()
    checkpoint.model(checkpoint.preprocess(RED)[None], checkpoint.tokenize("red")).sum().backward()
    assert checkpoint.model.logit_scale.grad is not None


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (typed.CaptionArguments, CaptionOptions.declared),
        (typed.GenerateArguments, GenerateOptions.declared),
        (typed.TranslateArguments, TranslateOptions.declared),
        (typed.TagArguments, TagOptions.declared),
        (typed.AnswerArguments, AnswerOptions.declared),
        (typed.TranscribeArguments, WhisperOptions.declared | RecognizerOptions.declared),
    ],
)
def test_typed_arguments_are_the_options(arguments, options):
    assert arguments.__annotations__.keys() | arguments.__optional_keys__ == options.keys()


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        (typed.CaptionerArguments, Captioner), (typed.ClassifierArguments, Classifier),
        (typed.EmbedderArguments, Embedder), (typed.GeneratorArguments, Generator),
        (typed.AskerArguments, Asker),
        (typed.TranslatorArguments, Translator), (typed.TaggerArguments, Tagger), (typed.AnswererArguments, Answerer),
    ],
)  # fmt: skip
def test_typed_arguments_are_those_of_the_constructor(arguments, made):
    parameters = inspect.signature(made.__init__).parameters.values()
    named = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    for one in parameters:
        if one.kind is one.VAR_KEYWORD:
            named |= get_args(one.annotation)[0].__optional_keys__
    assert named == arguments.__optional_keys__


def test_columns_in_columns_out(made, models, tmp_path):
    """As Ray Data, Spark and Dask call an object; an item that fails is a row with its error."""
    path = tmp_path / "a.png"
    path.write_bytes(image_bytes(RED))
    paths = {"path": np.array([str(path), "absent.png"], object), "id": np.array([7, 8])}
    one = made["classifier"][0]
    found = one(paths)
    assert list(found) == ["path", "id", "label", "score", "error"]
    assert found["label"].tolist() == [one(path)[0]["scores"][0]["label"], ""]
    assert found["score"][0] == pytest.approx(one(path)[0]["scores"][0]["score"])
    assert np.isnan(found["score"][1])
    assert found["error"].tolist() == ["", "absent.png: no such file (cannot be opened)"]
    data = {"bytes": np.array([image_bytes(RED), b"x"], object), "id": np.array([7, 8])}
    assert list(one(data)) == ["id", "label", "score", "error"]
    assert one({"image": np.stack([RED, BLUE])})["label"].tolist() == [
        one(i)[0]["scores"][0]["label"] for i in (RED, BLUE)
    ]
    assert made["captioner"][0](paths)["caption"].tolist() == [made["captioner"][0](RED)[0]["caption"], ""]
    vectors = made["embedder"][0](paths)["vector"]
    assert vectors.shape == (2, made["embedder"][0].images(RED).shape[1])
    np.testing.assert_array_equal(np.isnan(vectors).all(1), [False, True])
    for broken in ({"path": np.array(["absent.png"])}, {"text": np.array([""])}):
        assert made["embedder"][0](broken)["vector"].shape == (1, vectors.shape[1])
    assert made["embedder"][0]({"text": np.array(["red", ""], object)})["error"].tolist() == ["", "text 2: is empty"]
    spoken = made["transcriber"][0]({"audio": np.stack([TONE.numpy()] * 2)})
    assert spoken["text"].tolist() == [made["transcriber"][0](TONE)["text"]] * 2
    with pytest.raises(UsageError, match=r"batch expected a column bytes, image, audio, path, text \(got id\)"):
        one({"id": np.array([1])})
    for batch, cause in (
        (b"red", r"mapping of columns, as dict\(frame\) \(got bytes"),
        ({"text": "red"}, r"text: expected an array \(got str"),
        ({"path": ["a.png", "b.png"], "id": [7]}, r"expected columns of one length \(got path 2, id 1\)"),
        ({"path": ["a.png"], "score": [1.0], "error": [""]}, r"must be renamed \(got score, error\)"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=cause):
            source_column(batch, ("label", "score", "error"))
    with pytest.raises(UsageError, match=r"path: expected an array \(got str"):
        one({"path": "a.png"})
    frame = type("DataFrame", (), {"iloc": None})()
    for call in (one, made["transcriber"][0]):
        with pytest.raises(UsageError, match=r"mapping of columns, as dict\(frame\) \(got DataFrame\)"):
            call(frame)
    with pytest.raises(UsageError, match=r"must be renamed \(got text\)"):
        made["transcriber"][0]({"path": np.array(["a.wav"]), "text": np.array(["what was said"])})


class Series(list):
    """As pandas'."""

    ndim = 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(list(self), object)


class Arrow:
    """As pyarrow's array, or polars' series: without `ndim`, iterating over no strings."""

    def __init__(self, values: list[Any]):
        self.to_pylist = values.copy

    def __len__(self) -> int:
        return len(self.to_pylist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.to_pylist(), object)


@pytest.mark.parametrize("kind", [list, Series, Arrow])
def test_columns_may_be_lists_and_series(made, tmp_path, kind):
    classifier, path, spoken = made["classifier"][0], tmp_path / "a.png", made["transcriber"][0]
    path.write_bytes(image_bytes(RED))
    expected = classifier({"path": np.array([str(path)] * 2, object)})
    found = classifier({"path": kind([str(path)] * 2), "size": [[4, 4], [4, 4]]})
    np.testing.assert_array_equal(found["score"], expected["score"])
    assert found["size"].tolist() == [[4, 4], [4, 4]]
    assert found["path"].tolist() == [str(path)] * 2
    assert spoken({"audio": [TONE, TONE]})["text"].tolist() == [spoken(TONE)["text"]] * 2
