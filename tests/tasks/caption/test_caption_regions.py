"""Word regions of captions: on images of two colours, and through every kind of decoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.blocks.capture import capture_attention
from multimodal.blocks.stack import transformer
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.coca import CoCa
from multimodal.models.text_config import TextConfig
from multimodal.models.vision.git import GIT
from multimodal.models.vit import ViTConfig
from multimodal.tasks.caption.caption import CaptionWriter, prepared
from multimodal.tasks.caption.regions import RegionPlots, attention_by_head, words_of
from multimodal.tasks.encode.images import ImageBatch, pixels_of
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.weights.folder import Checkpoint
from tests.helpers import tiny
from tests.helpers.tiny import teach

COLOURS = {"red": (220, 30, 30), "blue": (30, 40, 220), "green": (30, 180, 40), "yellow": (230, 220, 30)}
PAIRS = [(a, b) for a in COLOURS for b in COLOURS if a != b]
RECORD = Preprocessing((32, 32), "squash", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
CHANCE = np.random.default_rng(0)


def halves(left: str, right: str) -> Image.Image:
    plain = np.repeat(np.array([[COLOURS[left]] * 24 + [COLOURS[right]] * 24]), 48, 0)
    pixels = plain + CHANCE.normal(0, 20, plain.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def batch_of(image: Image.Image | str) -> ImageBatch:
    return ImageBatch([image], pixels_of([image], RECORD), [])


@pytest.fixture(scope="module")
def captioner() -> Checkpoint:
    """Trained for seconds to name two colours from left to right. The encoder has no blocks, so that each patch tells
    of its own place alone."""
    torch.manual_seed(0)
    tokenizer = BytePairTokenizer.train([f"{a} left, {b} right" for a, b in PAIRS], 300)
    image = ViTConfig((32, 32), 8, transformer(32, 0, 4, 64), "none", False)
    text = TextConfig(tokenizer.vocab_size, 16, transformer(32, 1, 4, 64, source_width=32), True, True)
    model = VisionEncoderDecoder(VisionEncoderDecoderConfig(image, text))
    with torch.no_grad():  # places are to be learned at once
        model.image.positions.mul_(20)
        model.decoder.positions.mul_(20)
    pixels = pixels_of([halves(*pair) for pair in PAIRS * 2], RECORD)
    batch = tokenizer.batch([f"{a} left, {b} right" for a, b in PAIRS * 2])
    return Checkpoint(teach(model, pixels, batch, 150, 1e-2), tokenizer, RECORD)


@pytest.mark.ci
def test_a_colours_word_points_to_its_half(captioner):
    write = CaptionWriter(*prepared(captioner, "auto", None, {}))
    shares = []
    for left, right in PAIRS:
        (found,) = write.generated(batch_of(halves(left, right)), slice(None))
        assert found.captions[0].text == f"{left} left, {right} right"
        ids = [*write.prompt, *found.captions[0].ids]
        maps = attention_by_head(write.network, found.pixels, ids).mean((0, 1))
        words = dict(words_of(captioner.tokenizer, ids[1:]))
        for word, half in ((left, maps[words[left], :, :2]), (right, maps[words[right], :, 2:])):
            shares.append(float(half.sum() / maps[words[word]].sum()))
    assert min(shares) > 0.5
    assert sum(shares) / len(shares) > 0.7


@pytest.mark.ci
def test_the_image_of_the_regions_shows_where_words_are(captioner, tmp_path):
    """The overlay of "red" is hot on the left, the one of "blue" on the right."""
    halves("red", "blue").save(tmp_path / "two.png")
    write = CaptionWriter(*prepared(captioner, "auto", None, {}))
    file = str(tmp_path / "two.png")
    (found,) = write.generated(batch_of(file), slice(None))
    RegionPlots(write, {file: tmp_path / "out.png"}).draw(file, found)
    sheet = np.asarray(Image.open(tmp_path / "out.png").convert("RGB"), np.float32)
    height, width = sheet.shape[0], sheet.shape[1] // 5  # the image, red, left, blue, right
    plain, red, _, blue, _ = (sheet[: min(height, 320), i * width : i * width + 320] for i in range(5))
    change = [np.abs(tile - plain).mean((0, 2)) for tile in (red, blue)]
    assert change[0][:160].sum() > 3 * change[0][160:].sum()
    assert change[1][160:].sum() > 3 * change[1][:160].sum()


def test_words_are_put_together_from_their_tokens():
    tokenizer = BytePairTokenizer.train(["the dog the dog runs"] * 3, 262)
    ids = tokenizer.encode("the dog, überall")
    found = words_of(tokenizer, ids)
    assert [word for word, _ in found] == ["the", "dog,", "überall"]
    assert [place for _, places in found for place in places] == list(range(len(ids)))
    for word, places in found:
        assert tokenizer.decode([ids[place] for place in places]).strip() == word
    assert words_of(tokenizer, []) == []


@pytest.mark.parametrize("name", ["captioner", "captioner-bert", "git", "coca"])
def test_maps_are_shares_of_the_attention_in_every_kind(name):
    kind, config = tiny.ALL[name]
    image = replace(config.image, image=(8, 12), patch=4)
    model = tiny.randomized(kind(replace(config, image=image)))
    pixels, ids = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(1)), [1, 5, 9, 3, 7]
    before = model.decoding(model.encode(pixels[None]))
    with torch.no_grad():
        logits = before[0](torch.tensor([ids]), before[1])
    maps = attention_by_head(model, pixels, ids).mean((0, 1))
    assert maps.shape == (4, 2, 3)
    assert (maps > 0).all()
    assert (maps.sum((1, 2)) < 1).all()  # some goes to prefix tokens, or to the text
    assert not torch.allclose(maps[0], maps[1])
    expected = {GIT: by_prefix, CoCa: by_pool}.get(kind, by_cross)(model, pixels, ids)
    assert (maps.flatten(1) - expected).abs().max() < 1e-6
    again = model.decoding(model.encode(pixels[None]))
    with torch.no_grad():
        assert torch.equal(again[0](torch.tensor([ids]), again[1]), logits)


def captured(run) -> list[torch.Tensor]:
    with torch.no_grad(), capture_attention() as seen:
        run()
    return [weights[0].mean(0) for _, weights in seen]


def by_cross(model, pixels, ids):
    """Cross-attention is the second attention of each decoder block."""
    with torch.no_grad():
        source = model.encode(pixels[None])
    found = captured(lambda: model.decoder(torch.tensor([ids[:-1]]), source))
    return torch.stack(found[1::2]).mean(0)[:, -6:]


def by_prefix(model, pixels, ids):
    found = captured(lambda: model(pixels[None], torch.tensor([ids[:-1]])))[-2:]
    return torch.stack(found).mean(0)[-4:, 1:7]


def by_pool(model, pixels, ids):
    found = captured(lambda: model.outputs(pixels[None], torch.tensor([ids[:-1]])))
    queries = found[2]  # after the two blocks of the encoder
    crossed = torch.stack(found[-3::2]).mean(0)
    return (crossed @ queries[1:])[:, -6:]
