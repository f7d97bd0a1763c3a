"""Classes of sources and their names: what is refused, and what is left out and named."""

import pytest
import torch

from multimodal.data.datasets.class_names import CaptionSampler, Concept, class_labels, class_names, speaks_of
from multimodal.data.sources import open_source
from multimodal.errors import DataError, UsageError
from tests.helpers.data import sets


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b'{"id": "dog", "names": "hound"}', "names is no list of texts"),  # was the class "h"
        (b'{"id": "dog", "names": [""]}', "names is no list of texts"),
        (b'{"id": "dog", "names": ["a"], "hypernyms": [1]}', "hypernyms is no list of texts"),
        (b"\xff\xd8\xff", "not UTF-8"), (b"\n", "empty"),
        (b'{"id": "dog", "names": ["a"]}\n{"id": "dog", "names": ["b"]}', "line 2: repeats the class 'dog'"),
    ],
)  # fmt: skip
def test_a_file_that_names_no_classes_is_refused(tmp_path, content, cause):
    (tmp_path / "classes.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=rf"classes\.jsonl.*{cause}"):
        class_names([tmp_path / "classes.jsonl"])
    with pytest.raises(UsageError, match="not a regular file"):
        class_names([tmp_path])


def test_files_beside_classes_and_empty_classes_are_named(tmp_path):
    data = sets.folder(tmp_path, range(10, 13))
    for name in ("e.png", "d.png", "c.png", "b.wav", "README.md", ".a.png"):
        (data / name).write_bytes(b"")
    (data / "class9").mkdir()
    (data / "class9" / "notes.txt").write_text("")
    with pytest.warns(UserWarning, match="class folders") as caught:
        assert open_source(data).labels == ("class0", "class1", "class2")
    assert [str(one.message).removeprefix(f"{data}: ") for one in caught] == [
        "class folders without images or audio files: class9",
        "images or audio files beside class folders, left out: b.wav, c.png, d.png and 1 more",
    ]


def test_columns_of_other_names_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no audio_filepath or .* or file \(columns: Image, Label\)"):
        open_source(sets.lines(tmp_path / "a.jsonl", [{"Image": "a.png", "Label": "x"}]))
    source = open_source(sets.lines(tmp_path / "b.jsonl", [{"image": "a.png", "Label": "x"}]))
    with pytest.raises(DataError, match=r"have no classes .* label column; columns: image, Label\)"):
        class_labels(source, "b.jsonl")


def test_a_captioned_image_is_at_times_said_to_be_of_the_classes_that_two_captions_name():
    man, dog, bicycle = Concept(("man", "guy"), ("person",)), Concept(("dog",)), Concept(("mountain bike",))
    captions = ("A man, on a mountain bike.", "a guy on a mountain bike beside his dog", "Someone rides")
    concepts = [Concept(captions, whole=True), Concept(("He runs",), whole=True), Concept(("a dog.",), whole=True)]
    sampler = CaptionSampler(concepts, ["one {}"], [man, dog, bicycle], 0.5)
    fits = sampler.fits()
    drawn = [[sampler.draw(number, torch.Generator().manual_seed(seed)) for seed in range(200)] for number in range(3)]
    for number, own in enumerate(drawn):
        assert all(fits[number, term] for term, _ in own)
    texts = [{text for _, text in own} for own in drawn]
    # one caption alone has the dog: never drawn, and no wrong caption either
    assert texts[0] == {*captions, "one man", "one guy", "one person", "one mountain bike"}
    assert fits[:, sampler.index["dog"]].tolist() == [True, False, True]
    assert 70 < sum(text in captions for _, text in drawn[0]) < 130
    assert texts[1:] == [{"He runs"}, {"a dog.", "one dog"}]


def test_a_caption_names_a_class_beside_punctuation_too():
    """So captions of held-out classes are left out."""
    names = [Concept(("dog",)), Concept(("Mountain Bike",))]
    assert all(speaks_of(text, names) for text in ("Is it a dog?", "a dog, a cat", "The mountain bike's wheel"))
    assert not any(speaks_of(text, names) for text in ("dogs", "a hot-dog", "a mountain, a bike"))
