"""Images and sound among the tokens of one decoder: batched as alone, cached as whole, with inputs of any number."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from multimodal.blocks.connector import Connector, ConnectorConfig, pixel_shuffle
from multimodal.blocks.masks import padding
from multimodal.decoding.sampling import left_pad
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.system.records import from_record, to_record
from tests.helpers.tiny import ANY, ANYS, PICTURE, SOUND, made, randomized, stack

WORDS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [3, 4]]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def media_of(model: AnyToText, images: int, frames: list[int]) -> tuple[list[int], Tensor]:
    """Ids and rows of images, then of recordings with so many frames."""
    ids, rows = [], [torch.zeros(0, 16)]
    for number in range(images):
        rows += model.encode_images(noise(1, 3, 8, 12) + number)
        ids += [PICTURE] * len(rows[-1])
    if frames:
        features = [noise(20, 8) * (torch.arange(20) < count)[:, None] for count in frames]
        conformer = model.config.audio.__class__.__name__.startswith("Conformer")
        heard = model.encode_audio(
            torch.stack([one if conformer else one.mT for one in features]), torch.tensor(frames)
        )
        rows += heard
        ids += [SOUND for one in heard for _ in one]
    return [] if model.config.crosses else ids, torch.cat(rows)


@pytest.mark.parametrize("name", ["any", "any-conformer", "any-crossing"])
@torch.no_grad()
def test_batched_as_alone_with_inputs_of_every_number(name):
    model = made(name)
    items = [media_of(model, *given) for given in ((1, [13]), (0, []), (2, []), (0, [20, 9]))]
    texts = [[2, *ids, *words] for (ids, _), words in zip(items, WORDS, strict=True)]
    media = [rows for _, rows in items]
    lengths = torch.tensor([len(text) for text in texts])
    rows = torch.zeros(4, int(lengths.max()), dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    together = model(rows, media, padding(lengths, rows.shape[1]))
    for number, text in enumerate(texts):
        alone = model(torch.tensor([text]), [media[number]])[0]
        assert_close(together[number, : len(text)], alone, atol=1e-5, rtol=0)
    if not model.config.crosses:  # decoding pads on the left
        ids, start = left_pad(texts)
        cache = model.decoder.new_cache(start)
        last = model.decoder(ids, cache=cache, last=1, embedded=model.embed(ids, media))[:, 0]
        assert_close(last, torch.stack([together[i, n - 1] for i, n in enumerate(lengths)]), atol=1e-5, rtol=0)


@torch.no_grad()
def test_recordings_do_not_depend_on_their_neighbours():
    for name in ("any", "any-conformer"):
        model = made(name)
        _, rows = media_of(model, 0, [20, 9])
        alone = torch.cat([media_of(model, 0, [20])[1], media_of(model, 0, [9])[1]])
        assert_close(rows, alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_cached_as_whole():
    model = made("any")
    ids, rows = media_of(model, 1, [])
    whole = torch.tensor([[2, 3, *ids, 4, 5, *ids, 6]])
    media = torch.cat([rows, rows + 1])
    expected = model(whole, [media])
    cache, logits, used = model.decoder.new_cache(), [], 0
    for part in whole.split([4, 6, 3, whole.shape[1] - 13], 1):  # an image may be cut in two
        count = int(model.places(part).sum())
        logits.append(model.decoder(part, cache=cache, embedded=model.embed(part, [media[used : used + count]])))
        used += count
    assert_close(torch.cat(logits, 1), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_order_of_inputs_counts():
    for name in ("any", "any-crossing"):
        model = made(name)
        ids, rows = media_of(model, 2, [])
        half = len(rows) // 2
        text = torch.tensor([[2, *ids, 5, 6]])
        swapped = model(text, [torch.cat([rows[half:], rows[:half]])])
        assert (model(text, [rows]) - swapped)[0, -1].abs().max() > 1e-4


@torch.no_grad()
def test_state_before_the_last_block():
    model = made("any")
    images = noise(2, 3, 8, 12)
    states: list[Tensor] = []
    model.image.tokens(images, states=states)
    before = AnyToText(replace(ANY, image_layers=stack().layers - 1))
    before.load_state_dict(model.state_dict())
    expected = model.image_connector(states[-2][:, model.config.image.prefix :])
    assert_close(before.eval().encode_images(images), expected, atol=0, rtol=0)


def test_pixel_shuffle_is_a_convolution():
    x = noise(2, 4 * 6, 3)
    weight = noise(5, 3, 2, 2)
    image = x.mT.unflatten(-1, (4, 6))
    expected = torch.nn.functional.conv2d(image, weight, stride=2).flatten(2).mT
    shuffled = pixel_shuffle(x, (4, 6), 2)
    assert_close(shuffled @ weight.permute(0, 2, 3, 1).flatten(1).mT, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="a grid of 3 x 8 cannot merge by 2"):
        pixel_shuffle(x, (3, 8), 2)


@pytest.mark.parametrize(
    ("config", "states", "grid"),
    [
        (ConnectorConfig(8, 16, pool=2), 7, None),
        (ConnectorConfig(8, 16, stack=4), 7, None),
        (ConnectorConfig(8, 16, pool=2, stack=2), 9, None),
        (ConnectorConfig(8, 16, shuffle=2), 24, (4, 6)),
        (ConnectorConfig(8, 16, shuffle=2, positions=6), 24, (4, 6)),
        (ConnectorConfig(8, 16, resampler=stack(source_width=8), queries=5), 7, None),
    ],
)
def test_rows_are_counted(config, states, grid):
    assert randomized(Connector(config))(noise(2, states, 8), grid).shape == (2, config.count(states, grid), 16)


@torch.no_grad()
def test_each_row_gets_its_own_position():
    config = ConnectorConfig(8, 16, positions=4)
    connector = randomized(Connector(config))
    x = noise(1, 1, 8).expand(1, 4, 8)
    rows = connector(x)[0]
    assert_close(rows - rows[:1], connector.positions - connector.positions[:1], atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="5 rows are more than the 4 positions"):
        connector(noise(1, 5, 8))


@torch.no_grad()
def test_wrong_numbers_are_refused():
    model = made("any")
    with pytest.raises(ValueError, match="row 1 has 2 placeholders for 3 rows of media"):
        model(torch.tensor([[2, 3, 4], [SOUND, SOUND, 4]]), [torch.zeros(0, 16), torch.zeros(3, 16)])
    with pytest.raises(ValueError, match="no audio encoder"):
        made("any-image").encode_audio(noise(1, 8, 20), torch.tensor([20]))
    with pytest.raises(ValueError, match="audio: expected an encoder and its connector"):
        replace(ANY, audio=None)
    with pytest.raises(ValueError, match="placeholder 99"):
        replace(ANY, placeholders=(99,))


@pytest.mark.parametrize("name", ANYS)
def test_records_keep_the_encoder(name):
    config = ANYS[name]
    assert from_record(AnyToTextConfig, to_record(config), "config.json") == config
