"""A caller's autocast changes no result: prepared models have the number types of their `compute_type`."""

import numpy as np
import pytest
import torch

import multimodal
from multimodal.inference.modules import inference_mode
from tests.helpers.data.audio_files import first_words
from tests.helpers.spread import spread


def results() -> list:
    image = np.random.default_rng(0).integers(0, 255, (80, 100, 3), dtype=np.uint8)
    embedder, speech = multimodal.Embedder("clip-vit-16", compute_type="float32"), first_words(26_000)
    checkpoint = multimodal.load("clip-vit-16")
    asker = multimodal.Asker(compute_type="float32", max_new_tokens=4)
    return [
        multimodal.Classifier("clip-vit-16", ["a dog", "a cat"], compute_type="float32")([image]),
        embedder.images([image]).tolist(),
        embedder.texts(["a dog"]).tolist(),
        checkpoint.encode_image(image).tolist(),
        checkpoint.encode_text("a dog").tolist(),
        multimodal.Captioner(max_new_tokens=4, compute_type="float32")([image]),
        multimodal.Transcriber(compute_type="float32")(speech)["text"],
        multimodal.Transcriber("whisper-mini", compute_type="float32", language="en", vad_filter=True)(speech)["text"],
        multimodal.Translator(None, "en", "de", compute_type="float32")(["A dog runs."]),
        asker("What is this?", image),
        asker("Transcribe the recording.", speech),
    ]


@pytest.fixture(scope="module")
def plain() -> list:
    return results()


@pytest.mark.parametrize("kind", spread([torch.bfloat16, torch.float16], 2, pytest.mark.slow, pytest.mark.ci))
def test_autocast_of_the_caller_changes_nothing(kind, plain):
    with torch.autocast("cpu", kind):
        assert results() == plain


def test_the_mode_holds_inside_of_generators_alone():
    @inference_mode()
    def states():
        for _ in range(2):
            yield torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()

    with torch.autocast("cpu"):
        for state in states():
            assert state == (False, True)
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
