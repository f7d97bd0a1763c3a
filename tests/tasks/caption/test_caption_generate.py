"""Captions and continuations of models that were taught one thing."""

import pytest
import torch
from PIL import Image

from multimodal import caption, generate, load
from multimodal.blocks.stack import transformer
from multimodal.errors import TextError, UsageError
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.tasks.encode.images import pixels_of
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.tiny import teach

RECORD = Preprocessing((32, 32), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
CAPTIONS = {"red": "a red wall", "blue": "a deep blue sea", "lime": "a green field"}


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer.train([*CAPTIONS.values()] * 2, 300)


@pytest.fixture(scope="module")
def captioner(tokenizer) -> Checkpoint:
    """Trained in a second to tell three colours apart."""
    torch.manual_seed(0)
    image = ViTConfig((32, 32), 16, transformer(32, 1, 4, 64), "none", False)
    text = TextConfig(tokenizer.vocab_size, 16, transformer(32, 1, 4, 64, source_width=32), True, True)
    model = VisionEncoderDecoder(VisionEncoderDecoderConfig(image, text))
    pixels = pixels_of([Image.new("RGB", (40, 40), c) for c in CAPTIONS], RECORD)
    batch = tokenizer.batch(list(CAPTIONS.values()))
    return Checkpoint(teach(model, pixels, batch, 80), tokenizer, RECORD)


@pytest.mark.ci
@pytest.mark.parametrize("beam_size", [1, 3])
def test_captions_say_what_was_taught_and_batch_equals_single(captioner, beam_size, tmp_path):
    images = [Image.new("RGB", (60, 44), c) for c in CAPTIONS]
    together = caption(images, captioner, beam_size=beam_size)
    assert [r["caption"] for r in together] == list(CAPTIONS.values())
    for image, row in zip(images, together, strict=True):
        (alone,) = caption(image, captioner, beam_size=beam_size)
        assert alone["caption"] == row["caption"]
        assert alone["score"] == pytest.approx(row["score"], abs=1e-4)
    save_folder(captioner, tmp_path / "captioner")
    images[1].save(tmp_path / "blue.png")
    (read,) = caption(tmp_path / "blue.png", tmp_path / "captioner", beam_size=beam_size)
    assert read["caption"] == CAPTIONS["blue"]


def test_a_model_of_another_kind_is_refused(captioner):
    with pytest.raises(UsageError, match="expected a language model"):
        generate("a", captioner)
    assert caption([], captioner) == []


@pytest.mark.ci
def test_generate_is_greedy_or_seeded_and_keeps_within_the_context(tokenizer, tmp_path):
    torch.manual_seed(0)
    text = TextTransformer(TextConfig(tokenizer.vocab_size, 24, transformer(32, 2, 4, 64), True, True)).eval()
    save_folder(Checkpoint(text, tokenizer), tmp_path / "lm")
    model = load(tmp_path / "lm")
    assert generate("a red", model, max_new_tokens=12) == generate("a red", model, max_new_tokens=12)
    drawn = [generate("a red", model, max_new_tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = generate("a red", model, max_new_tokens=12)
    assert generate("a red", model, max_new_tokens=12, temperature=0.7, top_k=1) == greedy
    assert generate("a red", model, max_new_tokens=12, temperature=1.0, seed=1, top_p=0.3) != drawn[0]
    for options in ({"no_repeat_ngram": 1}, {"repetition_penalty": 50.0}):
        assert generate("a red", model, max_new_tokens=12, **options) != generate("a red", model, max_new_tokens=12)
    for options in ({"top_k": 3, "temperature": 0.0}, {"top_p": 0.0, "temperature": 1.0}, {"no_repeat_ngram": -1}):
        with pytest.raises(UsageError, match=next(iter(options))):
            generate("a", model, **options)
    with pytest.raises(TextError, match="context is 24"):
        generate("xyz" * 24, model)
    with pytest.raises(UsageError, match="temperature must be"):
        generate("a", model, temperature=-1.0)
