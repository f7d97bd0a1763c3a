"""Results that depend on neither of torch's defaults: another library's loading sets the type for all threads."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import multimodal
from tests.helpers.data.audio_files import first_words
from tests.helpers.spread import spread

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 60, 80, 3), dtype=np.uint8)


def results() -> dict[str, Any]:
    images, sound = list(PIXELS), first_words(26_000)
    captions = multimodal.Captioner("captioner-mini", max_new_tokens=8)
    whisper = multimodal.Transcriber("whisper-mini", word_timestamps=True, vad_filter=True)
    return {
        "embed": multimodal.Embedder("clip-vit-16").images(images),
        "native": multimodal.Embedder("clip-vit-16", native=64).images(images),
        "texts": multimodal.Embedder("sentence-mini").texts(["a dog", "two cats on a mat"]),
        "classify": [row["scores"] for row in multimodal.Classifier("clip-vit-16", ["noise", "a cat"])(images)],
        "caption": [row["caption"] for row in captions(images)],
        "whisper": whisper(sound)["text"],
        "conformer": multimodal.Transcriber("asr-conformer-en")(sound)["text"],
        "generate": multimodal.Generator("gpt-mini", max_new_tokens=8, seed=1)("A man"),
        "translate": multimodal.Translator("translator-mini", source="de", target="en")(["Ein Hund.", "Guten Tag"]),
    }


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return results()


@pytest.fixture(params=spread(["float64", "float16", "meta"], 3, pytest.mark.slow, pytest.mark.ci))
def changed(request: pytest.FixtureRequest, plain: dict[str, Any]) -> Iterator[None]:
    """Another default type, or device, once the results without it are there."""
    if request.param == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("changed")
def test_results_are_the_same(plain: dict[str, Any]):
    for name, found in results().items():
        np.testing.assert_array_equal(found, plain[name], name)
        assert not isinstance(found, np.ndarray) or found.dtype == np.float32, name
